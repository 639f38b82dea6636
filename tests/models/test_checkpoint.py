"""Hugging Face directories in and out, and one planted fault for every way a checkpoint can be wrong."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.errors import CheckpointError
from specjax.models import checkpoint
from specjax.models.checkpoint import read_hf_directory, write_hf_directory
from specjax.models.layout import recipes

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(folder.parent.name for folder in GOLDEN.glob("*/expected.npz"))
Tensors = dict[str, np.ndarray]


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(GOLDEN / name, tmp_path / name))


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


def refused(folder: Path, *parts: str) -> str:
    """The message of the error, which is one line and names every part."""
    with pytest.raises(CheckpointError) as caught:
        read_hf_directory(folder)
    message = str(caught.value)
    assert "\n" not in message
    for part in (str(folder), *parts):
        assert part in message, message
    return message


def same(a: Tensors, b: Tensors) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.parametrize("name", CASES)
def test_layout(name: str) -> None:
    config, arrays = read_hf_directory(GOLDEN / name)
    assert {path: value.shape for path, value in arrays.items()} == {p: r.shape for p, r in recipes(config).items()}
    assert ("head" in arrays) == (not config.tie_embeddings)
    stored = load_file(GOLDEN / name / "model.safetensors")
    assert sum(value.size for value in arrays.values()) == sum(value.size for value in stored.values())
    assert {value.dtype for value in arrays.values()} == {value.dtype for value in stored.values()}


def test_query_head_order() -> None:
    """Query head h is head h % G of key/value head h // G; then the key, then the value."""
    config, arrays = read_hf_directory(GOLDEN / "llama")
    stored, d = load_file(GOLDEN / "llama" / "model.safetensors"), config.head_dim
    group = config.num_heads // config.num_kv_heads
    q, k, v = (stored[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv")
    for head in range(config.num_heads):
        ours = arrays["layers.1.qkv"][:, head // group, head % group]
        np.testing.assert_array_equal(ours, q[head * d : (head + 1) * d].T)
    for head in range(config.num_kv_heads):
        np.testing.assert_array_equal(arrays["layers.1.qkv"][:, head, group], k[head * d : (head + 1) * d].T)
        np.testing.assert_array_equal(arrays["layers.1.qkv"][:, head, group + 1], v[head * d : (head + 1) * d].T)


@pytest.mark.parametrize("name", CASES)
def test_written_and_read_again(name: str, tmp_path: Path) -> None:
    config, arrays = read_hf_directory(GOLDEN / name)
    write_hf_directory(tmp_path / "a" / "b", config, arrays)
    again, copies = read_hf_directory(tmp_path / "a" / "b")
    assert again == config
    same(arrays, copies)
    assert sorted(f.name for f in (tmp_path / "a" / "b").iterdir()) == ["config.json", "model.safetensors"]
    theirs = load_file(GOLDEN / name / "model.safetensors")
    same(theirs, load_file(tmp_path / "a" / "b" / "model.safetensors"))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dtypes(dtype: type, tmp_path: Path) -> None:
    config, arrays = read_hf_directory(GOLDEN / "qwen3-yarn")
    arrays = {name: value.astype(dtype) for name, value in arrays.items()}
    write_hf_directory(tmp_path, config, arrays)
    same(arrays, read_hf_directory(tmp_path)[1])
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == np.dtype(dtype).name


def shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


def test_shards(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    shard(folder)
    same(read_hf_directory(folder)[1], read_hf_directory(GOLDEN / "llama")[1])
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "model-00002-of-00002.safetensors", "missing file")
    (folder / "model.safetensors.index.json").write_text("{}")
    refused(folder, "model.safetensors.index.json", "weight_map")


@pytest.mark.parametrize("style", ["language_model.model.", "model.language_model."])
def test_multimodal_gemma3(copied: Callable[[str], Path], style: str) -> None:
    folder = copied("gemma3")
    expected = read_hf_directory(folder)

    def wrap(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[style + name.removeprefix("model.")] = tensors.pop(name)
        tensors["vision_tower.x.weight"] = tensors["model.vision_tower.x.weight"] = np.zeros(3, np.float32)
        tensors["multi_modal_projector.y"] = tensors["model.multi_modal_projector.y"] = np.zeros(3, np.float32)

    edit(folder, wrap)
    text = json.loads((folder / "config.json").read_text())
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (folder / "config.json").write_text(json.dumps(raw))
    config, arrays = read_hf_directory(folder)
    assert config == expected[0]
    same(arrays, expected[1])


def test_buffers_and_duplicate_heads_are_ignored(copied: Callable[[str], Path]) -> None:
    folder = copied("qwen3-yarn")  # tied
    expected = read_hf_directory(folder)[1]

    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(5, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    edit(folder, add)
    same(read_hf_directory(folder)[1], expected)
    edit(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))  # saved under the other name only
    same(read_hf_directory(folder)[1], expected)


def test_tied_head_that_differs(copied: Callable[[str], Path]) -> None:
    folder = copied("qwen3-yarn")
    expected = read_hf_directory(folder)[1]
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] * 2}))
    with pytest.warns(UserWarning, match="tie_word_embeddings is true"):
        same(read_hf_directory(folder)[1], expected)
    configure(folder, tie_word_embeddings=False)
    assert "head" in read_hf_directory(folder)[1]


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated(copied: Callable[[str], Path], keep: int) -> None:
    folder = copied("llama")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:keep])
    refused(folder, "model.safetensors", "truncated")


