"""The law test accepts every right drafter and law, and rejects each wrong one that implementations have shipped."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import testing
from specjax.laws import Path, walk
from specjax.sampling import Sampling, categorical, distribution
from specjax.state import Context
from specjax.testing import Adversarial, Idle, Oracle, Prober, Replaced, TableTree, law_test
from specjax.testing.drafters import Stateless
from specjax.trees import Draft

V = 4
TARGET = testing.tiny_target(testing.TableModel.random(V))
PROMPTS = [[1, 0, 2, 1, 0, 2, 1, 0], [3, 1, 3]]
# One setting a row where rows may differ; everything at once, so that one program covers it.
EVERYTHING = Sampling(
    temperature=[0.8, 1.2],
    top_k=3,
    top_p=[0.95, 0.9],
    min_p=0.05,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=0.2,
)
SIMPLE = Sampling(temperature=0.8)


def parity(logits: jax.Array, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """A grammar: never two odd tokens in a row."""
    odd = jnp.arange(V) % 2 == 1
    return jnp.where(odd & (tokens[length - 1] % 2 == 1), -jnp.inf, logits)


DRAFTERS: dict[str, Any] = {
    "plain": None,
    "lookup": specjax.PromptLookup(3, max_ngram=3, min_ngram=1),
    "draft model": specjax.DraftModel(testing.TableModel.random(V, seed=1), 2),
    "greedy draft model": specjax.DraftModel(testing.TableModel.random(V, seed=1), 2, sample=False),
    "oracle": Oracle(2, decoys=1),
    "adversarial": Adversarial(3),
    "chain": TableTree.random(V, 2, "s"),
    "two drawn": TableTree.random(V, 2, "ss"),
    "three drawn": TableTree.random(V, 1, "sss"),
    "drawn twice": TableTree.random(V, 2, "ss", replace=True),
    "two deterministic": TableTree.random(V, 2, "dd"),
    "deterministic, drawn": TableTree.random(V, 1, "ds"),
    "drawn, deterministic": TableTree.random(V, 1, "sd"),
    "idle": Idle(specjax.DraftModel(testing.TableModel.random(V, seed=1), 2), every=2),
    "replaced": Replaced(specjax.DraftModel(testing.TableModel.random(V, seed=1), 2), TableTree.random(V, 2, "s")),
    "prober": Prober(TableTree.random(V, 2, "s")),
}
FAST = ["draft model", "two drawn"]
LAWS = {
    "simple": SIMPLE,
    "everything": EVERYTHING,
    "greedy and drawn rows": Sampling(temperature=[0.0, 1.0], top_p=0.9),
    "grammar": Sampling(temperature=1.0, processors=(parity,)),
}


@pytest.mark.parametrize("name", FAST)
def test_right_drafters(name: str) -> None:
    check(law_test(TARGET, DRAFTERS[name], sampling=EVERYTHING, prompts=PROMPTS, samples=60_000), name)


@pytest.mark.parametrize("name", ["greedy and drawn rows", "grammar"])
def test_right_settings(name: str) -> None:
    check(law_test(TARGET, DRAFTERS["chain"], sampling=LAWS[name], prompts=PROMPTS, samples=60_000), name)


@pytest.mark.slow
def test_transformer() -> None:
    target = testing.tiny_target(testing.tiny_model(vocab_size=5))
    drafter = specjax.DraftModel(testing.tiny_model(vocab_size=5, seed=1), 2)
    check(law_test(target, drafter, samples=30_000, rows=4096), "transformer")


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    ("model", "settings"), [("table", s) for s in LAWS] + [("transformer", s) for s in ("simple", "everything")]
)
def test_every_drafter_and_setting(model: str, drafter: str, settings: str) -> None:
    target = TARGET if model == "table" else testing.tiny_target(testing.tiny_model(vocab_size=V, seed=4))
    result = law_test(target, DRAFTERS[drafter], sampling=LAWS[settings], prompts=PROMPTS, samples=200_000)
    # what the target finds least likely, and one token of another model for each state, are hardly ever accepted
    rare = drafter in ("adversarial", "greedy draft model")
    check(result, f"{model}, {drafter}, {settings}", least=0.0 if rare else 0.05)


def check(result: testing.LawResult, name: str, least: float = 0.05) -> None:
    print(f"\n{name}: distance {result.distance:.5f}, expected {result.expected:.5f}, noise {result.noise:.5f}")
    assert result.passed, result
    assert result.crossed > 0.1
    assert result.acceptance_rate is None or result.acceptance_rate >= least


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Planted(Stateless):
    """Drafts of three nodes below the pending token, wrong as `fault` says (data, so that one program serves)."""

    table: jax.Array
    fault: jax.Array

    name: ClassVar[str] = "planted"
    num_nodes: ClassVar[int] = 3
    max_depth: ClassVar[int] = 1
    block_sizes: ClassVar[None] = None

    def propose(self, memory: None, context: Context) -> tuple[Draft, None]:
        return jax.lax.switch(self.fault, list(FAULTS.values()), self.table, context), None


def siblings(kinds: str, table: jax.Array, context: Context, replace: bool = False) -> Draft:
    return TableTree(table, 1, kinds, replace).propose(None, context)[0]


def only(draft: Draft, number: int) -> Draft:
    return replace(draft, valid=draft.valid & (jnp.arange(3) < number))


def soft(table: jax.Array, context: Context) -> jax.Array:
    """The processed draft law after the pending token."""
    nothing = jnp.zeros((context.length.shape[0], 0), jnp.int32)
    return jax.nn.softmax(context.process(table[context.pending], nothing, jnp.zeros_like(context.length)))


def right(table: jax.Array, context: Context) -> Draft:
    return siblings("sss", table, context)


def raw_q(table: jax.Array, context: Context) -> Draft:
    """Drawn from the processed law, judged by the raw one."""
    draft = only(siblings("sss", table, context), 1)
    return replace(draft, q=jnp.broadcast_to(jax.nn.softmax(table[context.pending])[:, None], draft.q.shape))


def argmax_with_soft_q(table: jax.Array, context: Context) -> Draft:
    """The most likely token, said to be drawn."""
    draft = only(siblings("ddd", table, context), 1)
    q = jnp.broadcast_to(soft(table, context)[:, None], draft.q.shape)
    return replace(draft, drawn=jnp.ones_like(draft.drawn), q=q)


def siblings_with_the_first_q(table: jax.Array, context: Context) -> Draft:
    """Drawn without replacement, but q is not the law given the earlier siblings."""
    draft = siblings("sss", table, context)
    return replace(draft, q=jnp.broadcast_to(draft.q[:, :1], draft.q.shape))


def deterministic_as_drawn(table: jax.Array, context: Context) -> Draft:
    """The three most likely tokens, treated as samples."""
    return replace(siblings("ddd", table, context), drawn=jnp.ones((context.length.shape[0], 3), bool))


def ranked_after_drawing(table: jax.Array, context: Context) -> Draft:
    """Three tokens drawn, the two most likely of them kept, the more likely one first."""
    draft = siblings("sss", table, context, replace=True)
    law = soft(table, context)
    best = jnp.argsort(-jnp.take_along_axis(law, draft.tokens, axis=1), axis=1)
    return only(replace(draft, tokens=jnp.take_along_axis(draft.tokens, best, axis=1)), 2)


def folded(table: jax.Array, context: Context) -> Draft:
    """A drawn node that repeats a deterministic sibling is left out as a duplicate."""
    draft = siblings("dss", table, context, replace=True)
    number = jnp.where(draft.tokens[:, 0] == draft.tokens[:, 1], 1, 2)
    return replace(draft, valid=draft.valid & (jnp.arange(3) < number[:, None]))


def dropped_by_confidence(table: jax.Array, context: Context) -> Draft:
    """A drawn token that is not likely enough is not proposed."""
    draft = only(siblings("sss", table, context), 1)
    law = jnp.take_along_axis(soft(table, context), draft.tokens[:, :1], axis=1)
    return replace(draft, valid=draft.valid & (law > 0.4))


FAULTS: dict[str, Callable[[jax.Array, Context], Draft]] = {
    f.__name__: f
    for f in (
        right,
        raw_q,
        argmax_with_soft_q,
        siblings_with_the_first_q,
        deterministic_as_drawn,
        ranked_after_drawing,
        folded,
        dropped_by_confidence,
    )
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_in_a_drafter(fault: str) -> None:
    drafter = Planted(TableTree.random(V, seed=2).table, jnp.int32(list(FAULTS).index(fault)))
    result = law_test(TARGET, drafter, sampling=Sampling(temperature=0.8, top_k=3), prompts=PROMPTS, samples=50_000)
    print(f"\n{fault}: distance {result.distance:.4f}, noise {result.noise:.4f}")
    assert result.passed == (fault == "right"), result


LAW_FAULTS = (
    "none",
    "bonus from the row after the rejection",
    "filters on the bonus token only",
    "temperature ignored in verification",
    "p not updated between siblings",
    "penalties ignore the path",
    "the same randomness every round",
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Marked(testing.TableModel):
    """Carries the fault of the law, as data, so that one program serves them all."""

    fault: Any = None


@dataclass(frozen=True)
class Wrong:
    """Rejection sampling written out plainly for trees of a few nodes, with the fault that the target carries."""

    name: ClassVar[str] = "wrong"
    lossless: ClassVar[bool] = True

    def __call__(self, target_law: Any, draft: Draft, keys: jax.Array, max_depth: int) -> Path:
        batch, nodes = draft.tokens.shape
        context = target_law.context
        pick = jax.vmap(lambda values, i: values[i])

        def has(fault: str) -> jax.Array:
            return context.model.fault == LAW_FAULTS.index(fault)

        def uniforms(keys: jax.Array) -> jax.Array:
            return jax.vmap(lambda key: jax.random.uniform(key, (2, nodes + 1)))(keys)

        row = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(7), i))(jnp.arange(batch))
        uniform = jnp.where(has("the same randomness every round"), uniforms(row), uniforms(keys))

        def law(node: jax.Array, path: jax.Array, depth: jax.Array) -> tuple[jax.Array, jax.Array]:
            """The target's law as it is judged, and as it is filtered."""
            temperature = jnp.where(has("temperature ignored in verification"), 1.0, context.rules.temperature)
            rules = replace(context.rules, temperature=temperature)
            text = context.text(path, jnp.where(has("penalties ignore the path"), 0, depth))
            filtered, bare = (
                distribution(pick(target_law.raw, node), r, text) for r in (rules, replace(rules, filters=()))
            )
            return jnp.where(has("filters on the bonus token only"), bare, filtered), filtered

        def choose(node: Any, path: Any, depth: Any, descends: Any) -> tuple[jax.Array, jax.Array]:
            (p, filtered), child = law(node, path, depth), jnp.zeros(batch, jnp.int32)
            failed = jnp.zeros(batch, jnp.int32)
            for i in range(nodes):
                tried = draft.valid[:, i] & (draft.parents[:, i] == node - 1) & descends & (child == 0)
                token = draft.tokens[:, i]
                one_hot = jax.nn.one_hot(token, V)
                drawn = draft.drawn[:, i]
                q = jnp.where(drawn[:, None], draft.q[:, i], one_hot)
                accepted = tried & (uniform[:, 0, i + 1] * pick(q, token) < pick(p, token))
                rest = jnp.where(drawn[:, None], jnp.maximum(p - q, 0), p * (1 - one_hot))
                rest = rest / jnp.maximum(rest.sum(-1, keepdims=True), 1e-30)
                updates = tried & ~accepted & ~has("p not updated between siblings")
                p = jnp.where(updates[:, None], rest, p)
                child = jnp.where(accepted, i + 1, child)
                failed = jnp.where(tried & ~accepted, i + 1, failed)
            late = (failed > 0) & has("bonus from the row after the rejection")
            p = jnp.where(late[:, None], law(failed, path, depth)[0], p)
            p = jnp.where(has("filters on the bonus token only"), jnp.where(filtered > 0, p + 1e-6, 0.0), p)
            return child, categorical(p, pick(uniform[:, 1], node))

        return walk(draft, max_depth, choose)


