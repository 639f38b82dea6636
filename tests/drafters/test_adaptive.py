"""Speculation that adapts: the blocks it chooses where the best is known, and the same text."""

import json
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import Adaptive, Costs, DraftModel, Sampling, testing, theory, timing
from specjax.errors import InputError
from specjax.state import Context, static
from specjax.testing.drafters import Adversarial, Oracle, TableTree, peek
from specjax.trees import Draft, chain

TARGET = testing.tiny_target(testing.tiny_model(vocab_size=48))
PROMPTS = [[3, 9, 4], [7], [1, 2, 3, 4, 5, 6], [11, 12], [40, 41, 42, 43]]
SIZES = (2, 4)  # blocks of 1, 2, 4 and 8 tokens with 7 draft tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Coin(Oracle):
    """Each token is right with a known chance, whatever came before it."""

    chance: float = static(default=0.7)

    name: ClassVar[str] = "coin"

    def propose(self, memory: None, context: Context) -> tuple[Draft, None]:
        path, size = peek(context, self.num_draft_tokens), context.model.vocab_size
        right = jax.vmap(lambda key: jax.random.bernoulli(key, self.chance, path.shape[1:]))(context.key)
        return chain(jnp.where(right, path, (path + 1) % size), jnp.full(len(path), self.num_draft_tokens)), None


def blocks(drafter: Any, tokens: int = 64, prompts: Any = PROMPTS) -> np.ndarray:
    """Block sizes of the rounds; the text is checked to be plain decoding's."""
    out = specjax.generate(TARGET, prompts, drafter=drafter, max_new_tokens=tokens, trace=True)
    plain = specjax.generate(TARGET, prompts, max_new_tokens=tokens)
    assert out.token_ids == plain.token_ids
    assert out.trace is not None
    longest = max(out.trace, key=len)
    return np.array([r.block_tokens for r in longest])


