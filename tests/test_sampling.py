"""Sampling: processed distributions against a straightforward numpy reference that sorts, and the drawing of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling
from specjax.errors import InputError
from specjax.sampling import Sampling, Text

process, distribution = jax.jit(sampling.process), jax.jit(sampling.distribution)
categorical, argmax = jax.jit(sampling.categorical), jax.jit(sampling.argmax)


def reference(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Law and kept tokens of one row in float64, by the definitions; and tokens too close to top-p's edge to judge."""
    logits = np.asarray(logits, np.float64)
    if temperature == 0:
        keep = np.arange(len(logits)) == np.argmax(logits)
        return keep.astype(float), keep, np.zeros(len(logits), bool)
    law = np.exp((logits - logits.max()) / temperature)
    keep = np.isfinite(logits)
    if top_k:
        keep &= logits >= np.sort(logits)[::-1][min(top_k, len(logits)) - 1]
    law = np.where(keep, law, 0) / law[keep].sum()
    above = np.array([law[law > p].sum() for p in law]) if len(law) < 1000 else above_by_sorting(law)
    unsure = (np.abs(above - top_p) < 3e-6) & (top_p < 1)
    if top_p < 1:
        keep &= above < top_p
    keep &= law >= min_p * law.max() * (1 - 1e-12)
    unsure |= np.abs(law - min_p * law.max()) < 1e-6 * law.max() * (min_p > 0)
    law = np.where(keep, law, 0)
    return law / law.sum(), keep, unsure


def above_by_sorting(law):
    ordered = np.sort(law)[::-1]
    sums = np.concatenate([[0], np.cumsum(ordered)])
    return sums[np.searchsorted(-ordered, -law, side="left")]


SETTINGS = [
    (t, k, p, m)
    for t in (0.0, 0.5, 1.0, 1.7)
    for k in (0, 1, 3, 20, 1000)
    for p in (1.0, 0.95, 0.6, 0.05)
    for m in (0.0, 0.02, 0.3, 1.0)
]


