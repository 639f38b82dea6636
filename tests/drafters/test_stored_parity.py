"""Stored drafters against other implementations: `speculators` (golden files, and live where it is installed), and the
official EAGLE-1 head written down in NumPy.
"""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import specjax
from specjax import testing
from specjax.drafters.eagle import Eagle
from specjax.drafters.eagle_config import Eagle3Config, EagleConfig
from specjax.drafters.eagle_networks import Eagle3Network, EagleNetwork, feed, pair
from specjax.drafters.eagle_unroll import unroll
from specjax.drafters.stored import load_drafter, save_drafter
from specjax.models.checkpoint import write_hf_directory
from specjax.models.layout import recipes
from specjax.trees import chain_tree

GOLDEN = Path(__file__).parent / "golden"
CASES = ("raw-residual", "normed-residual", "qwen3")
TOLERANCE = 5e-5
WORDS = [3, 7, 11, 12, 20, 31, 40, 63]


@pytest.fixture(scope="module")
def target() -> specjax.Target:
    """Of width 24 and 48 tokens, as the golden files want."""
    return testing.tiny_target(testing.tiny_model(vocab_size=48, hidden_size=24, num_layers=4, windows=(None,) * 4))


@pytest.mark.parametrize("name", CASES)
def test_speculators_golden(name: str, target: specjax.Target) -> None:
    """Every step of training-time test, which is what drafting from every place of a text computes."""
    expected = np.load(GOLDEN / name / "expected.npz")
    drafter = load_drafter(GOLDEN / name, target)
    assert isinstance(drafter, Eagle)
    config = drafter.network.config
    flags = json.loads((GOLDEN / name / "config.json").read_text())
    assert config.norm_before_residual == flags["norm_before_residual"] == (name != "raw-residual")
    assert (config.own_embedding, config.feature_layers, drafter.tree) == (True, (1, 2, 4), chain_tree(4))
    if name != "qwen3":
        drafted = load_file(GOLDEN / name / "model.safetensors")["t2d"]
        np.testing.assert_array_equal(drafter.network.target_ids, np.flatnonzero(drafted))
    else:
        assert drafter.network.target_ids is None
    compare(drafter.network, target, expected["features"], expected["tokens"], expected["outputs"], expected["logits"])