@pytest.mark.parametrize(
    ("drafter", "verify", "expected"),
    [
        (Oracle(7, block_sizes=SIZES), [1, 1.01, 1.03, 1.07], 8),  # a GPU with nothing else to do
        (Oracle(7, block_sizes=SIZES), [1, 1.2, 3.5, 7.5], 2),  # two tokens for 1.2; four for 3.5; eight for 7.5
        (Oracle(7, block_sizes=SIZES), [1, 2.1, 4.2, 8.4], 1),  # work is dear: a full server
        (Adversarial(7, block_sizes=SIZES), [1, 1.1, 1.2, 1.4], 1),
        (Oracle(4, decoys=1, block_sizes=(3, 5)), [1, 1.2, 1.4, 1.7], 9),  # a tree whose second sibling is right
    ],
)
def test_the_block_that_pays_most(drafter: Any, verify: list[float], expected: int) -> None:
    found = blocks(Adaptive(drafter, Costs.of(drafter, verify)), 96)
    later = found[len(found) // 3 :]
    assert (later == expected).mean() >= 0.85, found


@pytest.mark.slow
@pytest.mark.parametrize(("chance", "slope"), [(0.8, 0.08), (0.35, 0.25)])
def test_as_many_tokens_a_second_as_the_best_block(chance: float, slope: float) -> None:
    """Guesses that are right with a known chance, on costs that grow with the block: at most 5% less than the best."""
    drafter = Coin(7, block_sizes=SIZES, chance=chance)
    costs = Costs.of(drafter, [1 + slope * n for n in (0, 1, 3, 7)])
    prompts = [[i, i + 1] for i in range(16)]
    found = blocks(Adaptive(drafter, costs), 256, prompts)
    price = {1 + n: 1 + slope * n for n in costs.nodes}
    expected = {1 + n: float(theory.expected_tokens(chance, n)) if n else 1.0 for n in costs.nodes}
    best = max(expected[b] / price[b] for b in price)
    reached = sum(expected[b] for b in found) / sum(price[b] for b in found)
    assert reached >= 0.95 * best, (reached, best, found)


@pytest.mark.slow
def test_a_draft_that_costs_too_much_is_not_made() -> None:
    """Rounds without a draft leave the drafter's memory right, and it is tried again after a while, ever less often."""
    model = DraftModel(TARGET.model, 7, block_sizes=SIZES)
    dear = Costs.of(model, [1, 1.1, 1.2, 1.4], draft=20.0)
    found = blocks(Adaptive(model, dear), 96)
    assert (found == 1).mean() > 0.8
    assert (found[:8] == 1).all()
    assert (found > 1).sum() >= 2  # it was right, so patience stays
    cheap = Costs.of(model, [1, 1.1, 1.2, 1.4], draft=0.5)
    assert (blocks(Adaptive(model, cheap), 96)[2:-1] == 8).all()  # at the end there is no room for so many
    wrong = Adversarial(7, block_sizes=SIZES)
    found = blocks(Adaptive(wrong, Costs.of(wrong, [1, 1.1, 1.2, 1.4], draft=2.0), patience=4), 96)
    tries = np.flatnonzero(found > 1)
    assert (np.diff(tries) == [9, 17, 33][: len(tries) - 1]).all(), tries


@pytest.mark.parametrize("ragged", [pytest.param(False, marks=pytest.mark.slow), True])
def test_greedy_text_is_plain_decodings(check_greedy: Any, ragged: bool) -> None:
    """With EOS inside a block, and at the end of the context."""
    drafter = Coin(7, block_sizes=SIZES)
    adaptive = Adaptive(drafter, Costs.of(drafter, [1, 1.1, 1.3, 1.6]))
    check_greedy(adaptive, *([] if ragged else [[[1, 2, 3]]]))


@pytest.mark.parametrize("siblings", ["s", pytest.param("ss", marks=pytest.mark.slow)])
def test_law(siblings: str) -> None:
    """Draws go through the controller too: the law is the target's, over blocks that change with what was accepted."""
    drafter = TableTree.random(depth=3 if siblings == "s" else 2, siblings=siblings)
    steps = len(Costs.of(drafter, [1.0] * len(specjax.costs.ladder(drafter))).nodes)
    adaptive = Adaptive(drafter, Costs.of(drafter, [1 + 0.35 * i for i in range(steps)]), patience=1, most_patience=2)
    result = testing.law_test(testing.TableModel.random(4), adaptive, num_tokens=4, samples=24_000, rows=4000)
    assert result.passed, result
    few = testing.law_test(testing.TableModel.random(4), adaptive, num_tokens=4, samples=2000, rows=4)
    assert few.passed, few


def test_one_program_for_all_costs() -> None:
    drafter = Oracle(7, block_sizes=SIZES)
    jobs = [
        specjax.prepare(TARGET, PROMPTS, drafter=Adaptive(drafter, Costs.of(drafter, verify)), max_new_tokens=16)
        for verify in ([1, 1.1, 1.2, 1.3], [1, 2, 3, 4])
    ]
    shapes = [jax.tree.structure((job.drafter, job.arguments)) for job in jobs]
    assert shapes[0] == shapes[1]


def test_costs_are_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(timing, "LEAST_SECONDS", 1e-4)
    drafter = specjax.PromptLookup(num_draft_tokens=3)
    first = specjax.measure_costs(TARGET, drafter, batch_size=2, context=16, repetitions=1)
    assert first.nodes == (0, 3)
    assert (np.asarray(first.verify) > 0).all()
    assert first.draft >= 0
    monkeypatch.setattr(timing, "_measure", lambda *_: pytest.fail("measured again"))
    again = specjax.measure_costs(TARGET, drafter, batch_size=2, context=16, repetitions=1)
    np.testing.assert_array_equal(first.verify, again.verify)


def test_costs_are_kept_for_what_they_are_of() -> None:
    """Whatever costs depend on tells them apart: settings of a drafter and of its parts, shapes of a model without
    files.
    """
    parts = [specjax.PromptLookup(2), specjax.EarlyExit(1, 2)]
    drafters = [
        specjax.PromptLookup(4),
        specjax.PromptLookup(4, window=8),
        specjax.EarlyExit(1, 4),
        specjax.EarlyExit(2, 4),
        DraftModel(testing.tiny_model(vocab_size=48), 4),
        DraftModel(testing.tiny_model(vocab_size=48), 4, sample=False),
        specjax.Combined(parts),
        specjax.Combined([parts[0], specjax.EarlyExit(2, 2)]),
    ]
    found = [json.dumps(timing._described(TARGET, d, 1, 16)) for d in drafters]
    other = testing.tiny_target(testing.tiny_model(vocab_size=40))
    found += [json.dumps(timing._described(t, drafters[0], b, 16)) for t, b in ((other, 1), (TARGET, 2))]
    assert len(set(found)) == len(found)
    assert json.dumps(timing._described(TARGET, replace(drafters[4]), 1, 16)) == found[4]


def test_another_targets_drafter_is_refused() -> None:
    wrong = DraftModel(testing.tiny_model(vocab_size=40), 2)
    with pytest.raises(InputError, match="the draft model has 40 tokens and the target 48"):
        specjax.measure_costs(TARGET, wrong)
    adaptive = Adaptive(wrong, Costs.of(wrong, [1, 2]))
    with pytest.raises(InputError, match="the draft model has 40 tokens and the target 48"):
        specjax.generate(TARGET, [[1]], drafter=adaptive)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: Adaptive(d, Costs.of(Oracle(3), [1, 2])), "draft nodes, and the drafter's have"),
        (lambda d: Costs.of(d, [1, 2]), "expected 4 numbers"),
        (lambda d: Costs.of(d, [1, 2, 0, 3]), "expected seconds above 0"),
        (lambda d: Adaptive(d, Costs.of(d, [1, 2, 3, 4]), prior=1.0), "prior between 0 and 1"),
        (lambda d: Adaptive(d, Costs.of(d, [1, 2, 3, 4]), patience=9, most_patience=8), "patience <= most_patience"),
        (lambda d: specjax.measure_costs(TARGET, d, context=10_000), "context: expected at most"),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(Oracle(7, block_sizes=SIZES))


def test_sampled_text_depends_on_the_blocks_but_not_on_the_costs_alone() -> None:
    """The same blocks, the same sample: costs of another scale choose alike."""
    drafter = specjax.PromptLookup(num_draft_tokens=7, block_sizes=SIZES)
    texts = [
        specjax.generate(
            TARGET,
            PROMPTS,
            drafter=Adaptive(drafter, Costs.of(drafter, [scale * x for x in (1, 1.1, 1.2, 1.3)])),
            sampling=Sampling(temperature=1.0),
            max_new_tokens=24,
        ).token_ids
        for scale in (1.0, 1000.0)
    ]
    assert texts[0] == texts[1]
