"""Medusa (Cai et al. 2024): heads on the target's last hidden state, each guessing one token further ahead.

    heads = MedusaHeads.random(MedusaConfig(hidden_size=576, vocab_size=49152, num_heads=4))
    drafter = Medusa(heads, static_tree([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]))

The feature at position t is the target's "hidden" there (after the final norm). The target's own head reads token t + 1
out of it, and head i the token t + 2 + i.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from specjax.drafters.vocabulary import DraftVocabulary, head_of, logits_of, offsets
from specjax.errors import InputError
from specjax.models.decoder import Make
from specjax.models.interface import TargetModel
from specjax.models.sharding import place
from specjax.state import Context, Round, static
from specjax.trees import Draft, StaticTree, order, static_tree


@dataclass(frozen=True)
class MedusaConfig:
    """Shapes of the heads.

    Attributes:
        hidden_size, vocab_size: the target's.
        num_heads: tokens guessed after the pending one.
        num_layers: residual blocks of a head.
        shared_head: the heads read tokens with the target's own head instead of one each.
        draft_vocab_size: tokens that can be drafted; None for all. Reading fewer rows of a head is what makes four
            heads cheap beside a small target.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    shared_head: bool = False
    draft_vocab_size: int | None = None


class MedusaHeads(DraftVocabulary, nnx.Module):
    """The heads: `x + SiLU(W x + b)` (a few times), then a linear map to the vocabulary; section 2.1.1."""

    def __init__(self, config: MedusaConfig, make: Make, d2t: np.ndarray | None = None):
        """Build with parameters from `make(path, shape, logical axes)`: `linear [H, J, M, M]`, `bias`, and `head
        [H, Vd, M]` where it is not the target's.

        Args:
            d2t: offsets: draft id i stands for the target's id `i + d2t[i]`. May only be left out where the draft
                vocabulary is the target's.
        """
        c = self.config = config
        blocks, width = (c.num_heads, c.num_layers), c.hidden_size
        self.linear = nnx.Param(make("linear", (*blocks, width, width), (None, None, None, "model")))
        self.bias = nnx.Param(make("bias", (*blocks, width), (None, None, "model")))
        if not c.shared_head:
            shape = (c.num_heads, c.draft_vocab_size or c.vocab_size, width)
            self.head = nnx.Param(make("head", shape, (None, "vocab", "model")))
        self.set_vocabulary(d2t, c.draft_vocab_size or c.vocab_size, c.vocab_size)

    def __call__(self, hidden: Float[Array, "*B M"]) -> Float[Array, "*B H M"]:
        """What each of the H heads makes of a hidden state."""
        linear, bias = self.linear[...], self.bias[...]
        x = jnp.broadcast_to(hidden[..., None, :], (*hidden.shape[:-1], self.config.num_heads, hidden.shape[-1]))
        x = x.astype(linear.dtype)
        for i in range(self.config.num_layers):
            x = x + jax.nn.silu(jnp.einsum("...hm,hmn->...hn", x, linear[:, i]) + bias[:, i])
        return x.astype(hidden.dtype)

    def logits(self, hidden: Float[Array, "*B M"], target: TargetModel) -> Float[Array, "*B H Vd"]:
        """Scores of the draftable tokens under each head, float32: of the tokens t + 2, t + 3, … for the hidden state
        at t.
        """
        x = self(hidden)
        if self.config.shared_head:
            return logits_of(target, x, self.target_ids)
        head = self.head[...]
        return jnp.einsum("...hm,hvm->...hv", x.astype(head.dtype), head, preferred_element_type=jnp.float32)

    @property
    def dtype(self) -> Any:
        return self.linear[...].dtype

    def read(self, i: int, hidden: Float[Array, "*B M"]) -> Float[Array, "*B M"]:
        """What head i alone makes of a hidden state, which its output head reads tokens out of."""
        linear, bias = self.linear[...][i], self.bias[...][i]
        x = hidden.astype(linear.dtype)
        for j in range(self.config.num_layers):
            x = x + jax.nn.silu(x @ linear[j] + bias[j])
        return x

    @classmethod
    def from_arrays(
        cls, config: MedusaConfig, arrays: dict[str, np.ndarray], dtype: Any = jnp.float32, mesh: Any = None
    ) -> "MedusaHeads":
        """Build from arrays named `linear`, `bias`, `head` and `d2t`, cast to `dtype` and placed on `mesh`."""
        return cls(config, lambda name, shape, axes: place(arrays[name], dtype, axes, mesh), arrays.get("d2t"))

    @classmethod
    def random(
        cls, config: MedusaConfig, seed: int = 0, dtype: Any = jnp.float32, scale: float = 0.02, d2t: Any = None
    ) -> "MedusaHeads":
        rng = np.random.default_rng(seed)
        return cls(config, lambda name, shape, axes: jnp.asarray(scale * rng.standard_normal(shape), dtype), d2t)

    @classmethod
    def start(
        cls, config: MedusaConfig, target: TargetModel, dtype: Any = jnp.float32, tokens: Any = None
    ) -> "MedusaHeads":
        """Where training starts: `W` and `b` zero, output heads the target's, so that every head says what it says.

        Args:
            tokens: the draft vocabulary, `config.draft_vocab_size` ids of the target; None for all.
        """
        d2t = None if tokens is None else offsets(tokens)
        ids = None if d2t is None else jnp.arange(len(d2t)) + jnp.asarray(d2t)

        def make(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Array:
            if name != "head":
                return jnp.zeros(shape, dtype)
            return jnp.broadcast_to(head_of(target, ids).astype(dtype), shape)

        return cls(config, make, d2t)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Medusa:
    """Drafts a static tree: a node of rank r at depth d is the token that head d - 1 finds r-th most likely.

    Nodes are deterministic, so the tree is lossless at any temperature. Heads know nothing of the tokens above a node:
    their scores are ranked as they are, without penalties and processors, which apply where the target verifies.

    Attributes:
        heads: the network.
        tree: no deeper than there are heads.
        block_sizes: see `Drafter`.
    """

    heads: MedusaHeads
    tree: StaticTree = static()
    block_sizes: tuple[int, ...] | None = static(default=None)

    name: ClassVar[str] = "medusa"
    features: ClassVar[tuple[str, ...]] = ("hidden",)
    wants_logits: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if isinstance(self.heads, MedusaHeads) and self.tree.max_depth > self.heads.config.num_heads:
            raise InputError(
                f"Medusa: the tree is {self.tree.max_depth} deep, but there are {self.heads.config.num_heads} heads"
            )

    @property
    def num_nodes(self) -> int:
        return self.tree.num_nodes

    @property
    def max_depth(self) -> int:
        return self.tree.max_depth

    def init(self, context: Context, features: dict[str, Array], longest: int) -> Float[Array, "B M"]:
        """The hidden state at the last token before the pending one: all there is to remember."""
        hidden, config = features["hidden"], self.heads.config
        found = (hidden.shape[-1], context.model.vocab_size)
        if found != (config.hidden_size, config.vocab_size):
            raise InputError(
                f"Medusa: these heads are for a target of width {config.hidden_size} and {config.vocab_size} tokens, "
                f"this one has {found[0]} and {found[1]}"
            )
        return jax.vmap(lambda row, at: row[at])(hidden, jnp.maximum(context.length - 2, 0))

    def propose(self, memory: Float[Array, "B M"], context: Context) -> tuple[Draft, Float[Array, "B M"]]:
        tree, batch = self.tree, context.length.shape[0]
        ranks = np.array([choice[-1] for choice in tree.choices], np.int32)
        heads = np.array([len(choice) - 1 for choice in tree.choices], np.int32)
        parents = jnp.broadcast_to(jnp.array(tree.parents, jnp.int32), (batch, tree.num_nodes))
        if not tree.num_nodes:
            return Draft(parents, parents, parents >= 0), memory
        scores = self.heads.logits(memory, context.model)
        scores, tokens = jax.lax.top_k(scores, min(int(ranks.max()) + 1, scores.shape[-1]))
        if self.heads.target_ids is not None:
            tokens = self.heads.target_ids[tokens]
        exists = jnp.asarray(ranks < tokens.shape[-1])  # a tiny vocabulary may have fewer tokens than ranks
        ranks = np.where(ranks < tokens.shape[-1], ranks, 0)
        # a one-token prompt has no hidden state before the pending token yet
        valid = exists & (context.length > 1)[:, None] & jnp.isfinite(scores[:, heads, ranks])
        return order(tokens[:, heads, ranks], parents, valid), memory

    def update(self, memory: Float[Array, "B M"], round: Round, context: Context) -> Float[Array, "B M"]:
        last = jnp.maximum(round.count - 1, 0)
        hidden = jax.vmap(lambda row, nodes, i: row[nodes[i]])(round.features["hidden"], round.nodes, last)
        return jnp.where((round.count > 0)[:, None], hidden, memory)


def best_tree(accuracies: Sequence[Sequence[float]] | Float[np.ndarray, "H R"], num_nodes: int) -> StaticTree:
    """The tree of `num_nodes` nodes that has the most tokens accepted, by each head's accuracies (section 2.3.3).

    `accuracies[i][r]` is the chance that head i's r-th guess is right. Taken as independent, a node is accepted with
    the product along its path, and the expected number of accepted tokens is the sum over the nodes. No product is
    above its parent's, so taking the best node next to the tree, again and again, is optimal.
    """
    table = [[float(a) for a in head] for head in accuracies]
    if any(not 0 <= a <= 1 for head in table for a in head):
        raise InputError("best_tree: accuracies are chances, from 0 to 1")
    most = sum(int(np.prod([len(head) for head in table[: i + 1]])) for i in range(len(table)))
    if not 0 <= num_nodes <= most:
        raise InputError(f"best_tree: {num_nodes} nodes asked for; these accuracies allow 0 to {most}")
    heap: list[tuple[float, tuple[int, ...]]] = []
    chosen: list[tuple[int, ...]] = []

    def open_children(choice: tuple[int, ...], chance: float) -> None:
        if len(choice) < len(table):
            for rank, accuracy in enumerate(table[len(choice)]):
                heapq.heappush(heap, (-chance * accuracy, (*choice, rank)))

    open_children((), 1.0)
    while len(chosen) < num_nodes:
        negative, choice = heapq.heappop(heap)
        chosen.append(choice)
        open_children(choice, -negative)
    return static_tree(chosen)