def test_golden_flags_matter(target: specjax.Target, tmp_path: Path) -> None:
    """The comparison notices a norm in the wrong place."""
    expected = np.load(GOLDEN / "normed-residual" / "expected.npz")
    raw = json.loads((GOLDEN / "normed-residual" / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(GOLDEN / "normed-residual" / "model.safetensors")
    values = [expected["features"], expected["tokens"], expected["outputs"][:2], expected["logits"][:2]]
    for flag in ("norm_before_residual", "norm_output"):
        (tmp_path / "config.json").write_text(json.dumps(raw | {flag: False}))
        drafter = load_drafter(tmp_path, target)
        with pytest.raises(AssertionError):
            compare(drafter.network, target, *values)
    absent = {key: value for key, value in raw.items() if key != "norm_before_residual"}  # means true
    (tmp_path / "config.json").write_text(json.dumps(absent))
    assert load_drafter(tmp_path, target).network.config.norm_before_residual


@pytest.mark.torch
@pytest.mark.parametrize(
    "flags",
    [{}, {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}, {"fc_norm": True}],
    ids=["raw", "normed", "fc_norm"],
)
def test_speculators_reads_what_we_write(flags: dict[str, bool], tmp_path: Path) -> None:
    """Random networks saved by us, loaded by the package, several steps."""
    reference = maker()
    model = testing.tiny_model(num_layers=7, windows=(None,) * 7)
    write_hf_directory(tmp_path / "target", model.config, {p: parameter(model, p) for p in recipes(model.config)})
    target = specjax.load(tmp_path / "target")
    config = Eagle3Config.of(target.model.config, len(WORDS), **flags)
    network = Eagle3Network.random(config, seed=1, scale=0.2, d2t=offsets(WORDS))
    drafter = Eagle(network, chain_tree(3))
    # with embeddings: where they are missing the package does not always notice, and computes with what memory holds
    base = str(tmp_path / "target")
    save_drafter(tmp_path / "drafter", drafter, target, format="speculators", base_model=base, embeddings=True)

    from speculators import SpeculatorModel, SpeculatorModelConfig

    read = SpeculatorModelConfig.from_pretrained(tmp_path / "drafter")
    read.transformer_layer_config._attn_implementation = "eager"
    theirs = SpeculatorModel.from_pretrained(tmp_path / "drafter", config=read).eval()
    assert theirs.target_layer_ids == [2, 3, 4]
    np.testing.assert_array_equal(theirs.d2t.numpy() + np.arange(len(WORDS)), WORDS)
    random = np.random.default_rng(0)
    features = random.standard_normal((9, 96)).astype(np.float32)
    tokens = random.integers(1, 64, 10)
    outputs, logits = reference.unrolled(theirs, features, tokens, steps=3)
    network = load_drafter(tmp_path / "drafter", target).network
    assert not network.config.own_embedding  # the copy is not read
    compare(network, target, features, tokens, outputs, logits)


def compare(
    network: Eagle3Network,
    target: specjax.Target,
    features: np.ndarray,
    tokens: np.ndarray,
    outputs: np.ndarray,
    logits: np.ndarray,
) -> None:
    """The network's outputs and logits over a text, step by step. Theirs are outputs before any norm."""
    steps, length = outputs.shape[:2]
    text = jnp.asarray(tokens, jnp.int32)[None]
    parts = jnp.split(
        jnp.asarray(np.pad(features, ((0, 1), (0, 0))))[None], 3, axis=-1
    )  # the last token has no feature
    mask = jnp.tril(jnp.ones((1, length + 1, length + 1), bool))

    @jax.jit
    def run(network: Any, model: Any) -> Any:
        fused = network.fuse(dict(zip(network.features, parts, strict=True)))
        found = unroll(network, model, fused, text, jnp.arange(length + 1)[None], mask, steps)
        return found, [network.logits(x, model) for x in found]

    found, scores = run(network, target.model)
    for step in range(steps):
        if not network.config.norm_output:
            np.testing.assert_allclose(found[step][0, :length], outputs[step], atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(scores[step][0, :length], logits[step], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("bias", [False, True])
def test_eagle1_official_forward(bias: bool, tmp_path: Path) -> None:
    """Features of a text, then four tokens drafted from the head's own outputs, by the tensors as they are on disk."""
    target = testing.tiny_target(testing.tiny_model())
    network = EagleNetwork.random(EagleConfig.of(target.model.config, fc_bias=bias), scale=0.15)
    save_drafter(tmp_path, Eagle(network), target, format="sglang" if bias else "vllm")
    tensors = {name: value.astype(np.float64) for name, value in load_file(tmp_path / "model.safetensors").items()}
    config = json.loads((tmp_path / "config.json").read_text())
    random = np.random.default_rng(0)
    features, tokens = random.standard_normal((9, 32)), random.integers(0, 64, 14)
    features = list(features)
    theirs = official_eagle1(tensors, config, np.array(features), tokens[1:10])
    for i in range(10, 14):  # each output stands for the next feature
        features.append(theirs[-1])
        theirs = official_eagle1(tensors, config, np.array(features), tokens[1 : i + 1])

    drafter = load_drafter(tmp_path, target)
    assert drafter.network.config == network.config

    @jax.jit
    def run(network: Any, model: Any, true: Any, text: Any) -> Any:
        fed = feed(network, model, pair(true, text))
        found, earlier = [fed.features], fed.block
        for position in range(9, 13):
            embedded = network.embeddings(text[:, position + 1 : position + 2], model)
            mask = jnp.ones((1, 1, position + 1), bool)
            fed = network(embedded, found[-1][:, -1:], jnp.array([[position]]), mask, earlier=earlier)
            found.append(fed.features)
            earlier = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=2), earlier, fed.block)
        return jnp.concatenate(found, axis=1)[0]

    true, text = np.array(features[:9], np.float32)[None], np.array(tokens, np.int32)[None]
    np.testing.assert_allclose(run(drafter.network, target.model, true, text), theirs, atol=TOLERANCE, rtol=0)


def official_eagle1(
    tensors: dict[str, np.ndarray], config: dict[str, Any], features: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    """The head's outputs `[T, M]`: `features[t]` at t, `tokens[t]` at t + 1."""
    heads, kv, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    x = np.concatenate([tensors["embed_tokens.weight"][tokens], features], axis=1) @ tensors["fc.weight"].T
    x = x + tensors.get("fc.bias", 0.0)
    length = len(x)
    angles = np.arange(length)[:, None] / config["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    cos, sin = (np.tile(f(angles), 2)[:, None] for f in (np.cos, np.sin))

    def projected(name: str, count: int, turned: bool) -> np.ndarray:
        y = (x @ tensors[f"layers.0.self_attn.{name}_proj.weight"].T).reshape(length, count, dim)
        half = np.concatenate([-y[..., dim // 2 :], y[..., : dim // 2]], axis=-1)
        return y * cos + half * sin if turned else y

    q, k, v = projected("q", heads, True), projected("k", kv, True), projected("v", kv, False)
    k, v = (np.repeat(y, heads // kv, axis=1) for y in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) / dim**0.5
    scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v).reshape(length, -1)
    x = x + mixed @ tensors["layers.0.self_attn.o_proj.weight"].T
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
    y = y * tensors["layers.0.post_attention_layernorm.weight"]
    gate, up = (y @ tensors[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (gate / (1 + np.exp(-gate)) * up) @ tensors["layers.0.mlp.down_proj.weight"].T


def parameter(model: Any, path: str) -> np.ndarray:
    for step in path.split("."):
        model = model[int(step)] if step.isdigit() else getattr(model, step)
    return np.asarray(model[...])


def maker() -> ModuleType:
    """The script that made the golden files; it holds the reference computation."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("speculators", reason="the speculators package is not installed")
    spec = importlib.util.spec_from_file_location("make_speculators", GOLDEN / "make_speculators.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
