"""Does a drafter fit a target? Checked before any compute."""

import jax

from specjax.errors import InputError
from specjax.models.target import Target
from specjax.state import Drafter

ATTRIBUTES = ("name", "num_nodes", "max_depth", "features", "wants_logits", "block_sizes")


def check_drafter(drafter: Drafter, target: Target) -> None:
    """Raise InputError, saying what is wrong, if `drafter` cannot draft for `target`.

    A drafter that depends on its target has a method `check(target)`; one that wraps another forwards it.
    """
    methods = ("init", "propose", "update")
    if isinstance(drafter, type) or not all(callable(getattr(drafter, method, None)) for method in methods):
        raise InputError(f"drafter: expected an object with init, propose and update, got {drafter!r}")
    missing = [name for name in ATTRIBUTES if not hasattr(drafter, name)]
    if missing:
        raise InputError(
            f"drafter: a {type(drafter).__name__} has no {missing[0]!r}; besides its methods a drafter has "
            f"{', '.join(ATTRIBUTES)} (see specjax.Drafter)"
        )
    if jax.tree_util.all_leaves([drafter]):
        raise InputError(
            f"drafter: a {type(drafter).__name__} is no pytree; decorate its class with jax.tree_util.register_static, "
            "or, where it holds arrays, make it a dataclass registered with jax.tree_util.register_dataclass"
        )
    check = getattr(drafter, "check", None)
    if check is not None:
        check(target)
