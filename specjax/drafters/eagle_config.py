"""What EAGLE's networks are: their shapes, and the layers whose features they take."""

from dataclasses import dataclass, replace
from typing import Any

from specjax.errors import InputError
from specjax.models.config import ModelConfig


@dataclass(frozen=True)
class EagleConfig:
    """EAGLE-1's and EAGLE-2's network.

    Attributes:
        layer: the one decoder layer (its width is the target's), rope and norms; no window.
        fc_bias: whether `fc` has a bias.
        own_embedding: whether the network has token embeddings of its own instead of the target's.
    """

    layer: ModelConfig
    fc_bias: bool = False
    own_embedding: bool = False

    @classmethod
    def of(cls, target: ModelConfig, **changes: Any) -> "EagleConfig":
        """The usual shape for a target: a layer as wide as its own."""
        return cls(plain_layer(target), **changes)


@dataclass(frozen=True)
class Eagle3Config:
    """EAGLE-3's network.

    Attributes:
        layer: the one decoder layer, rope and norms; no window. `layer.vocab_size` is the target's.
        draft_vocab_size: tokens that can be drafted.
        target_hidden_size: width of the target's features.
        feature_layers: the residual stream after so many of the target's layers is fused.
        norm_before_residual: whether the layer's residual is the normed feature (`speculators` trains so), not the raw.
        norm_before_fc: whether the layers' features are normed together before they are fused.
        fc_norm: whether each layer's features are normed alone before they are fused.
        norm_output: whether the network's output is fed back behind its final norm, not before it.
        own_embedding: whether the network has token embeddings of its own instead of the target's.
    """

    layer: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise InputError("EAGLE-3: norm_before_fc and fc_norm exclude each other; set one of them")
        if not self.own_embedding and self.layer.hidden_size != self.target_hidden_size:
            raise InputError(
                f"EAGLE-3: a network of width {self.layer.hidden_size} cannot take the embeddings of a target of width "
                f"{self.target_hidden_size}; set own_embedding"
            )

    @classmethod
    def of(cls, target: ModelConfig, draft_vocab_size: int, **changes: Any) -> "Eagle3Config":
        """The usual shape for a target: a layer as wide as its own, features of `default_layers`."""
        layers = changes.pop("feature_layers", None) or default_layers(target.num_layers)
        return cls(plain_layer(target), draft_vocab_size, target.hidden_size, layers, **changes)


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers that EAGLE-3 fuses by default: 2, L // 2 and L - 3.

    Raises:
        InputError: on a target so shallow that they are not three layers in order.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if not layers[0] < layers[1] < layers[2]:
        raise InputError(
            f"EAGLE-3 fuses layers 2, L//2 and L-3, which are {', '.join(map(str, layers))} on a target of "
            f"{num_layers} layers: they collide; give feature_layers=(…) yourself"
        )
    return layers


def plain_layer(target: ModelConfig) -> ModelConfig:
    """One layer of the target's shape, without what only its family has."""
    return replace(
        target,
        family="llama",
        num_layers=1,
        windows=(None,),
        local_rope=target.rope,
        qkv_bias=False,
        out_bias=False,
        qk_norm=False,
        tie_embeddings=False,
        norm_offset=0.0,
        sandwich_norms=False,
        embed_scale=1.0,
        attention_scale=target.head_dim**-0.5,
        moe=None,
    )
