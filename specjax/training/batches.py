"""Rendered conversations in rows of fixed length, and batches of those rows, read by `grain`.

Several conversations share a row: each is a segment with an id of its own and positions that start at 0 again, and
attends to itself alone. Which conversations share a row is decided once, not every epoch, so an epoch has the same
number of steps each time, and what was computed for a row once (a target's features, say) can be kept under its number.
"""

import hashlib
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import grain
import jax
import numpy as np
from jaxtyping import Bool, Int

from specjax.errors import InputError
from specjax.training.rendering import Rendered

OVERLONG = ("cut", "drop")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows of tokens. Numpy arrays; a pytree, so that it can be handed to a compiled function as it is.

    Attributes:
        tokens: 0 where there is padding.
        mask: supervised tokens, as in `rendering.Rendered`. The first token of a segment never is, so targets shifted
            by one do not cross from one segment into the next.
        segments: 1, 2, … for the conversations of a row, 0 for padding. Tokens attend within their segment.
        positions: of each token in its conversation, from 0; 0 for padding.
        rows: the number of each row in its `Rows`; -1 for rows that only fill up the last batch of an epoch.
    """

    tokens: Int[np.ndarray, "B T"]
    mask: Bool[np.ndarray, "B T"]
    segments: Int[np.ndarray, "B T"]
    positions: Int[np.ndarray, "B T"]
    rows: Int[np.ndarray, "B"]

    @property
    def num_supervised(self) -> int:
        """May be 0, where a process holds nothing but filler rows; such a batch has no gradient and is no fault."""
        return int(self.mask.sum())


@dataclass(frozen=True)
class Report:
    """What became of the conversations.

    Attributes:
        conversations: how many there were.
        cut: longer than a row, and cut to its length.
        dropped: longer than a row, and left out.
        unsupervised: left out because nothing supervised was left of them after the cut.
        rows: rows laid out.
        slots: tokens that the rows have room for.
        tokens: tokens in them.
        supervised: of which are supervised.
    """

    conversations: int
    cut: int
    dropped: int
    unsupervised: int
    rows: int
    slots: int
    tokens: int
    supervised: int

    @property
    def fill(self) -> float:
        """The share of slots that hold a token."""
        return self.tokens / self.slots

    def __str__(self) -> str:
        lost = [("cut", self.cut), ("dropped", self.dropped), ("without supervision after the cut", self.unsupervised)]
        extra = "".join(f", {count:,} {what}" for what, count in lost if count)
        return (
            f"{self.conversations:,} conversations{extra}; {self.rows:,} rows, {100 * self.fill:.1f}% full; "
            f"{self.tokens:,} tokens, {self.supervised:,} supervised"
        )


@dataclass(frozen=True, eq=False)
class Rows:
    """Conversations laid out in rows; made by `lay_out`. N tokens in all, C conversations.

    Attributes:
        tokens, mask: all conversations, one after the other.
        starts: where each begins; one more for the end.
        where: file and line of each.
        members: the conversations of each row, in their order.
        lengths: of each row, in tokens.
        report: what was kept and what was not.
    """

    tokens: Int[np.ndarray, "N"]
    mask: Bool[np.ndarray, "N"]
    starts: Int[np.ndarray, "C+1"]
    where: tuple[str, ...]
    members: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    report: Report

    def __len__(self) -> int:
        return len(self.members)

    def batch(self, rows: Sequence[int], length: int | None = None) -> Batch:
        """The batch of these rows, all of one length; -1 stands for a row of padding.

        `length` is needed where there are no others.
        """
        real = [row for row in rows if row >= 0]
        width = self.lengths[real[0]] if real else length or max(self.lengths)
        tokens, segments, positions = np.zeros((3, len(rows), width), np.int32)
        mask = np.zeros((len(rows), width), bool)
        for b, row in enumerate(rows):
            at = 0
            for segment, member in enumerate(self.members[row] if row >= 0 else (), 1):
                start, end = self.starts[member : member + 2]
                place = slice(at, at + end - start)
                tokens[b, place], mask[b, place] = self.tokens[start:end], self.mask[start:end]
                segments[b, place], positions[b, place] = segment, np.arange(end - start)
                at = place.stop
        return Batch(tokens, mask, segments, positions, np.asarray(rows, np.int32))

    def describe(self, batch: Batch) -> list[str]:
        """File and line of every conversation in a batch, for messages about it."""
        return [self.where[member] for row in batch.rows.tolist() if row >= 0 for member in self.members[row]]

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that change with tokens, mask and layout: what a resumed run must find again."""
        digest = hashlib.sha256()
        for part in (self.tokens, self.mask, self.starts):
            digest.update(part.tobytes())
        digest.update(repr((self.members, self.lengths)).encode())
        return digest.hexdigest()[:16]