def test_missing_tensors(copied: Callable[[str], Path]) -> None:
    folder = copied("qwen2")
    edit(folder, lambda tensors: tensors.pop("model.layers.2.self_attn.k_proj.bias"))
    refused(folder, "1 missing tensor", "model.layers.2.self_attn.k_proj.bias")
    configure(folder, num_hidden_layers=4, layer_types=None)
    refused(folder, "13 missing tensor", "and 9 more")


def test_unexpected_tensors(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    edit(folder, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": np.zeros(24, np.float16)}))
    refused(folder, "1 unexpected tensor", "model.layers.0.mlp.up_proj.bias")


def test_wrong_shape(copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in the headers: nothing is read."""
    monkeypatch.setattr(checkpoint._Tensors, "read", lambda *_: pytest.fail("a tensor was read"))
    folder = copied("llama")
    configure(folder, head_dim=8)
    refused(folder, "wrong shape", "model.layers.0.self_attn.q_proj.weight is [40, 32]", "[32, 32]", "more")
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": np.zeros((32, 1), np.float16)}))
    configure(folder, head_dim=10)
    refused(folder, "1 tensor", "model.norm.weight is [32, 1]", "[32]")


def test_wrong_dtype(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": np.zeros(32, np.int8)}))
    refused(folder, "model.norm.weight is I8", "F32")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "pytorch_model-00001-of-00002.bin"])
def test_pickles(copied: Callable[[str], Path], name: str) -> None:
    folder = copied("llama")
    (folder / "model.safetensors").rename(folder / name)
    refused(folder, name, "pickle", 'python -c "import transformers', "save_pretrained")


def test_no_weights_no_config_no_directory(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("llama")
    (folder / "model.safetensors").unlink()
    refused(folder, "no model.safetensors")
    (folder / "config.json").write_text('{"model_type": ')
    refused(folder, "config.json", "not valid JSON")
    (folder / "config.json").write_text("[]")
    refused(folder, "config.json", "JSON object")
    (folder / "config.json").unlink()
    refused(folder, "config.json", "No such file")
    refused(tmp_path / "nowhere", "config.json", "No such file")


def test_configuration_faults_name_the_file(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    configure(folder, rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    refused(folder, "config.json", "'dynamic'", "default, linear, llama3, yarn")
    configure(folder, model_type="mamba")
    refused(folder, "config.json", "'mamba'", "supported: gemma3")


def test_failed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, arrays = read_hf_directory(GOLDEN / "llama")
    write_hf_directory(tmp_path / "old", config, arrays)

    def full(tensors: Tensors, file: Path, metadata: dict[str, str]) -> None:
        file.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    doubled = {name: value * 2 for name, value in arrays.items()}
    for folder in (tmp_path / "old", tmp_path / "new"):
        with pytest.raises(CheckpointError, match="No space left on device"):
            write_hf_directory(folder, config, doubled)
    assert not (tmp_path / "new").exists()
    assert sorted(f.name for f in (tmp_path / "old").iterdir()) == ["config.json", "model.safetensors"]
    same(read_hf_directory(tmp_path / "old")[1], arrays)


def test_write_refuses_what_does_not_fit(tmp_path: Path) -> None:
    config, arrays = read_hf_directory(GOLDEN / "llama")
    with pytest.raises(CheckpointError, match=r"missing parameter\(s\): layers.1.qkv"):
        write_hf_directory(tmp_path, config, {k: v for k, v in arrays.items() if k != "layers.1.qkv"})
    with pytest.raises(CheckpointError, match=r"unexpected parameter\(s\): extra"):
        write_hf_directory(tmp_path, config, arrays | {"extra": np.zeros(3)})
    with pytest.raises(CheckpointError, match=r"norm is \[31\], .*\[32\]"):
        write_hf_directory(tmp_path, config, arrays | {"norm": arrays["norm"][1:]})
    assert list(tmp_path.iterdir()) == []
