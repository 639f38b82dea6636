"""Networks out of stored tensors: everything that can be wrong is found before a weight is read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specjax.drafters.eagle_networks import Eagle3Network, EagleNetwork
from specjax.drafters.medusa import MedusaHeads
from specjax.drafters.mtp_network import MtpNetwork
from specjax.drafters.small_decoder import SmallDecoder
from specjax.drafters.stored import configs, layout
from specjax.drafters.stored.tensors import Tensors
from specjax.errors import CheckpointError, InputError
from specjax.models.decoder import Decoder
from specjax.models.keys import Keys

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Source:
    """A stored drafter, and what it is to be read for.

    Attributes:
        keys: its `config.json`.
        own: our section there; None in a drafter that others made.
        tensors: of its files.
        target: the model it will draft for.
        dtype, mesh: see `load_drafter`.
    """

    keys: Keys
    own: Keys | None
    tensors: Tensors
    target: Decoder
    dtype: Any
    mesh: Any

    def fits(self, **sizes: int) -> None:
        """Raise InputError unless the target has these sizes."""
        for name, expected in sizes.items():
            found = getattr(self.target.config, name)
            if found != expected:
                raise InputError(
                    f"{self.tensors.folder}: this drafter is for a target with {name} {expected}, and the target has "
                    f"{found}"
                )

    def says(self, flag: str) -> bool:
        """Whether our section sets a flag."""
        return self.own is not None and self.own.flag(flag)

    def own_embedding(self) -> bool:
        """Whether there are embeddings in the file, and others than the target's."""
        if self.own is not None:
            return self.own.flag("own_embedding")
        if layout.EMBED not in self.tensors:
            return False
        table, theirs = self.tensors.read(layout.EMBED), np.asarray(self.target.embed[...])
        return self.target.config.embed_scale != 1.0 or not np.array_equal(table, theirs.astype(table.dtype))

    def build(self, network: Any, config: Any, table: layout.Table, **more: np.ndarray) -> Any:
        arrays = layout.to_arrays(table, self.tensors.read)
        return network.from_arrays(config, arrays | more, self.dtype, self.mesh)


def read_eagle1(source: Source) -> EagleNetwork:
    """EAGLE-1's network."""
    config = configs.eagle1_config(source.keys, source.tensors.shapes, source.own)
    source.fits(hidden_size=config.layer.hidden_size, vocab_size=config.layer.vocab_size)
    required = layout.shapes(layout.eagle1(replace(config, own_embedding=source.says("own_embedding"))))
    optional = layout.shapes(layout.eagle1(replace(config, fc_bias=True, own_embedding=True)))
    source.tensors.check(required, optional)
    config = replace(config, own_embedding=source.own_embedding())
    return source.build(EagleNetwork, config, layout.eagle1(config))


def read_eagle3(source: Source, feature_layers: Sequence[int] | None) -> Eagle3Network:
    """EAGLE-3's network."""
    config = configs.eagle3_config(source.keys, source.own, source.target.config, feature_layers)
    draft, whole = config.draft_vocab_size, config.layer.vocab_size
    source.fits(hidden_size=config.target_hidden_size, vocab_size=whole)
    required, optional = _mapping(source.tensors, draft, whole)
    required |= layout.shapes(layout.eagle3(config))
    same_width = config.layer.hidden_size == config.target_hidden_size
    if same_width and not source.says("own_embedding"):
        optional[layout.EMBED] = required.pop(layout.EMBED)
    source.tensors.check(required, optional)
    if same_width:
        config = replace(config, own_embedding=source.own_embedding())
    return source.build(Eagle3Network, config, layout.eagle3(config), **_d2t(source.tensors, draft, whole))


