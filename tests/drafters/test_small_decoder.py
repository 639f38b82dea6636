"""A draft model made of the target's own layers: lossless, cheap to run, and nothing of the target's is copied."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax
from specjax import decode, testing
from specjax.decode import context
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.small_decoder import SmallDecoder, SmallDecoderConfig
from specjax.errors import InputError
from specjax.testing import Idle, Oracle, Replaced

WORDS = [1, 2, 4, 6, 9, 11]


def drafter(network: SmallDecoder, k: int = 3, **options: Any) -> DraftModel:
    """Compiled for no block size but the whole draft's: compiling is what costs here."""
    return DraftModel(network, k, block_sizes=(k + 1,), **options)


def random_network(vocab_size: int = 12, words: list[int] | None = None, layers: tuple[int, ...] = (0,)) -> Any:
    config = testing.tiny_config(vocab_size=vocab_size)
    network = SmallDecoder.start(testing.tiny_model(vocab_size=vocab_size), layers, words)
    other = SmallDecoderConfig.of(config, layers, words and len(words))
    return SmallDecoder.random(other, seed=3, scale=0.3, d2t=np.asarray(network.d2t[...]))


@pytest.mark.parametrize("words", [None, list(range(12))], ids=["the target's head", "its own"])
def test_all_of_the_target_is_always_right(words: Any, few: Any, check_greedy: Any) -> None:
    """Every draft is accepted whole until the text ends, if need be in the middle of one."""
    out = check_greedy(drafter(SmallDecoder.start(few.model, (0, 1), words)))
    ends = set()
    for row, reason in zip(out.trace, out.finish_reasons, strict=True):
        assert all(len(r.accepted) == 3 for r in row[:-1])
        ends.add((reason, len(row[-1].committed)))
    assert any(reason == "stop" and count < 4 for reason, count in ends)
    assert out.stats.alpha == 1.0


def test_greedy(check_greedy: Any, few: Any) -> None:
    """One layer and half of the tokens, not next to each other."""
    out = check_greedy(drafter(SmallDecoder.start(few.model, (1,), WORDS)))
    proposed = {t for row in out.trace for r in row for t in r.proposed}
    assert proposed <= set(WORDS)
    assert len(proposed) > 2
    assert {len(r.accepted) for row in out.trace for r in row} >= {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda d: Idle(d, every=3), lambda d: Replaced(d, Oracle(3))])
@pytest.mark.parametrize("words", [None, WORDS])
def test_greedy_of_others(words: Any, wrap: Any, check_greedy: Any) -> None:
    check_greedy(wrap(drafter(random_network(words=words))))


def test_law(check_law: Any) -> None:
    """Without penalties tokens are drawn over the draft vocabulary."""
    check_law(drafter(random_network(5, [0, 2, 3]), 2), plain=True)


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("words", [None, [1, 4]])
def test_every_law(words: Any, sample: bool, plain: bool, check_law: Any) -> None:
    """With penalties and filters of each row's own, too: these read the text, under the target's ids."""
    check_law(drafter(random_network(5, words), 3, sample=sample), plain)


def first_draft(network: SmallDecoder, target: Any, sampling: Any = None) -> Any:
    made = specjax.prepare(target, [[1, 2, 3], [4]], drafter=drafter(network), max_new_tokens=20, sampling=sampling)
    state = made.prefill()
    return made.drafter, state.memory, context(target.model, state)


def test_nothing_is_drafted_from_outside(few: Any) -> None:
    """The law of a drawn token is 0 outside the draft vocabulary, and 1 in all inside."""
    chosen, memory, seen = first_draft(random_network(words=WORDS), few, specjax.Sampling(temperature=[1.0, 0.0]))
    draft, _ = jax.jit(chosen.propose)(memory, seen)
    outside = np.setdiff1d(np.arange(12), WORDS)
    assert draft.q.shape == (2, 3, 12)
    assert (np.asarray(draft.q)[:, :, outside] == 0).all()
    np.testing.assert_allclose(np.asarray(draft.q)[:, :, WORDS].sum(-1), 1, rtol=1e-6)
    assert (np.asarray(draft.q)[0, :, WORDS] > 0).all()
    assert np.isin(draft.tokens, WORDS).all()


def test_greedy_drafting_never_makes_a_row_of_the_whole_vocabulary() -> None:
    target = testing.tiny_target(testing.tiny_model(vocab_size=41))
    made = [first_draft(random_network(41, WORDS), target, s) for s in (None, specjax.Sampling(temperature=1.0))]
    programs = [str(jax.make_jaxpr(chosen.propose)(memory, seen)) for chosen, memory, seen in made]
    rows = [re.findall(r"f32\[(?:\d+,)*41\]", program) for program in programs]
    assert not rows[0]
    assert rows[1]  # q