@pytest.mark.parametrize("ties", [False, True])
def test_every_combination_of_filters_in_one_batch(ties):
    """Rows mix all settings; top-k, top-p and min-p keep what the definitions keep, ties included."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(len(SETTINGS), 60)) * 3
    if ties:
        logits = np.round(logits)
    logits[:, 5] = -np.inf  # as a grammar mask would leave it
    logits = logits.astype(np.float32)
    t, k, p, m = (list(x) for x in zip(*SETTINGS, strict=True))
    rules = Sampling(temperature=t, top_k=k, top_p=p, min_p=m).rules(len(SETTINGS))
    law = np.asarray(distribution(jnp.array(logits), rules))
    kept = np.isfinite(np.asarray(process(jnp.array(logits), rules)))
    for row, setting in enumerate(SETTINGS):
        # the settings as float32 holds them: with ties, sums of the law can hit top-p exactly
        held = (np.float32(x) if isinstance(x, float) else x for x in setting)
        expected, keep, unsure = reference(logits[row], *held)
        if unsure.any():
            continue
        np.testing.assert_allclose(law[row], expected, atol=3e-6, err_msg=str(setting))
        assert ((law[row] > 0) <= keep).all(), setting
        if setting[0] > 0:
            assert (kept[row] == keep).all(), setting


def test_softmax_of_process_is_distribution():
    rng = np.random.default_rng(2)
    logits = jnp.array(rng.normal(size=(4, 300)).astype(np.float32) * 4)
    rules = Sampling(temperature=[0.3, 1.0, 2.0, 0.7], top_k=[0, 0, 40, 7], top_p=[0.9, 1.0, 0.8, 1.0]).rules(4)
    law = jax.nn.softmax(process(logits, rules), axis=-1)
    np.testing.assert_allclose(law, distribution(logits, rules), atol=1e-6)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 2.0, 6.0, 1000.0])
def test_filters_on_a_full_vocabulary(spread):
    """From everything tied, over nuclei of thousands, to one certain token."""
    rng = np.random.default_rng(3)
    size = 49152
    logits = (rng.normal(size=(4, size)) * spread).astype(np.float32)
    rules = Sampling(temperature=0.8, top_k=[0, 50, 3000, 0], top_p=[0.95, 1.0, 0.9, 0.999]).rules(4)
    kept = np.asarray(jnp.isfinite(process(jnp.array(logits), rules)))
    law = np.asarray(distribution(jnp.array(logits), rules))
    for row, (k, p) in enumerate(((0, 0.95), (50, 1.0), (3000, 0.9), (0, 0.999))):
        expected, keep, unsure = reference(logits[row], 0.8, k, p)
        # float32 sums over the whole row decide within a few 1e-6 of top-p, and probabilities below 1e-38 are 0
        assert (kept[row] == keep)[~unsure & (expected > 1e-37)].all()
        assert (law[row] > 0)[~keep & ~unsure].sum() == 0
        np.testing.assert_allclose(law[row], expected, atol=2e-5 * max(expected.max(), 1e-6), rtol=1e-3)


def test_definitions_by_their_values():
    law = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))

    def of(**settings):
        return np.asarray(distribution(law, Sampling(temperature=1.0, **settings).rules(1)))[0]

    np.testing.assert_allclose(of(), [0.5, 0.3, 0.2], atol=1e-6)
    np.testing.assert_allclose(of(top_k=2), [0.625, 0.375, 0], atol=1e-6)
    np.testing.assert_allclose(of(top_p=0.7), [0.625, 0.375, 0], atol=1e-6)
    np.testing.assert_allclose(of(top_p=0.1), [1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(of(min_p=0.5), [0.625, 0.375, 0], atol=1e-6)
    # top-p looks at the law after top-k: within {.625, .375} the first token alone reaches .6
    np.testing.assert_allclose(of(top_k=2, top_p=0.6), [1, 0, 0], atol=1e-6)
    half = distribution(jnp.array([[2.0, 1.0, 0.0]]), Sampling(temperature=0.5).rules(1))
    np.testing.assert_allclose(half[0], [0.867, 0.117, 0.016], atol=5e-4)


def test_temperature_zero_is_the_first_argmax_and_leaves_the_logits():
    logits = jnp.array([[1.0, 3.0, 3.0, 2.0], [0.0, -1.0, -2.0, -3.0]])
    rules = Sampling(temperature=[0.0, 1.0], top_k=2).rules(2)
    assert distribution(logits, rules)[0].tolist() == [0, 1, 0, 0]
    assert process(logits, rules)[0].tolist() == logits[0].tolist()
    only_greedy = Sampling().rules(2)
    assert distribution(logits, only_greedy).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-44])
def test_tiny_temperatures_stay_finite(temperature):
    logits = jnp.array([[1e4, 1e4 - 1, -1e4]])
    assert distribution(logits, Sampling(temperature=temperature).rules(1)).tolist() == [[1, 0, 0]]


def test_bfloat16_logits_are_processed_in_float32():
    out = process(jnp.ones((1, 4), jnp.bfloat16), Sampling(temperature=0.7, top_p=0.9).rules(1))
    assert out.dtype == jnp.float32


def test_penalties_count_prompt_and_output_apart():
    """Repetition penalty: prompt and output; frequency and presence: output only; padding is no text."""
    logits = jnp.array([[2.0, -2.0, 1.0, 0.5, 3.0]] * 2)
    text = Text(jnp.array([[0, 1, 2, 2, 3, 4], [4, 4, 4, 0, 0, 0]]), jnp.array([5, 3]), jnp.array([2, 3]))
    rules = Sampling(repetition_penalty=2.0, frequency_penalty=[0.1, 0.3], presence_penalty=0.25).rules(2)
    got = process(logits, rules, text)
    row = [2 / 2, -2 * 2, 1 / 2 - 2 * 0.1 - 0.25, 0.5 / 2 - 0.1 - 0.25, 3.0]
    np.testing.assert_allclose(got, [row, [2.0, -2.0, 1.0, 0.5, 1.5]], atol=1e-6)
    with pytest.raises(InputError, match="text"):
        process(logits, rules)


def test_frequency_penalty_on_constant_logits():
    """Counts are those of the text up to the row, each token once: the sequence is 0,1,0,1,2,0,1,2."""
    rules = Sampling(frequency_penalty=1.0).rules(1)
    tokens = []
    for step in range(8):
        text = Text(jnp.array([[2] + tokens + [0] * (8 - step)]), jnp.array([1 + step]), jnp.array([1]))
        tokens.append(int(argmax(process(jnp.array([[2.0, 1.4, 0.1]]), rules, text))[0]))
    assert tokens == [0, 1, 0, 1, 2, 0, 1, 2]


def test_user_processors_see_the_text_before_temperature():
    def alternate(logits, tokens, length):  # ids must alternate even and odd
        return jnp.where(jnp.arange(logits.shape[0]) % 2 == tokens[length - 1] % 2, -jnp.inf, logits)

    text = Text(jnp.array([[3, 4, 0], [3, 4, 5]]), jnp.array([2, 3]), jnp.array([1, 1]))
    logits = jnp.array([[9.0, 1.0, 8.0, 2.0], [9.0, 1.0, 8.0, 2.0]])
    rules = Sampling(temperature=[0.0, 1.0], processors=(alternate,)).rules(2)
    assert distribution(logits, rules, text)[0].tolist() == [0, 0, 0, 1]
    np.testing.assert_allclose(distribution(logits, rules, text)[1], [0.731, 0, 0.269, 0], atol=1e-3)


def test_argmax_is_the_first_and_never_hides_a_nan():
    values = jnp.array([[1.0, 5.0, 5.0], [-jnp.inf, -jnp.inf, -3.0], [jnp.nan, 1.0, 2.0], [-jnp.inf] * 3])
    assert argmax(values).tolist() == [1, 2, 3, 3]
    assert argmax(values.reshape(2, 2, 3)).tolist() == [[1, 2], [3, 3]]


@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_nan_or_a_row_without_a_token_gives_no_token(settings):
    rules = Sampling(temperature=1.0, **settings).rules(3)
    logits = jnp.array([[0.0, jnp.nan, 1.0, 2.0], [-jnp.inf] * 4, [0.0, 1.0, 2.0, 3.0]])
    law = distribution(logits, rules)
    token = categorical(law, jnp.array([0.5, 0.5, 0.999]))
    assert token.tolist() == [4, 4, 3]
    assert argmax(process(logits, rules)).tolist() == [4, 4, 3]


@pytest.mark.parametrize("size", [1, 5, 5000])
def test_categorical_never_draws_what_has_no_probability(size):
    rng = np.random.default_rng(size)
    uniform = np.concatenate([[0.0, 1e-30, 0.5, np.float32(1) - np.float32(2**-24)], rng.random(60)]).astype(np.float32)
    for share in (0.02, 0.5, 1.0):
        weights = rng.random((64, size)).astype(np.float32) ** 8 * (rng.random((64, size)) < share)
        weights[:, rng.integers(size)] += 1e-3
        token = np.asarray(categorical(jnp.array(weights), jnp.array(uniform)))
        assert (weights[np.arange(64), token] > 0).all()
        # ... and it is the token where the running sum passes uniform * total, up to rounding of that sum
        sums = np.cumsum(weights.astype(np.float64), axis=1)
        target, at = uniform * sums[:, -1], np.arange(64)
        slack = 1e-5 * sums[:, -1]
        assert (sums[at, token] >= target - slack).all()
        assert (sums[at, token] - weights[at, token] <= target + slack).all()


def test_categorical_draws_from_the_law():
    draws = 200_000
    law = np.array([0.4, 0.0, 0.3, 0.2, 0.0999, 0.0001, 0.0], np.float32)
    uniform = jax.random.uniform(jax.random.key(0), (draws,))
    tokens = categorical(jnp.broadcast_to(5 * law, (draws, 7)), uniform)
    counts = np.bincount(np.asarray(tokens), minlength=7)
    assert (counts[law == 0] == 0).all()
    expected = law[law > 0] * draws
    assert ((counts[law > 0] - expected) ** 2 / expected).sum() < 23.5  # chi-square, 4 degrees of freedom, 1e-4


def test_new_values_compile_nothing_and_nothing_is_sorted():
    traces = []

    @jax.jit
    def draw(logits, rules, uniform):
        traces.append(1)
        return sampling.categorical(sampling.distribution(logits, rules), uniform), sampling.process(logits, rules)

    logits, uniform = jnp.ones((2, 64)), jnp.array([0.3, 0.6])
    for settings in (
        {"temperature": [0.0, 0.7], "top_k": 5, "top_p": 0.9, "min_p": 0.1},
        {"temperature": [1.3, 0.0], "top_k": [7, 0], "top_p": [1.0, 0.3], "min_p": [0.0, 0.2]},
    ):
        rules = Sampling(**settings).rules(2)
        draw(logits, rules, uniform)
    assert len(traces) == 1
    lowered = draw.lower(logits, rules, uniform)
    assert "stablehlo.sort" not in lowered.as_text()
    assert "top_k" not in lowered.as_text().lower()
    assert " sort(" not in lowered.compile().as_text()


def test_rows_under_vmap_are_rows():
    rules = Sampling(temperature=0.9, top_k=3, top_p=0.8).rules(2)
    logits = jnp.array(np.random.default_rng(0).normal(size=(5, 2, 40)).astype(np.float32))
    mapped = jax.jit(jax.vmap(sampling.distribution, (0, None)))(logits, rules)
    np.testing.assert_allclose(mapped, [distribution(pair, rules) for pair in logits], atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; expected 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": None}, "temperature is None"),
        ({"temperature": True}, "temperature is True"),
        ({"temperature": [0.5, 0.5, 0.5]}, "expected one number, or 2, one for each prompt"),
        ({"temperature": [[0.5], [0.5, 1]]}, "temperature is"),
        ({"top_p": 0}, "top_p is 0; expected above 0 and at most 1"),
        ({"top_p": [0.5, 1.5]}, "top_p is 1.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 2.5}, "top_k is 2.5; expected a whole number"),
        ({"min_p": 1.01}, "min_p is 1.01; expected from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; expected above 0"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty is inf"),
        ({"presence_penalty": "a"}, "presence_penalty is 'a'"),
        ({"processors": (3,)}, "processors must be functions"),
    ],
)
def test_wrong_settings_say_what_is_expected(settings, message):
    with pytest.raises(InputError, match=message) as error:
        Sampling(**settings).validate(2)
    assert "\n" not in str(error.value)


def test_settings_may_be_one_a_prompt():
    rules = Sampling(temperature=[0.5, 1], top_k=np.array([3, 4]), top_p=jnp.array([0.5, 1.0]), min_p=0).rules(2)
    assert rules.temperature.tolist() == [0.5, 1.0]
    assert rules.top_k.tolist() == [3, 4]
    assert rules.top_p.tolist() == [0.5, 1.0]
    assert rules.min_p.tolist() == [0.0, 0.0]
    assert (rules.greedy, rules.drawn, rules.filters, rules.reads_text) == (False, True, ("top_k", "top_p"), False)
