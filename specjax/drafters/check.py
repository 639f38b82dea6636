"""Does a drafter fit a target? Checked before any compute."""

from specjax.errors import InputError
from specjax.models.target import Target
from specjax.state import Drafter


def check_drafter(drafter: Drafter, target: Target) -> None:
    """Raise InputError, saying what is wrong, if `drafter` cannot draft for `target`.

    A drafter that depends on its target has a method `check(target)`; one that wraps another forwards it.
    """
    methods = ("init", "propose", "update")
    if isinstance(drafter, type) or not all(callable(getattr(drafter, method, None)) for method in methods):
        raise InputError(f"drafter: expected an object with init, propose and update, got {drafter!r}")
    check = getattr(drafter, "check", None)
    if check is not None:
        check(target)