def lay_out(
    rendered: Sequence[Rendered], length: int, overlong: str = "cut", buckets: Sequence[int] | None = None
) -> Rows:
    """Put conversations into rows.

    Args:
        rendered: the conversations.
        length: of a row; of the longest rows, with buckets.
        overlong: what to do with conversations longer than that: "cut" keeps their beginning, "drop" leaves them out.
        buckets: shorter row lengths. With them (an empty list will do) nothing is packed: each conversation has a row
            to itself, of the smallest length that holds it. None packs: best fit, the longest conversations first.

    Raises:
        InputError: lengths that cannot be, or nothing left.
    """
    if length < 2:
        raise InputError(f"row length {length}: expected at least 2, a token and the one it predicts")
    if overlong not in OVERLONG:
        raise InputError(f"overlong is {overlong!r}; expected one of {', '.join(OVERLONG)}")
    if wrong := [size for size in buckets or () if not 2 <= size < length]:
        raise InputError(f"bucket length {wrong[0]}: expected at least 2 and less than the row length {length}")
    if not rendered:
        raise InputError("no conversations to learn from")
    sizes = [len(r.ids) for r in rendered]
    too_long = [size > length for size in sizes]
    kept = [r for r, long in zip(rendered, too_long, strict=True) if not (long and overlong == "drop")]
    learned = [r for r in kept if r.mask[:length].any()]
    if not learned:
        raise InputError(
            f"none of the {len(rendered)} conversations has a supervised token within the row length {length}; "
            f"raise it (the longest has {max(sizes)} tokens)"
        )
    sizes = [min(len(r.ids), length) for r in learned]
    if buckets is None:
        members = _pack(sizes, length)
        lengths = [length] * len(members)
    else:
        steps = sorted({*buckets, length})
        members = [[n] for n in range(len(learned))]
        lengths = [steps[bisect_left(steps, size)] for size in sizes]
    mask = np.concatenate([r.mask[:length] for r in learned])
    report = Report(
        conversations=len(rendered),
        cut=sum(len(r.ids) > length for r in learned),
        dropped=len(rendered) - len(kept),
        unsupervised=len(kept) - len(learned),
        rows=len(members),
        slots=sum(lengths),
        tokens=sum(sizes),
        supervised=int(mask.sum()),
    )
    return Rows(
        tokens=np.concatenate([r.ids[:length] for r in learned]),
        mask=mask,
        starts=np.cumsum([0, *sizes]),
        where=tuple(r.where for r in learned),
        members=tuple(map(tuple, members)),
        lengths=tuple(lengths),
        report=report,
    )


def steps_per_epoch(rows: Rows, batch_size: int) -> int:
    """Batches in an epoch: those of one row length together, the last of each filled up."""
    return sum(ceil(len(group) / batch_size) for group in _groups(rows).values())


def batches(
    rows: Rows,
    batch_size: int,
    seed: int = 0,
    num_epochs: int | None = None,
    shuffle: bool = True,
    process: int = 0,
    num_processes: int = 1,
) -> grain.IterDataset[Batch]:
    """Batches for training. The same arguments give the same batches, bit for bit.

    An epoch has every row once, in an order that follows from the seed and the number of the epoch. Its last batch (the
    last of each row length) is filled up with rows of padding. `iter()` of the result has `get_state` and `set_state`;
    a state is the number of batches read, and Orbax stores it through `grain.checkpoint`.

    With several processes, all of them plan the same batches and each builds its own `batch_size / num_processes` rows
    of each, the order of which is that of `jax.make_array_from_process_local_data`. So a batch does not depend on the
    number of processes, and none of them runs out before the others.

    Args:
        rows: what `lay_out` made; the same in every process.
        batch_size: rows of a batch, of all processes together.
        seed: of the order.
        num_epochs: None for no end.
        shuffle: False for the order of `rows`.
        process, num_processes: `jax.process_index()`, `jax.process_count()`.

    Raises:
        InputError: numbers that cannot be.
    """
    if batch_size < 1 or num_processes < 1 or batch_size % num_processes:
        raise InputError(f"batch size {batch_size}: expected a multiple of the number of processes, {num_processes}")
    if not 0 <= process < num_processes:
        raise InputError(f"process {process}: expected 0 to {num_processes - 1}")
    if num_epochs is not None and num_epochs < 1:
        raise InputError(f"{num_epochs} epochs: expected at least 1, or None for no end")
    if seed < 0:
        raise InputError(f"seed {seed}: expected 0 or more")
    share = batch_size // num_processes
    mine = slice(process * share, (process + 1) * share)

    def build(planned: tuple[int, list[int]]) -> Batch:
        length, numbers = planned
        return rows.batch([*numbers, *[-1] * (batch_size - len(numbers))][mine], length)

    planned = []
    for length, group in _groups(rows).items():
        numbers = grain.MapDataset.source(group)
        if shuffle:
            numbers = numbers.shuffle(_seed(seed, length))
        planned.append(numbers.batch(batch_size, batch_fn=lambda chosen, length=length: (length, list(chosen))))
    plan = grain.MapDataset.concatenate(planned)
    if shuffle and len(planned) > 1:
        plan = plan.shuffle(_seed(seed, 0))
    # a batch is built in well under a millisecond, from memory: threads would only get in the way
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return plan.repeat(num_epochs).map(build).to_iter_dataset(options)


def _groups(rows: Rows) -> dict[int, list[int]]:
    """Row length -> the rows that have it."""
    groups = defaultdict(list)
    for row, length in enumerate(rows.lengths):
        groups[length].append(row)
    return dict(sorted(groups.items()))


def _seed(*numbers: int) -> int:
    """One seed out of several; grain adds the epoch to it, so seeds that are neighbours must not stay neighbours."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def _pack(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Best fit, the largest first: each item goes to the fullest row that has room for it."""
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = defaultdict(list)  # room left -> rows
    rooms: list[int] = []  # the keys of `with_room`, in order
    for item in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        at = bisect_left(rooms, sizes[item])
        if at == len(rooms):
            room, row = capacity, len(rows)
            rows.append([])
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        rows[row].append(item)
        left = room - sizes[item]
        if left:
            if left not in with_room:
                insort(rooms, left)
            with_room[left].append(row)
    return rows
