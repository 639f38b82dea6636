"""Drafters that break their contract are told so, by the law test and before any decoding."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest

import specjax
from specjax import InputError, testing, trees
from specjax.state import Context
from specjax.trees import Draft

TARGET = testing.TableModel.random(vocab_size=4)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Made(testing.Stateless):
    """Drafts what `make` says of `[B, 2]` tokens 1."""

    make: Callable[[Any], Any]
    name: ClassVar[str] = "made"
    num_nodes: ClassVar[int] = 2
    max_depth: ClassVar[int] = 2
    block_sizes: ClassVar[None] = None

    def propose(self, memory: None, context: Context) -> Any:
        return self.make(jnp.ones((context.length.shape[0], 2), jnp.int32))


def whole(tokens: Any, **changes: Any) -> Any:
    parts = {"parents": jnp.arange(-1, 1) + 0 * tokens, "valid": tokens > 0} | changes
    return Draft(tokens, **parts), None


def law(tokens: Any, q: float) -> Any:
    rows = jnp.full((*tokens.shape, 4), q)
    return whole(tokens, drawn=tokens > 0, q=rows)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: whole(t)[0], "expected a Draft and the memory, got Draft"),
        (lambda t: (whole(t)[0], jnp.zeros(3)), "the memory it returns has another structure"),
        (lambda t: (Draft(t[:, :1], t[:, :1] - 2, t[:, :1] > 0), None), "tokens of shape .*1.; expected .*2.,"),
        (lambda t: whole(t.astype(float)), "tokens of dtype float32; expected token ids"),
        (lambda t: whole(t + 98), "a token outside 0 to 3"),
        (lambda t: whole(t, parents=t * jnp.array([1, 0])), "a node's parent stands after it"),
        (lambda t: whole(t, valid=t * jnp.array([0, 1]) > 0), "valid nodes come first"),
        (lambda t: whole(t, drawn=t > 0), "drawn nodes and q of shape None"),
        (lambda t: law(t, 0.3), "q of a drawn node is no law"),
    ],
)
def test_what_is_wrong_with_a_draft(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        testing.law_test(TARGET, Made(make), samples=100, rows=100)


@pytest.mark.parametrize("prompts", [[[9], [1]], [[], [1]]])
def test_prompts_that_cannot_be(prompts: list[list[int]]) -> None:
    with pytest.raises(InputError, match=r"law_test: (prompt token 9 is outside|a prompt is empty)"):
        testing.law_test(TARGET, prompts=prompts, samples=100, rows=100)


def test_a_drafter_that_is_no_pytree_or_lacks_something() -> None:
    class Plain(Made):
        pass

    with pytest.raises(InputError, match="a Plain is no pytree; decorate its class"):
        specjax.prepare(testing.tiny_target(TARGET), [[1, 2]], Plain(whole))

    class Bare:
        init = propose = update = staticmethod(whole)

    with pytest.raises(InputError, match="a Bare has no 'name'; besides its methods a drafter has name, num_nodes"):
        specjax.prepare(testing.tiny_target(TARGET), [[1, 2]], Bare())


def test_the_drafter_of_the_readme() -> None:
    @jax.tree_util.register_static
    @dataclass(frozen=True)
    class Repeat(testing.Stateless):
        name = "repeat"
        num_nodes = max_depth = 2
        block_sizes = None

        def propose(self, memory: Any, context: Any) -> Any:
            tokens = jnp.repeat(context.pending[:, None], 2, axis=1)
            return trees.chain(tokens, jnp.full(len(tokens), 2)), memory

    assert testing.law_test(TARGET, Repeat(), samples=20_000).passed
