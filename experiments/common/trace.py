"""A round trace as data and as text: what was proposed, what of it was accepted, where committed tokens came from."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


ACCEPTED, BONUS, CORRECTED, PLAIN_STEP = "accepted", "bonus", "corrected", "plain"
"""Where a token came from: the draft; the target, after a whole path of the draft was accepted, after a guess of it was
rejected, or in a round that proposed nothing."""


def sources(round: Mapping[str, Any]) -> list[str]:
    """Where each committed token of a round, as in results.json, came from."""
    accepted, committed = round["accepted"], round["committed"]
    if len(committed) <= len(accepted):  # a stop ended the text inside the draft
        return [ACCEPTED] * len(committed)
    end = accepted[-1] if accepted else -1
    drafted = CORRECTED if end in parents_of(round) else BONUS
    return [ACCEPTED] * len(accepted) + [drafted if round["proposed"] else PLAIN_STEP]


def guesses(round: Mapping[str, Any]) -> list[tuple[int, list[int]]]:
    """The tokens that were proposed and not committed, each once: lines of tokens that follow each other.

    Returns:
        For each line, how many nodes of the draft stand above its first token, and the tokens.
    """
    parents, kept = parents_of(round), set(round["accepted"])
    lines: list[tuple[int, list[int]]] = []
    line_of: dict[int, list[int]] = {}  # of the last node of each line
    depth = {-1: 0}
    for node, (token, parent) in enumerate(zip(round["proposed"], parents, strict=True)):
        depth[node] = depth[parent] + 1
        if node in kept:
            continue
        line = line_of.pop(parent, None)
        if line is None:
            line = []
            lines.append((depth[node] - 1, line))
        line.append(token)
        line_of[node] = line
    return lines


def parents_of(round: Mapping[str, Any]) -> Sequence[int]:
    """Each node's parent, of a round as in results.json; -1 is the pending token."""
    return round.get("parents", range(-1, len(round["proposed"]) - 1))


def token_texts(tokenizer: Any, ids: Iterable[int]) -> dict[int, str]:
    """How tokens read by themselves: their text, the bytes of half a character as `\\xe2`; special ones by name."""
    each, names = tokenizer.token_bytes(), tokenizer.tokens()
    return {
        i: (each[i].decode("utf-8", "backslashreplace") or names[i]) if i < len(each) else "" for i in sorted(set(ids))
    }


def ids_of(prompts: Iterable[Mapping[str, Any]]) -> Iterator[int]:
    """Every token id in the prompts of a results.json."""
    for prompt in prompts:
        yield from prompt["prompt_ids"]
        for output in prompt["outputs"]:
            yield from output["token_ids"]
            for round in output["rounds"]:
                yield from round["proposed"]


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
