"""What ends a row: EOS ids, and stop strings compiled into an automaton over tokens that runs inside the loop.

The automaton is Aho-Corasick over bytes, advanced by all the bytes of a token at once: `table[state, token]` is the
next state. A string may begin and end anywhere inside tokens, and inside a block of accepted ones.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specjax.errors import InputError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stops:
    """Attributes:
    eos: ids that end a row; padded with -1, which is no token.
    table: next state of the automaton, `-1` once a stop string is complete; None without stop strings.
    """

    eos: Int[Array, "E"]
    table: Int[Array, "Q V"] | None

    def scan(
        self, state: Int[Array, "B"], tokens: Int[Array, "B D"]
    ) -> tuple[Bool[Array, "B D"], Bool[Array, "B D"], Int[Array, "B D"]]:
        """Where tokens end a row: (by EOS, by a stop string, the automaton's state after each token)."""
        ends = (tokens[:, :, None] == self.eos).any(-1)
        if self.table is None:
            return ends, jnp.zeros_like(ends), jnp.broadcast_to(state[:, None], tokens.shape)

        table = self.table

        def advance(state: Array, token: Array) -> tuple[Array, Array]:
            state = jnp.where(state < 0, state, table[jnp.maximum(state, 0), token])
            return state, state

        states = jax.lax.scan(advance, state, tokens.T)[1].T
        return ends, states < 0, states


def make_stops(
    eos: Sequence[int], strings: Sequence[str], token_bytes: Sequence[bytes] | None, vocab_size: int
) -> Stops:
    """Compile EOS ids and stop strings. Shapes are rounded up: another string of like length compiles nothing."""
    ids = np.full(max(4, len(eos)), -1, np.int32)
    ids[: len(eos)] = list(eos)
    if not strings:
        return Stops(jnp.asarray(ids), None)
    if any(not isinstance(s, str) or not s for s in strings):
        raise InputError(f"stop: expected non-empty strings, got {list(strings)!r}")
    if token_bytes is None:
        raise InputError("stop strings need a tokenizer, and this target has none; name EOS ids instead")
    try:
        spelled = [s.encode() for s in strings]
    except UnicodeEncodeError as error:
        raise InputError(f"stop: {error.object!r} is not text that can be encoded; give another string") from None
    if (size := 4 * sum(map(len, spelled)) * vocab_size) > LARGEST_TABLE:
        raise InputError(
            f"stop: these strings need a table of {size / 1e6:.0f} MB; give at most "
            f"{LARGEST_TABLE // (4 * vocab_size)} bytes of stop strings in all"
        )
    step = byte_automaton(spelled)
    return Stops(jnp.asarray(ids), jnp.asarray(token_automaton(step, token_bytes, vocab_size)))


LARGEST_TABLE = 256_000_000  # bytes


def byte_automaton(strings: Sequence[bytes]) -> np.ndarray:
    """Aho-Corasick: `[Q, 256]` next states, -1 where a string is completed; state 0 is the start."""
    children: list[dict[int, int]] = [{}]
    final = {0: False}
    for string in strings:
        state = 0
        for byte in string:
            if byte not in children[state]:
                children.append({})
                children[state][byte] = len(children) - 1
                final[len(children) - 1] = False
            state = children[state][byte]
        final[state] = True
    table = np.zeros((len(children), 256), np.int32)
    fallback = [0] * len(children)
    queue = deque([0])
    while queue:  # breadth first: the fallback of a state is shallower, so its row is already filled in
        state = queue.popleft()
        table[state] = table[fallback[state]] if state else 0
        for byte, child in children[state].items():
            fallback[child] = int(table[fallback[state], byte]) if state else 0
            final[child] = final[child] or final[fallback[child]]
            queue.append(child)
        for byte, child in children[state].items():
            table[state, byte] = child
    done = np.array([final[state] for state in range(len(children))])
    return np.where(done[table], -1, table).astype(np.int32)


def token_automaton(step: np.ndarray, token_bytes: Sequence[bytes], vocab_size: int) -> np.ndarray:
    """`[Q, V]` next states over whole tokens, Q rounded up to a multiple of 16. Ids past the tokenizer add no bytes."""
    lengths = np.zeros(vocab_size, np.int32)
    lengths[: len(token_bytes)] = [len(text) for text in token_bytes[:vocab_size]]
    table = np.repeat(np.arange(-(-len(step) // 16) * 16, dtype=np.int32)[:, None], vocab_size, axis=1)
    table[len(step) :] = 0
    for place in range(lengths.max(initial=0)):
        ids = np.flatnonzero(lengths > place)  # fewer and fewer: most tokens are short
        bytes_here = np.array([token_bytes[int(i)][place] for i in ids])
        state = table[: len(step), ids]
        table[: len(step), ids] = np.where(state < 0, -1, step[np.maximum(state, 0), bytes_here])
    return table
