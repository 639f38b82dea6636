"""The block sizes that are compiled into the loop."""

from specjax.state import Drafter

BLOCK_SIZES = (4, 8, 16, 24, 32, 48)


def ladder(drafter: Drafter) -> tuple[int, ...]:
    """Numbers of draft nodes that blocks are compiled for: 0 (a plain step), …, the whole draft.

    A round uses the smallest that holds every row's draft. Each one costs compile time, so by default there are few: a
    size close to the whole draft's would save next to nothing.
    """
    whole = drafter.num_nodes
    if whole == 0:
        return (0,)
    sizes = drafter.block_sizes or tuple(size for size in BLOCK_SIZES if size < 0.75 * (whole + 1))
    return (0, *sorted({size - 1 for size in sizes if 1 < size <= whole} | {whole}))
