"""Chains that end where the drafter is not sure: the same tokens up to there, the same text, and fewer draft steps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import DraftModel, EarlyExit, InputError, Sampling, testing
from specjax.decode import context
from specjax.drafters import draft_model, eagle
from specjax.drafters.confidence import confidence
from specjax.drafters.eagle import Eagle
from specjax.drafters.eagle_config import EagleConfig
from specjax.drafters.eagle_networks import EagleNetwork
from specjax.drafters.growing import GrownTree
from specjax.drafters.small_decoder import SmallDecoder
from specjax.testing import law_test
from specjax.trees import chain_tree, static_tree

THRESHOLD = 0.3
V = 4


def network(vocab_size: int = 12) -> EagleNetwork:
    return EagleNetwork.random(EagleConfig.of(testing.tiny_config(vocab_size=vocab_size)), scale=0.1)


def made(kind: str, target: specjax.Target, min_confidence: float = THRESHOLD, **options: Any) -> Any:
    options = {"block_sizes": (2, 4), "min_confidence": min_confidence} | options
    if kind == "eagle":
        return Eagle(network(target.model.vocab_size), chain_tree(3), **options)
    if kind == "early exit":
        return EarlyExit(1, 3, **options)
    return DraftModel(SmallDecoder.start(target.model, (1,)), 3, **options)


KINDS = ["small decoder", "early exit", "eagle"]


def test_by_hand() -> None:
    values = jnp.log(jnp.array([[0.2, 0.5, 0.3], [0.9, 0.1, 0.0], [0.0, 0.0, 0.0], [jnp.nan, 0.5, 0.5]]))
    np.testing.assert_allclose(confidence(values), [0.5, 0.9, 0.0, 0.0], rtol=1e-6)
    np.testing.assert_allclose(confidence(values[:2] + 7.0), [0.5, 0.9], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_draft_up_to_where_it_ends(kind: str, few: specjax.Target) -> None:
    """Drawn and greedy rows: without a threshold the draft is whole; with one, rows end at different places, and what
    is left is the same tokens with the same laws.
    """
    prompts = [[i, (5 * i + 1) % 12, (3 * i * i) % 12] for i in range(12)]
    sampling = Sampling(temperature=[0.0, 0.7, 1.0] * 4)

    def draft(min_confidence: float) -> Any:
        job = specjax.prepare(
            few, prompts, drafter=made(kind, few, min_confidence), max_new_tokens=20, sampling=sampling
        )
        state = job.prefill()
        return jax.jit(lambda d, s: d.propose(s.memory, context(few.model, s))[0])(job.drafter, state)

    whole, cut = draft(0.0), draft(THRESHOLD)
    assert whole.valid.all()
    length = np.asarray(cut.valid.sum(1))
    assert set(length) >= {0, 3} or len(set(length)) > 2, length
    kept = np.asarray(cut.valid)
    np.testing.assert_array_equal(np.asarray(cut.tokens)[kept], np.asarray(whole.tokens)[kept])
    np.testing.assert_allclose(np.asarray(cut.q)[kept], np.asarray(whole.q)[kept], atol=1e-5)
    # the one threshold that every draft passes
    np.testing.assert_array_equal(draft(1e-6).valid, whole.valid)


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_greedy(kind: str, few: specjax.Target, check_greedy: Any) -> None:
    """Drafts of different lengths, and blocks that are smaller for it."""
    out = check_greedy(made(kind, few))
    middle = [r for row in out.trace for r in row[1:-3]]  # at the ends of a text drafts are short anyway
    assert len({len(r.proposed) for r in middle}) >= 3
    assert min(r.block_tokens for r in middle) < 4 == max(r.block_tokens for r in middle)
    check_greedy(made(kind, few), [[5, 6, 5]])


@pytest.mark.slow
def test_drafts_end_where_the_draft_model_is_not_sure(tiny: Any, cousin: Any, decode: Any, scores: Any) -> None:
    """In every round the proposals are the draft model's own greedy continuation of the committed text, as long as its
    probability is above the threshold: so its cache is right, however much of a draft was not run.
    """
    plain = decode(tiny)
    texts = [p + t for p, t in zip(plain.prompt_ids, plain.token_ids, strict=True)]
    sure = softmax(scores(cousin.model, texts)).max(-1)
    threshold = float(np.quantile(np.concatenate([row[: len(t)] for row, t in zip(sure, texts, strict=True)]), 0.3))
    out = decode(tiny, DraftModel(cousin, 4, min_confidence=threshold))
    assert out.token_ids == plain.token_ids
    cases = []
    for prompt, rounds in zip(out.prompt_ids, out.trace, strict=True):
        text = list(prompt)
        for r in rounds:
            if len(text) + 5 < len(prompt) + 200:  # no draft is cut by the end of the text
                cases.append((list(text), r.proposed))
            text += r.committed
    assert {len(proposed) for _, proposed in cases} == {0, 1, 2, 3, 4}
    cases = cases[:: -(-len(cases) // 250)]
    texts, going = [text for text, _ in cases], np.ones(len(cases), bool)
    for i in range(4):
        rows = softmax(scores(cousin.model, texts)[np.arange(len(texts)), [len(t) - 1 for t in texts]])
        best, chance = rows.argmax(-1), rows.max(-1)
        clear = np.abs(chance - threshold) > 1e-4
        going &= chance >= threshold
        for (_, proposed), token, goes, says in zip(cases, best, going, clear, strict=True):
            if says:
                assert proposed[i : i + 1] == ([token] if goes else [])
        texts = [[*t, int(b)] for t, b in zip(texts, best, strict=True)]


def softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    ("kind", "module", "step"),
    [("small decoder", draft_model, "write"), pytest.param("eagle", eagle, "feed_nodes", marks=pytest.mark.slow)],
)
def test_draft_steps_are_saved(kind: str, module: Any, step: str, few: Any, monkeypatch: Any) -> None:
    """Where no row is sure of its first token nothing is fed but the committed text."""
    run, calls = getattr(module, step), []

    def spy(*args: Any) -> Any:
        if step == "feed_nodes" or args[1].keys[0].shape[2] == 1:  # the small decoder's catching up writes two tokens
            jax.debug.callback(lambda: calls.append(1))
        return run(*args)

    monkeypatch.setattr(module, step, spy)
    for threshold, most in ((0.9999, 0), (1e-6, 2)):
        calls.clear()
        out = specjax.generate(few, [[5, 6, 5]], drafter=made(kind, few, threshold), max_new_tokens=8, trace=True)
        jax.effects_barrier()
        assert len(calls) == most * len(out.trace[0])
        assert (out.stats.proposed == 0) == (most == 0)


@pytest.mark.parametrize("kind", ["small decoder", pytest.param("eagle", marks=pytest.mark.slow)])
def test_the_loop_copies_no_cache(kind: str, cache_copies: Any) -> None:
    """Drafting in a loop that may end early neither copies the drafter's cache nor the target's."""
    deep = testing.tiny_target(testing.tiny_model(vocab_size=12, num_layers=4, windows=(None,) * 4, head_dim=64))
    assert cache_copies(made(kind, deep, block_sizes=(4,)))[0] == 0


@pytest.mark.parametrize("law", ["rejection", pytest.param("block", marks=pytest.mark.slow)])
def test_law_of_a_draft_model(law: str) -> None:
    """Drawn and greedy rows, filters and a penalty. That the law test sees a threshold on the drawn token itself, which
    drops that token, is planted elsewhere.
    """
    target = testing.tiny_target(testing.TableModel.random(V))
    drafter = DraftModel(testing.TableModel.random(V, seed=1), 3, min_confidence=0.45, block_sizes=(4,))
    sampling = Sampling(temperature=[0.8, 1.3], top_k=3, repetition_penalty=[1.2, 1.0])
    result = law_test(target, drafter, law, sampling, num_tokens=3, samples=60_000)
    assert result.passed, result
    assert result.crossed > 0.1
    assert result.acceptance_rate is not None and result.acceptance_rate > 0.05


@pytest.mark.slow
def test_law_of_eagle(check_law: Any) -> None:
    check_law(Eagle(network(5), chain_tree(3), block_sizes=(4,), min_confidence=0.6))


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("sample", [None, False])
def test_every_law(sample: bool | None, plain: bool, check_law: Any) -> None:
    check_law(Eagle(network(5), chain_tree(3), sample=sample, block_sizes=(4,), min_confidence=0.6), plain)
    decoder = SmallDecoder.start(testing.tiny_model(vocab_size=5), (0,), [0, 2, 3])
    check_law(DraftModel(decoder, 3, sample is None, (4,), min_confidence=0.4), plain)
    check_law(EarlyExit(1, 3, sample is None, (4,), min_confidence=0.8), plain)


def test_it_is_stored(few: specjax.Target, tmp_path: Path) -> None:
    drafter = made("eagle", few)
    specjax.save_drafter(tmp_path / "sure", drafter, few)
    assert specjax.load_drafter(tmp_path / "sure", few).min_confidence == THRESHOLD
    assert specjax.load_drafter(tmp_path / "sure", few, min_confidence=0.5).min_confidence == 0.5
    specjax.save_drafter(tmp_path / "whole", replace(drafter, min_confidence=0.0), few)
    assert specjax.load_drafter(tmp_path / "whole", few).min_confidence == 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DraftModel(testing.TableModel.random(4), 2, min_confidence=1.0), "below 1; got 1.0"),
        (lambda: EarlyExit(1, 2, min_confidence=-0.1), "min_confidence: expected a probability, 0"),
        (lambda: Eagle(network(), chain_tree(2), min_confidence=True), "got True"),
        (lambda: Eagle(network(), GrownTree(2, 2, 5), min_confidence=0.1), "only a chain ends early"),
        (lambda: Eagle(network(), static_tree([(0,), (1,)]), min_confidence=0.1), "only a chain ends early"),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
