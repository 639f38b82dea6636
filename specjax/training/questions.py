"""Questions out of nothing: a chat model that sees only the opening of a user's turn writes what a user would say
(Magpie, Xu et al. 2024).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from specjax.errors import InputError
from specjax.models.target import Target
from specjax.models.tokenizer import Tokenizer
from specjax.training.answers import Answer

MARK = "QQQQ"
# how a user's text may begin: what all of these have in common is before it
BEGINNINGS = ("What", "how", "I", "5", "(", '"')
FAULTS = {
    "unfinished": "no end of the turn within the cap",
    "empty": "nothing but blanks",
    "broken": "special tokens or damaged characters inside",
    "looping": "the same few tokens over and over",
    "repeated": "an earlier question says the same",
}


@dataclass(frozen=True, eq=False)
class UserTurn:
    """A user's turn as the template writes it.

    Attributes:
        target: the target, for which the end of a user's turn ends a text.
        opening: ids up to where the user's text begins.
        stop: what ends the turn, where that is no token of its own.
    """

    target: Target
    opening: list[int]
    stop: tuple[str, ...]


def user_turn(target: Target, options: Mapping[str, Any]) -> UserTurn:
    """How the target's template opens and closes a user's turn.

    The opening ends before the first token that depends on the text. The turn ends at the special token that follows
    the text; where ordinary text follows, at that text.

    Args:
        options: variables for the template.

    Raises:
        InputError: no template, or one that writes a user's text otherwise than once, or nothing after it.
    """
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise InputError("questions from nothing need a tokenizer and a chat template, and this target has none")
    name = tokenizer.source

    def render(text: str) -> str:
        return tokenizer.render_chat([{"role": "user", "content": text}], **options)

    if render(MARK).count(MARK) != 1:
        raise InputError(f"{name}: its chat template does not write a user's text just once; give prompts instead")
    before, _, closing = render(MARK).partition(MARK)
    texts = [_encode(tokenizer, before + text) for text in BEGINNINGS]
    common = takewhile(lambda ids: len(set(ids)) == 1, zip(*texts, strict=False))
    opening = [ids[0] for ids in common]
    if not opening or not closing.strip():
        missing = "before" if not opening else "after"
        raise InputError(f"{name}: its chat template writes nothing {missing} a user's text; give prompts instead")
    first = _encode(tokenizer, closing.lstrip())[0]
    if first in target.eos_token_ids:
        return UserTurn(target, opening, ())
    if first < len(tokenizer.token_bytes()) and not tokenizer.token_bytes()[first]:
        return UserTurn(replace(target, eos_token_ids=(*target.eos_token_ids, first)), opening, ())
    return UserTurn(target, opening, (closing.rstrip(),))


def find_fault(tokenizer: Tokenizer, question: Answer, seen: set[str]) -> str | None:
    """Why a question is of no use (a name in `FAULTS`), None where it is; `seen` is what was asked before."""
    text = question.text.strip()
    if question.finish_reason not in ("stop", "stop_string"):
        return "unfinished"
    if not text:
        return "empty"
    known = tokenizer.token_bytes()
    inside = question.token_ids[:-1]
    if "�" in text or any(i >= len(known) or not known[i] for i in [*inside, *_encode(tokenizer, text)]):
        return "broken"
    if is_looping(inside):
        return "looping"
    return "repeated" if same_text(text) in seen else None


def same_text(text: str) -> str:
    """What two questions that say the same have in common."""
    return " ".join(text.casefold().split())


def is_looping(ids: Sequence[int], n: int = 3, least: int = 16) -> bool:
    """Whether less than half of the n-grams are distinct; short texts never are."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(grams) >= least and 2 * len(set(grams)) < len(grams)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Text that the template wrote, or part of it: no special tokens are added."""
    return [int(i) for i in tokenizer.backend.encode(text, add_special_tokens=False)]
