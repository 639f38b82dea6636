"""Which positions are trained: the mask moves with the targets, and conversations of one row do not meet."""

import numpy as np
import pytest

from specjax.errors import InputError
from specjax.training.batches import Batch, lay_out
from specjax.training.rendering import Rendered
from specjax.training.supervised import Supervised, room


def packed() -> Batch:
    """Random rows of conversations; among them a row that is full, one of padding alone and one unsupervised."""
    random = np.random.default_rng(0)
    batch, size = 6, 24
    segments = np.zeros((batch, size), np.int32)
    positions = np.zeros((batch, size), np.int32)
    for row in range(batch - 1):
        at = 0
        for segment, length in enumerate(random.integers(1, 9, 9 if row == 0 else 3), 1):
            end = min(at + length, size)
            segments[row, at:end], positions[row, at:end] = segment, np.arange(end - at)
            at = end
    tokens = np.where(segments > 0, random.integers(1, 50, segments.shape), 0).astype(np.int32)
    mask = (positions > 0) & (random.random(segments.shape) < 0.6)
    mask[3] = False
    return Batch(tokens, mask, segments, positions, np.arange(batch, dtype=np.int32))


@pytest.mark.parametrize("shift", [1, 2, 5, 30])
@pytest.mark.parametrize("capacity", [None, 3, 16, 24])
def test_positions(shift: int, capacity: int | None) -> None:
    batch = packed()
    found = Supervised.of(batch, shift, capacity)
    missed = 0
    for row in range(len(batch.tokens)):
        expected = [
            (t, batch.tokens[row, t + shift])
            for t in range(batch.tokens.shape[1] - shift)
            if batch.mask[row, t + shift] and batch.segments[row, t] == batch.segments[row, t + shift]
        ]
        missed += max(len(expected) - (capacity or 24), 0)
        valid = np.asarray(found.valid[row])
        pairs = zip(np.asarray(found.index[row])[valid], np.asarray(found.labels[row])[valid], strict=True)
        assert list(pairs) == expected[:capacity]
        assert (np.asarray(found.labels[row])[~valid] == 0).all()
    assert found.missed == missed
    assert found.count == found.valid.sum()
    assert (found.count > 0) == (shift < 24)
    if shift < 24:
        ahead = found.at(batch.tokens, shift)
        np.testing.assert_array_equal(np.where(found.valid, ahead, 0), found.labels)
    features = np.random.default_rng(1).standard_normal((*batch.tokens.shape, 3))
    np.testing.assert_allclose(found.at(features)[2, 1], features[2, found.index[2, 1]], rtol=1e-6)


def test_room_holds_every_supervised_token() -> None:
    texts = [Rendered(np.arange(1, n + 1), np.arange(n) >= n - m, f"{n}") for n, m in [(9, 5), (7, 6), (12, 1), (3, 2)]]
    rows = lay_out(texts, 16)
    most = max(rows.batch([i]).num_supervised for i in range(len(rows)))
    assert room(rows, 1) == most
    assert room(rows, 8) == -(-most // 8) * 8
    assert Supervised.of(rows.batch(range(len(rows))), 1, room(rows, 1)).missed == 0


def test_bad_input() -> None:
    for shift, capacity in ((0, None), (1, 0)):
        with pytest.raises(InputError, match="1 or more"):
            Supervised.of(packed(), shift, capacity)