def read_mtp(source: Source) -> MtpNetwork:
    """MTP modules: ours, or those in the target's own checkpoint."""
    config = configs.mtp_config(source.keys, source.own)
    c, draft = config.layers, config.draft_vocab_size
    source.fits(hidden_size=c.hidden_size, vocab_size=c.vocab_size)
    if source.own is None:
        source.fits(num_layers=source.keys.integer("num_hidden_layers"))
    required, optional = ({}, {}) if draft is None else _mapping(source.tensors, draft, c.vocab_size)
    source.tensors.check(required | layout.shapes(layout.mtp(config)), optional)
    d2t = {} if draft is None else _d2t(source.tensors, draft, c.vocab_size)
    return source.build(MtpNetwork, config, layout.mtp(config), **d2t)


def read_medusa(source: Source) -> MedusaHeads:
    """Medusa's heads."""
    config, shapes = configs.medusa_config(source.keys, source.own, source.target.config), source.tensors.shapes
    first, head = shapes.get("0.0.linear.weight", ()), shapes.get(f"0.{config.num_layers}.weight", ())
    if len(first) == 2 and first[0] == first[1]:
        source.fits(hidden_size=first[0])
    draft = config.draft_vocab_size
    if draft is None and len(head) == 2 and head[1] == config.hidden_size:
        source.fits(vocab_size=head[0])
    required, optional = ({}, {}) if draft is None else _mapping(source.tensors, draft, config.vocab_size)
    optional |= layout.shapes(
        {"head": layout.medusa_head(config)}
    )  # copies of a shared one, for engines that share none
    source.tensors.check(required | layout.shapes(layout.medusa(config)), optional)
    d2t = {} if draft is None else _d2t(source.tensors, draft, config.vocab_size)
    return source.build(MedusaHeads, config, layout.medusa(config), **d2t)


def read_small_decoder(source: Source) -> SmallDecoder:
    """A small decoder over the target's embeddings."""
    config = configs.small_decoder_config(source.keys)
    c, draft = config.layers, config.draft_vocab_size
    source.fits(hidden_size=c.hidden_size, vocab_size=c.vocab_size)
    required, optional = ({}, {}) if draft is None else _mapping(source.tensors, draft, c.vocab_size)
    source.tensors.check(required | layout.shapes(layout.small_decoder(config)), optional)
    d2t = {} if draft is None else _d2t(source.tensors, draft, c.vocab_size)
    return source.build(SmallDecoder, config, layout.small_decoder(config), **d2t)


def _mapping(tensors: Tensors, draft: int, whole: int) -> tuple[Shapes, Shapes]:
    """Shapes of the draft vocabulary's tensors: required ones, and optional ones."""
    if draft == whole:
        return {}, {"d2t": (draft,), "t2d": (whole,)}
    if "d2t" not in tensors:
        raise CheckpointError(
            f"{tensors.folder}: tensor d2t is missing: nothing else says which {draft} of {whole} tokens are drafted"
        )
    return {"d2t": (draft,)}, {"t2d": (whole,)}


def _d2t(tensors: Tensors, draft: int, whole: int) -> dict[str, np.ndarray]:
    """The offsets, checked against t2d where there is one; empty where every token can be drafted."""
    if "d2t" not in tensors:
        return {}
    d2t = tensors.read("d2t").astype(np.int64)
    drafted = np.flatnonzero(tensors.read("t2d")) if "t2d" in tensors else None
    if _sound(d2t + np.arange(draft), whole, drafted):
        return {"d2t": d2t}
    hint = (
        "; it looks like the target's ids themselves: subtract 0, 1, 2, … from them"
        if _sound(d2t, whole, drafted)
        else ""
    )
    raise CheckpointError(
        f"{tensors.folder}: tensor d2t must send the draft ids to different ids below {whole}"
        f"{'' if drafted is None else ', those that t2d says'} (target id = draft id + d2t[draft id]){hint}"
    )


def _sound(ids: np.ndarray, whole: int, drafted: np.ndarray | None) -> bool:
    """Whether these can be the target's ids of a draft vocabulary."""
    ids = np.sort(ids)
    if drafted is not None:
        return np.array_equal(ids, drafted)
    return bool(ids[0] >= 0 and ids[-1] < whole and (np.diff(ids) > 0).all())
