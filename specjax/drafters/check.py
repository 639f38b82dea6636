"""Does a drafter fit a target? Checked before any compute."""

from specjax.drafters.draft_model import DraftModel
from specjax.errors import InputError
from specjax.models.target import Target
from specjax.models.tokenizer import compare
from specjax.state import Drafter


def check_drafter(drafter: Drafter, target: Target) -> None:
    """Raise InputError, saying what differs, if `drafter` cannot draft for `target`."""
    if not all(callable(getattr(drafter, method, None)) for method in ("init", "propose", "update")):
        raise InputError(f"drafter: expected an object with init, propose and update, got {drafter!r}")
    if isinstance(drafter, DraftModel) and drafter.tokenizer is not None and target.tokenizer is not None:
        first = compare(target.tokenizer, drafter.tokenizer)
        if first is not None:
            raise InputError(
                f"the draft model has another vocabulary than the target: they differ first at token id {first} "
                f"({_token(target, first)!r} in the target); use a draft model of the same tokenizer"
            )


def _token(target: Target, index: int) -> str | None:
    tokens = target.tokenizer.tokens() if target.tokenizer is not None else []
    return tokens[index] if index < len(tokens) else None
