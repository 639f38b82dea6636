"""Rows and batches: packing, buckets, over-long conversations, order, resuming, processes."""

from collections import Counter
from itertools import islice
from typing import Any

import jax
import numpy as np
import pytest

from specjax.errors import InputError
from specjax.training.batches import Batch, Rows, batches, lay_out, steps_per_epoch
from specjax.training.rendering import Rendered


def rendered(*sizes: int, prompt: int = 1) -> list[Rendered]:
    """Conversations whose tokens say where they are from: 100 times the conversation's number, plus the position."""
    made = []
    for n, size in enumerate(sizes, 1):
        mask = np.arange(size) >= prompt
        made.append(Rendered((100 * n + np.arange(size)).astype(np.int32), mask, f"data, line {n}"))
    return made


def random_rows(count: int = 40, length: int = 24, **options: Any) -> Rows:
    sizes = np.random.default_rng(0).integers(3, length + 1, count)
    return lay_out(rendered(*sizes.tolist()), length, **options)


def same(a: Batch, b: Batch) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_packing_by_hand() -> None:
    rows = lay_out(rendered(5, 3, 2, 7), 8)
    assert rows.members == ((3,), (0, 1), (2,))
    batch = rows.batch([1, 2])
    assert batch.tokens.tolist() == [[100, 101, 102, 103, 104, 200, 201, 202], [300, 301, 0, 0, 0, 0, 0, 0]]
    assert batch.segments.tolist() == [[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 0, 0, 0, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert batch.mask.astype(int).tolist() == [[0, 1, 1, 1, 1, 0, 1, 1], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert batch.rows.tolist() == [1, 2]
    assert batch.num_supervised == 7
    assert rows.describe(batch) == ["data, line 1", "data, line 2", "data, line 3"]
    report = rows.report
    assert (report.conversations, report.rows, report.slots, report.tokens, report.supervised) == (4, 3, 24, 17, 13)
    assert str(report) == "4 conversations; 3 rows, 70.8% full; 17 tokens, 13 supervised"


def test_packing_keeps_everything_once() -> None:
    sizes = np.random.default_rng(0).integers(3, 60, 200).tolist()
    rows = lay_out(rendered(*sizes), 100)
    assert sorted(n for row in rows.members for n in row) == list(range(200))
    batch = rows.batch(range(len(rows)))
    assert Counter(batch.tokens[batch.segments > 0].tolist()) == Counter(rows.tokens.tolist())
    assert rows.report.fill > 0.98
    # targets shifted by one never come out of another segment
    crossing = batch.segments[:, 1:] != batch.segments[:, :-1]
    assert not batch.mask[:, 1:][crossing].any()


def test_buckets() -> None:
    rows = lay_out(rendered(5, 3, 8, 4, 2), 8, buckets=[4, 6])
    assert rows.members == ((0,), (1,), (2,), (3,), (4,))
    assert rows.lengths == (6, 4, 8, 4, 4)
    assert lay_out(rendered(5, 3), 8, buckets=[]).lengths == (8, 8)
    assert steps_per_epoch(rows, 2) == 4
    shapes = Counter(batch.tokens.shape for batch in batches(rows, 2, num_epochs=1))
    assert shapes == {(2, 4): 2, (2, 6): 1, (2, 8): 1}


def test_over_long_conversations() -> None:
    """Cut or left out, as asked, and counted; what has no supervised token within the row cannot be learned from."""
    given = [*rendered(12, 6), *rendered(12, prompt=9)]
    cut = lay_out(given, 8)
    assert (cut.report.cut, cut.report.dropped, cut.report.unsupervised) == (1, 0, 1)
    assert cut.tokens.tolist() == [*range(100, 108), *range(200, 206)]
    assert "1 cut, 1 without supervision after the cut" in str(cut.report)
    dropped = lay_out(given, 8, overlong="drop")
    assert (dropped.report.cut, dropped.report.dropped, dropped.report.unsupervised) == (0, 2, 0)
    assert dropped.tokens.tolist() == list(range(200, 206))
    for overlong in ("cut", "drop"):
        with pytest.raises(InputError, match=r"none of the 1 conversations .* row length 8; raise it .* 12 tokens"):
            lay_out(given[2:], 8, overlong=overlong)


@pytest.mark.parametrize("buckets", [None, [12, 18]], ids=["packed", "buckets"])
def test_an_epoch_has_every_row_once(buckets: list[int] | None) -> None:
    rows = random_rows(buckets=buckets)
    steps = steps_per_epoch(rows, 4)
    read = list(batches(rows, 4, seed=1, num_epochs=3))
    assert len(read) == 3 * steps
    orders = []
    for epoch in range(3):
        numbers = [n for batch in read[epoch * steps : (epoch + 1) * steps] for n in batch.rows.tolist()]
        assert sorted(n for n in numbers if n >= 0) == list(range(len(rows)))
        orders.append(tuple(numbers))
    other = tuple(n for batch in batches(rows, 4, seed=2, num_epochs=1) for n in batch.rows.tolist())
    assert len({*orders, other}) == 4
    # the last batch of a row length is filled up with rows of padding
    fillers = [(batch.segments[batch.rows < 0], batch.mask[batch.rows < 0]) for batch in read]
    assert not any(segments.any() or mask.any() for segments, mask in fillers)


def test_in_order() -> None:
    rows = lay_out(rendered(*[4] * 7), 4)
    read = list(batches(rows, 3, shuffle=False, num_epochs=2))
    assert [batch.rows.tolist() for batch in read] == [[0, 1, 2], [3, 4, 5], [6, -1, -1]] * 2


@pytest.mark.parametrize("buckets", [None, [12, 18]], ids=["packed", "buckets"])
def test_resuming_is_exact(buckets: list[int] | None) -> None:
    """From any step, in the middle of an epoch and at its border, by a new iterator over data read anew."""
    rows = random_rows(buckets=buckets)
    steps = steps_per_epoch(rows, 4)
    whole = list(islice(batches(rows, 4, seed=3), 2 * steps + 3))
    again = list(islice(batches(random_rows(buckets=buckets), 4, seed=3), 2 * steps + 3))
    assert all(map(same, whole, again))
    for at in (0, 1, steps - 1, steps, 2 * steps):
        first = iter(batches(rows, 4, seed=3))
        assert all(map(same, islice(first, at), whole))
        second = iter(batches(random_rows(buckets=buckets), 4, seed=3))
        second.set_state(first.get_state())
        assert all(map(same, second, whole[at:]))
        assert second.get_state() != first.get_state()


def test_fingerprint() -> None:
    """What a resumed run compares: tokens, mask and layout."""
    prints = [random_rows().fingerprint, random_rows(buckets=[12]).fingerprint, random_rows(39).fingerprint]
    prints += [lay_out(rendered(6, 6), 8).fingerprint, lay_out(rendered(6, 6, prompt=2), 8).fingerprint]
    assert len(set(prints)) == 5
    assert random_rows().fingerprint == prints[0]
    assert len(prints[0]) == 16


@pytest.mark.parametrize("buckets", [None, [12, 18]], ids=["packed", "buckets"])
def test_processes_share_each_batch(buckets: list[int] | None) -> None:
    """The parts of all processes, one after the other, are the batch of a single process."""
    rows = random_rows(count=37, buckets=buckets)
    alone = list(batches(rows, 6, seed=5, num_epochs=2))
    parts = [list(batches(rows, 6, seed=5, num_epochs=2, process=p, num_processes=3)) for p in range(3)]
    assert [len(part) for part in parts] == [len(alone)] * 3
    for whole, *shares in zip(alone, *parts, strict=True):
        assert same(whole, jax.tree.map(lambda *xs: np.concatenate(xs), *shares))
    assert all(batch.tokens.shape[0] == 2 for part in parts for batch in part)


def test_a_batch_without_supervision() -> None:
    """What the last process gets when the rows of an epoch run out: all padding, of the right shape, and countable."""
    rows = lay_out(rendered(8, 8, 8), 8)
    batch = next(iter(batches(rows, 8, process=3, num_processes=4)))
    assert batch.tokens.shape == batch.mask.shape == (2, 8)
    assert batch.rows.tolist() == [-1, -1]
    assert batch.num_supervised == 0
    assert rows.describe(batch) == []


def test_a_batch_goes_through_jit() -> None:
    rows = random_rows()
    traces = []

    @jax.jit
    def count(batch: Batch) -> jax.Array:
        traces.append(1)
        return batch.mask.sum()

    assert [int(count(b)) for b in batches(rows, 4, num_epochs=2)] == [
        b.num_supervised for b in batches(rows, 4, num_epochs=2)
    ]
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"length": 1}, "row length 1"),
        ({"overlong": "split"}, "overlong is 'split'"),
        ({"buckets": [8]}, "bucket length 8"),
        ({"buckets": [1]}, "bucket length 1"),
        ({"rendered": []}, "no conversations"),
    ],
)
def test_layouts_that_cannot_be(options: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError, match=part):
        lay_out(**{"rendered": rendered(4), "length": 8, **options})


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"batch_size": 0}, "batch size 0"),
        ({"num_processes": 3}, "batch size 4: expected a multiple of the number of processes, 3"),
        ({"num_processes": 2, "process": 2}, "process 2: expected 0 to 1"),
        ({"num_epochs": 0}, "0 epochs"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_batches_that_cannot_be(options: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError, match=part):
        batches(lay_out(rendered(4), 8), **{"batch_size": 4, **options})
