"""Logits of every family against PyTorch transformers: from golden files, and live where PyTorch is installed."""

import dataclasses
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.cache import write
from specjax.models import layers
from specjax.models.checkpoint import read_hf_directory, write_hf_directory
from specjax.models.config import ModelConfig, RopeConfig
from specjax.models.decoder import Decoder

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(folder.parent.name for folder in GOLDEN.glob("*/expected.npz"))
LIVE = [*CASES, "llama-yarn-truncate", "llama-yarn-mscale", "llama-one-kv-head", "mistral-no-window", "qwen2-no-window"]
LIVE += ["qwen3-bias-window", "qwen3-moe-step", "gemma3-untied"]
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=CASES)
def golden(request: pytest.FixtureRequest) -> tuple[Decoder, np.ndarray, np.ndarray]:
    folder = GOLDEN / request.param
    expected = np.load(folder / "expected.npz")
    return Decoder.from_arrays(*read_hf_directory(folder)), expected["input_ids"], expected["logits"]


def test_every_family_is_there() -> None:
    families = {ModelConfig.from_hf(_config(name)).family for name in CASES}
    assert families == {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3"}
    kinds = {ModelConfig.from_hf(_config(name)).rope.kind for name in CASES}
    assert kinds == {"default", "linear", "llama3", "yarn"}


@pytest.mark.parametrize("piece", [layers.PIECE, 7])
def test_without_cache(
    golden: tuple[Decoder, np.ndarray, np.ndarray], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one go, and in pieces as long texts are."""
    model, ids, logits = golden
    monkeypatch.setattr(layers, "PIECE", piece)
    np.testing.assert_allclose(forward(model, ids), logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("block", [1, 5])
def test_through_the_cache(golden: tuple[Decoder, np.ndarray, np.ndarray], block: int) -> None:
    """Token by token, and in blocks of 5, one row one block ahead of the other."""
    model, ids, logits = golden
    rows, length = ids.shape
    cache, call = model.init_cache(rows, length + block), jax.jit(cached)
    found = np.zeros_like(logits)
    for start in range(0, length + block, block):
        starts = np.clip(np.array([start, start - block]), 0, length - block)
        tokens = np.stack([row[s : s + block] for row, s in zip(ids, starts, strict=True)])
        scores, cache = call(model, tokens, jnp.asarray(starts, jnp.int32), cache)
        for i, s in enumerate(starts):
            found[i, s : s + block] = scores[i]
    np.testing.assert_allclose(found, logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral", {"windows": (None, None, None)}),
        ("mistral", {"windows": (9, 9, 9)}),
        ("qwen2", {"windows": (9, 9, 9)}),
        ("gemma3", {"windows": (8, 8, 8)}),
        ("gemma3", {"local_rope": RopeConfig()}),
        ("gemma3", {"activation": "silu"}),
        ("gemma3", {"attention_scale": 10**-0.5}),
        ("gemma3", {"embed_scale": 1.0}),
        ("gemma3", {"norm_offset": 0.0}),
        ("llama-llama3", {"rope": RopeConfig(theta=500.0)}),
        ("llama-linear", {"rope": RopeConfig(theta=100.0)}),
        ("qwen3-yarn", {"rope": RopeConfig(theta=1000.0)}),
    ],
)
def test_golden_files_notice(name: str, changes: dict) -> None:
    """A wrong reading of the configuration shows in the golden logits: the files are able to fail."""
    config, arrays = read_hf_directory(GOLDEN / name)
    expected = np.load(GOLDEN / name / "expected.npz")
    if "local_rope" not in changes and "rope" in changes:
        changes = changes | {"local_rope": changes["rope"]}
    wrong = Decoder.from_arrays(dataclasses.replace(config, **changes), arrays)
    assert np.abs(forward(wrong, expected["input_ids"]) - expected["logits"]).max() > 100 * TOLERANCE


@pytest.mark.torch
@pytest.mark.parametrize("name", LIVE)
def test_live(name: str, tmp_path: Path) -> None:
    """A checkpoint made anew from another seed, the same text through both."""
    make = make_golden()
    cases = {case.name: case for case in (*make.CASES, *make.VARIANTS)}
    assert sorted(cases) == sorted(LIVE)
    case = cases[name]
    model, ids = case.model(seed=1000), make.input_ids(1000)
    expected = make.logits(model, ids)
    make.save(model, tmp_path, case.dtype)
    ours = Decoder.from_arrays(*read_hf_directory(tmp_path))
    np.testing.assert_allclose(forward(ours, ids), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_transformers_reads_what_we_write(name: str, tmp_path: Path) -> None:
    make = make_golden()
    import transformers

    write_hf_directory(tmp_path, *read_hf_directory(GOLDEN / name))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32", attn_implementation="eager")
    expected = np.load(GOLDEN / name / "expected.npz")
    np.testing.assert_allclose(make.logits(model.eval(), expected["input_ids"]), expected["logits"], atol=1e-5, rtol=0)


def forward(model: Decoder, ids: np.ndarray) -> np.ndarray:
    """Logits of whole texts in one block."""
    rows, length = ids.shape
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
    return np.asarray(jax.jit(lambda m, *args: m.logits(m(*args).hidden))(model, ids, positions, mask))


def cached(model: Decoder, tokens, starts, cache):
    """Logits of a block behind the cached prefix, and the cache with the block written."""
    rows, block = tokens.shape
    positions = starts[:, None] + jnp.arange(block)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((block, block), bool)), (rows, block, block))
    out = model(tokens, positions, mask, cache, starts)
    return model.logits(out.hidden), write(cache, out.block, starts)


def make_golden() -> ModuleType:
    pytest.importorskip("torch", reason="PyTorch is not installed: the golden files stand for it")
    spec = importlib.util.spec_from_file_location("make_golden", GOLDEN / "make_golden.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _config(name: str) -> dict:
    return json.loads((GOLDEN / name / "config.json").read_text())