def test_the_loop_holds_no_second_cache() -> None:
    """The draft model's cache is written in place, as the target's is."""
    target = testing.tiny_target(testing.tiny_model(vocab_size=12, num_layers=4, windows=(None,) * 4, head_dim=64))
    made = specjax.prepare(target, [[1, 2]], drafter(SmallDecoder.start(target.model, (0, 3), WORDS)), max_new_tokens=9)
    arguments = made.arguments | {"tokens": jax.ShapeDtypeStruct((1, 1111), "int32")}
    arrays = {name: value for name, value in arguments.items() if name not in ("longest", "logprobs", "trace_rounds")}
    state = jax.eval_shape(lambda arrays: decode.prefill(target.model, made.drafter, longest=16, **arrays), arrays)
    run = jax.jit(decode.run, static_argnums=2, donate_argnums=3)
    program = run.lower(target.model, made.drafter, made.law, state).compile().as_text()
    assert "f32[1,2,1111,64]" in program
    assert not re.findall(r"f32\[1,2,1111,64\]\S* (?:copy|copy-start|transpose)\(", program)


def test_what_belongs_to_the_target_stays_there(few: Any) -> None:
    """Nothing of the size of the embeddings is held; and training may reuse the memory of what is."""
    network = SmallDecoder.start(few.model, (0, 1), WORDS)
    assert network.d2t[...].tolist() == [1, 1, 2, 3, 5, 6]
    assert network.head.shape == (6, 32)
    assert (
        sum(x.size for x in jax.tree.leaves(nnx.state(network)))
        == sum(x.size for x in jax.tree.leaves(nnx.state(few.model.layers))) + 32 + 6 * 32 + 6
    )
    jax.tree.map(lambda x: x.delete(), nnx.state(network))
    assert not any(x.is_deleted() for x in jax.tree.leaves(nnx.state(few.model)))


@pytest.mark.parametrize("family", ["gemma3", "qwen3_moe"])
def test_families(family: str) -> None:
    """All of the target's layers and its head are the target, windows, experts and scaled embeddings included."""
    model = testing.tiny_model(family, tie_embeddings=False)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 24)))
    block = (
        tokens,
        jnp.broadcast_to(jnp.arange(24), (2, 24)),
        jnp.broadcast_to(jnp.tril(jnp.ones((24, 24), bool)), (2, 24, 24)),
    )
    forward = jax.jit(lambda model: model.logits(model(*block).hidden))
    expected = forward(model)
    for words in (None, [3, 17, 40]):
        network = SmallDecoder.start(model, (0, 1), words)
        found = jax.jit(lambda network: network.over(model).logits(network.over(model)(*block).hidden))(network)
        inside = np.arange(64) if words is None else np.array(words)
        np.testing.assert_allclose(found[..., inside], expected[..., inside], rtol=1e-5, atol=1e-5)
        assert (np.delete(np.asarray(found), inside, axis=-1) == -np.inf).all()
    part = SmallDecoderConfig.of(model.config, (1,)).layers
    assert (part.num_layers, part.windows) == (1, model.config.windows[1:])
    assert part.moe is None or part.moe.layers == model.config.moe.layers[1:]


def test_from_arrays(few: Any) -> None:
    network = random_network(words=WORDS)
    arrays = {".".join(map(str, path)): np.asarray(x[...]) for path, x in nnx.to_flat_state(nnx.state(network))}
    assert {"norm", "head", "d2t", "layers.0.qkv"} <= set(arrays)
    again = SmallDecoder.from_arrays(network.config, arrays)
    assert jax.tree.structure(again) == jax.tree.structure(network)
    jax.tree.map(np.testing.assert_array_equal, again, network)
    with pytest.raises(InputError, match="d2t is missing"):
        SmallDecoder.from_arrays(network.config, {k: v for k, v in arrays.items() if k != "d2t"})


@pytest.mark.slow
def test_nothing_is_compiled_again(few: Any, prompts: Any) -> None:
    """Other weights and another vocabulary of the same size; a draft model loaded again, whose tokenizer is another
    object.
    """
    sizes = []
    for words in (WORDS, [0, 2, 3, 5, 7, 8]):
        specjax.generate(
            few, prompts, drafter(SmallDecoder.start(few.model, (1,), words)), max_new_tokens=45, trace=True
        )
        sizes.append(specjax.job._run._cache_size())
    for _ in range(2):
        loaded = testing.tiny_target(few.model, tokenizer=testing.TinyTokenizer())
        specjax.generate(few, prompts, drafter=drafter(loaded), max_new_tokens=45)
        sizes.append(specjax.job._run._cache_size())
    assert sizes[0] == sizes[1] == sizes[2] - 1 == sizes[3] - 1


def test_bad_input(few: Any, table: Any) -> None:
    for layers in ((), (2,), (-1,)):
        with pytest.raises(InputError, match="0 to 1"):
            SmallDecoder.start(few.model, layers)
    for words, message in (([3, 3], "below 12"), ([12], "below 12"), ([-1], "below 12"), ([], "1 to 12")):
        with pytest.raises(InputError, match=message):
            SmallDecoder.start(few.model, (0,), words)
    network = SmallDecoder.start(few.model, (0,), WORDS)
    with pytest.raises(InputError, match="a TableModel has none"):
        specjax.generate(table, [[1]], drafter=drafter(network))
    with pytest.raises(InputError, match="vocab_size 12, and the target has 64"):
        specjax.generate(testing.tiny_target(), [[1]], drafter=drafter(network))
    with pytest.raises(InputError, match="no features"):
        network.over(few.model)(*[jnp.zeros((1, 1), jnp.int32)] * 2, jnp.ones((1, 1, 1), bool), features=("hidden",))
