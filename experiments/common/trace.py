"""A round trace as text: what was proposed, what of it was accepted, what was committed."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specjax import Round


def rounds_as_data(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """For results.json. `parents` only where the draft is no chain."""
    return [
        {
            "proposed": r.proposed,
            **({} if is_chain(r) else {"parents": r.parents}),
            "accepted": r.accepted,
            "committed": r.committed,
            "block_tokens": r.block_tokens,
        }
        for r in rounds
    ]


def is_chain(round: Round) -> bool:
    return round.parents == list(range(-1, len(round.parents) - 1))


def rounds_as_text(rounds: Sequence[Round], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """One line a round. Accepted tokens come as they are, rejected ones in brackets, the bonus token after the arrow.

    In a tree, a node that does not follow the one before it is led by `<` and the place of its parent (0 = pending).
    """
    for i, r in enumerate(rounds, 1):
        draft = []
        for node, (token, parent) in enumerate(zip(r.proposed, r.parents, strict=True)):
            word = repr(decode([token]))
            if parent != node - 1:
                word = f"<{parent + 1} {word}"
            draft.append(word if node in r.accepted else f"[{word}]")
        new = [repr(decode([t])) for t in r.committed[len(r.accepted) :]]
        yield (
            f"{i:4}  block {r.block_tokens:2}  accepted {len(r.accepted):2} of {len(r.proposed):2}  "
            f"{' '.join(draft) or '–'}  → {' '.join(new) or '(stop)'}"
        )