@pytest.mark.parametrize("fault", LAW_FAULTS)
def test_planted_in_a_law(fault: str) -> None:
    target = testing.tiny_target(Marked(TARGET.model.table, fault=jnp.int32(LAW_FAULTS.index(fault))))
    sampling = Sampling(temperature=0.6, top_k=3, frequency_penalty=1.0)
    result = law_test(
        target, TableTree.random(V, 2, "ss"), law=Wrong(), sampling=sampling, prompts=PROMPTS, samples=50_000
    )
    print(f"\n{fault}: distance {result.distance:.4f}, noise {result.noise:.4f}")
    assert result.passed == (fault == "none"), result


def test_exact_law_of_a_table() -> None:
    """By hand: two tokens after a prompt, each row of the table a softmax."""
    table = np.log(np.array([[0.5, 0.5], [0.1, 0.9]], np.float32))
    model = testing.TableModel(jnp.asarray(table))
    np.testing.assert_allclose(model.exact_law([0], 2), [[0.25, 0.25], [0.05, 0.45]], atol=1e-6)
    greedy = model.exact_law([1], 2, Sampling())
    np.testing.assert_allclose(greedy, [[0, 0], [0, 1]])


def test_exact_law_of_a_transformer_is_that_of_its_forward_pass(scores: Any) -> None:
    model = testing.tiny_model(vocab_size=5)
    law = testing.exact_law(model, [2, 3], 3)
    assert law.shape == (5, 5, 5)
    np.testing.assert_allclose(law.sum(), 1.0)
    rows = scores(model, [[2, 3, 1, 4]])[0, 1:4].astype(np.float64)
    p = np.exp(rows) / np.exp(rows).sum(-1, keepdims=True)
    np.testing.assert_allclose(law[1, 4, 0], p[0, 1] * p[1, 4] * p[2, 0], rtol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_reference_law_agrees_with_the_library(seed: int) -> None:
    """The law the tests compare with is written apart from `specjax.sampling`; where they differ one is wrong."""
    random = np.random.default_rng(seed)
    logits = (2 * random.standard_normal((40, 12))).astype(np.float32)
    tokens = random.integers(0, 12, (40, 9))
    settings = Sampling(
        temperature=random.choice([0.0, 0.5, 1.0, 2.0], 40),
        top_k=random.choice([0, 1, 3, 12, 20], 40),
        top_p=random.choice([0.3, 0.9, 1.0], 40),
        min_p=random.choice([0.0, 0.1], 40),
        repetition_penalty=random.choice([1.0, 1.3], 40),
        frequency_penalty=random.choice([0.0, 0.5], 40),
        presence_penalty=random.choice([0.0, -0.5], 40),
    )
    text = specjax.sampling.Text(jnp.asarray(tokens), jnp.full(40, 9), jnp.full(40, 4))
    found = distribution(jnp.asarray(logits), settings.rules(40), text)
    for i in range(40):
        one = Sampling(**{k: v[i] for k, v in vars(settings).items() if k != "processors"})
        np.testing.assert_allclose(found[i], testing.reference_law(logits[i], tokens[i], 4, one), atol=1e-5)


def test_table_model_notices_a_broken_contract() -> None:
    """A hidden token, a wrong position, a mask with too much, a cache that holds something else: NaN."""
    model = testing.TableModel.random(V)
    tokens, positions, mask = jnp.array([[1, 2, 3]]), jnp.array([[0, 1, 2]]), jnp.tril(jnp.ones((1, 3, 3), bool))

    def ok(*args: Any) -> list[bool]:
        return np.isfinite(model.logits(model(*args).hidden)).all(-1)[0].tolist()

    assert ok(tokens, positions, mask) == [True, True, True]
    assert ok(tokens, positions, mask.at[0, 2, 1].set(False)) == [True, True, False]
    assert ok(tokens, positions, mask.at[0, 1, 2].set(True)) == [True, False, True]
    assert ok(tokens, jnp.array([[0, 1, 3]]), mask) == [True, True, False]
    cache = model.init_cache(1, 8)
    block = model(tokens, positions, mask).block
    filled = specjax.cache.write(cache, block, jnp.array([0]))
    late = specjax.cache.write(cache, block, jnp.array([1]))
    step = jnp.array([[0]]), jnp.array([[3]]), jnp.ones((1, 1, 1), bool)
    assert ok(*step, filled, jnp.array([3])) == [True]
    assert ok(*step, filled, jnp.array([2])) == [False]
    assert ok(*step, late, jnp.array([3])) == [False]


def test_bad_requests() -> None:
    with pytest.raises(specjax.InputError, match="two prompts"):
        law_test(TARGET, prompts=[[1]])
    with pytest.raises(specjax.InputError, match="unknown family"):
        testing.tiny_config("gpt")
