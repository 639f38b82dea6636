"""How a stored drafter drafts: the tree it was saved with, or the one asked for."""

from collections.abc import Mapping
from typing import Any

from specjax.drafters.confidence import check_confidence
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.eagle import Eagle
from specjax.drafters.growing import GrownTree
from specjax.drafters.medusa import Medusa
from specjax.drafters.mtp import Mtp
from specjax.errors import CheckpointError, InputError, check_block_sizes, check_whole
from specjax.trees import StaticTree, chain_tree, static_tree

Drafter = Eagle | Mtp | Medusa | DraftModel

_SETTINGS: dict[type, tuple[str, ...]] = {
    Eagle: ("tree", "num_draft_tokens", "sample", "block_sizes", "min_confidence"),
    Mtp: ("tree", "num_draft_tokens", "sample", "block_sizes", "min_confidence"),
    Medusa: ("tree", "num_draft_tokens", "block_sizes"),
    DraftModel: ("num_draft_tokens", "sample", "block_sizes", "min_confidence"),
}


def settings_of(drafter: Drafter) -> dict[str, Any]:
    """A drafter's settings as JSON."""
    settings: dict[str, Any] = {}
    if isinstance(drafter, DraftModel):
        settings["num_draft_tokens"] = drafter.num_draft_tokens
    elif isinstance(drafter.tree, GrownTree):
        settings["tree"] = dict(vars(drafter.tree))
    elif drafter.tree.is_chain:
        settings["num_draft_tokens"] = drafter.tree.num_nodes
    else:
        settings["tree"] = [list(choice) for choice in drafter.tree.choices]
    if not isinstance(drafter, Medusa) and drafter.sample is not None:
        settings["sample"] = drafter.sample
    if not isinstance(drafter, Medusa) and drafter.min_confidence:
        settings["min_confidence"] = drafter.min_confidence
    if drafter.block_sizes is not None:
        settings["block_sizes"] = list(drafter.block_sizes)
    return settings


def check_settings(kind: type[Drafter], asked: Mapping[str, Any]) -> None:
    """Raise InputError for settings that this kind of drafter does not have, or that contradict each other."""
    for name in asked:
        if name not in _SETTINGS[kind]:
            expected = ", ".join(_SETTINGS[kind])
            raise InputError(f"load_drafter: a stored {kind.__name__} has no setting {name!r}; it has {expected}")
    if asked.get("tree") is not None and asked.get("num_draft_tokens") is not None:
        raise InputError("load_drafter: give a tree or num_draft_tokens (a chain), not both")
    tree = asked.get("tree")
    allowed = (StaticTree, GrownTree) if kind in (Eagle, Mtp) else (StaticTree,)
    if tree is not None and not isinstance(tree, allowed):
        raise InputError(
            f"tree: expected what specjax.trees.static_tree makes, or a GrownTree for EAGLE and MTP, got {tree!r}"
        )
    if asked.get("num_draft_tokens") is not None:
        check_whole("num_draft_tokens", asked["num_draft_tokens"], 0)
    check_block_sizes(asked.get("block_sizes"))
    if asked.get("min_confidence") is not None:
        check_confidence(asked["min_confidence"])


def draft_with(
    kind: type[Drafter], network: Any, stored: Mapping[str, Any], asked: Mapping[str, Any], source: str
) -> Drafter:
    """The drafter: settings that are asked for, else those stored with it.

    Args:
        stored: what `settings_of` gave.
        asked: what `check_settings` allows; None counts as not given.
        source: the file of `stored`, for messages.
    """
    asked = {name: value for name, value in asked.items() if value is not None}
    settings = _read(kind, stored, source)
    if "tree" in asked or "num_draft_tokens" in asked:  # the rest was chosen for the stored tree
        settings = {}
    settings |= asked
    if kind is not DraftModel and "num_draft_tokens" in settings:
        settings["tree"] = chain_tree(settings.pop("num_draft_tokens"))
    if kind is Medusa and "tree" not in settings:
        settings["tree"] = chain_tree(network.config.num_heads)
    if kind is Mtp and "tree" not in settings:
        settings["tree"] = chain_tree(network.num_modules)
    return kind(network, **settings)


def _read(kind: type[Drafter], stored: Mapping[str, Any], source: str) -> dict[str, Any]:
    settings = dict(stored)
    tree = settings.get("tree")
    try:
        if isinstance(tree, Mapping):
            settings["tree"] = GrownTree(**tree)
        elif tree is not None:
            settings["tree"] = static_tree(tree)
        if settings.get("block_sizes") is not None:
            settings["block_sizes"] = tuple(settings["block_sizes"])
        check_settings(kind, settings)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{source}: 'specjax': 'drafting' is {dict(stored)!r}, which cannot be read: {error}"
        ) from error
    return settings
