"""GGUF files of every family against the Hugging Face checkpoints they were made from, and every way to be broken."""

import dataclasses
import json
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file

from specjax.errors import CheckpointError
from specjax.models.checkpoint import read_hf_directory, write_hf_directory
from specjax.models.config import RopeConfig
from specjax.models.decoder import Decoder
from specjax.models.gguf import read_gguf
from specjax.models.gguf_file import open_gguf

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(folder.parent.name for folder in GOLDEN.glob("*/expected.npz"))
ToGguf = Callable[..., Path]


@pytest.mark.parametrize("case", CASES)
def test_same_as_the_hugging_face_directory(case: str, to_gguf: ToGguf, tmp_path: Path) -> None:
    folder = all_sparse(tmp_path / "moe") if case == "qwen3-moe" else GOLDEN / case
    config, arrays = read_gguf(to_gguf(folder))
    expected_config, expected = read_hf_directory(folder)
    if case == "qwen2":  # the format has no windows for it
        expected_config = dataclasses.replace(expected_config, windows=(None,) * expected_config.num_layers)
    assert config == expected_config
    assert arrays.keys() == expected.keys()
    for name, value in expected.items():
        tolerance = 1e-6 if config.norm_offset and "norm" in name else 0.0  # w + 1 - 1 in float32
        np.testing.assert_allclose(arrays[name], value.astype(np.float32), atol=tolerance, rtol=0, err_msg=name)
        assert arrays[name].dtype == np.float32


def all_sparse(folder: Path) -> Path:
    """The golden mixture of experts with layer 0's experts in its dense layer 1: the format has no dense layers."""
    shutil.copytree(GOLDEN / "qwen3-moe", folder)
    tensors = {k: v for k, v in load_file(folder / "model.safetensors").items() if "layers.1.mlp" not in k}
    tensors |= {k.replace("layers.0", "layers.1"): v + v for k, v in tensors.items() if "layers.0.mlp" in k}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mlp_only_layers": []}))
    return folder


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("qwen2", "qwen3-moe")])
def test_logits(case: str, to_gguf: ToGguf) -> None:
    """The logits that PyTorch computed from the original checkpoint."""
    golden = np.load(GOLDEN / case / "expected.npz")
    model = Decoder.from_arrays(*read_gguf(to_gguf(case)))
    assert np.abs(_logits(model, golden["input_ids"]) - golden["logits"]).max() < 1e-4


KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_quantised(kind: Kind, to_gguf: ToGguf, tmp_path: Path) -> None:
    """Dequantised values, q and k in the right order, and the same logits as the same weights in a directory."""
    stored: dict[str, np.ndarray] = {}

    def kinds(name: str) -> Kind:
        return kind if stored[name].shape[-1] % 32 == 0 else Kind.F16

    config, arrays = read_gguf(to_gguf("llama", kinds, change=stored.update))
    embed = gguf.dequantize(gguf.quantize(stored["token_embd.weight"], kind), kind)
    np.testing.assert_array_equal(arrays["embed"], embed)
    down = stored["blk.0.ffn_down.weight"].astype(np.float16)
    np.testing.assert_array_equal(arrays["layers.0.down"], down.astype(np.float32).T)
    # row 2r of llama.cpp's order is row r of the first half of a head, row 2r + 1 that of the second half
    half = config.head_dim // 2
    query = gguf.dequantize(gguf.quantize(stored["blk.1.attn_q.weight"], kind), kind)
    first_head = arrays["layers.1.qkv"][:, 0, 0].T
    np.testing.assert_array_equal(first_head[:half], query[0 : 2 * half : 2])
    np.testing.assert_array_equal(first_head[half:], query[1 : 2 * half : 2])

    write_hf_directory(tmp_path / "hf", config, arrays)
    ids = np.arange(12)[None] + 3
    ours, again = Decoder.from_arrays(config, arrays), Decoder.from_arrays(*read_hf_directory(tmp_path / "hf"))
    np.testing.assert_array_equal(_logits(ours, ids), _logits(again, ids))


def test_header_as_the_gguf_package_reads_it(to_gguf: ToGguf) -> None:
    file = to_gguf("gemma3", metadata={"general.name": "näme", "some.list": ["a", "b"], "some.flags": [True, False]})
    ours, theirs = open_gguf(file), gguf.GGUFReader(file)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            expected = field.contents()
            assert ours.metadata[key] == (pytest.approx(expected) if isinstance(expected, float) else expected), key
    assert {t.name: (t.data_offset, t.n_bytes) for t in theirs.tensors} == {
        t.name: (t.offset, t.nbytes) for t in ours.tensors.values()
    }


def test_llama3_table_of_real_size(to_gguf: ToGguf, llama3_table: Callable[..., np.ndarray]) -> None:
    """Thirty-two frequencies, as in Llama 3.2 1B: its factor and original length come out of the table."""
    rope = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    table = {"rope_freqs.weight": llama3_table(64, rope | {"rope_theta": 500000.0})}
    file = to_gguf("llama", change=lambda t: t.update(table), metadata={"llama.rope.freq_base": 500000.0})
    assert read_gguf(file)[0].rope == RopeConfig("llama3", 500000.0, 32.0, 1.0, 4.0, 8192)
    table["rope_freqs.weight"][:] = 1.0
    assert read_gguf(to_gguf("llama", change=lambda t: t.update(table)))[0].rope.kind == "default"


def test_head_counts_one_a_layer(to_gguf: ToGguf) -> None:
    config, _ = read_gguf(to_gguf("llama", metadata={"llama.attention.head_count_kv": [2, 2, 2]}))
    assert config.num_kv_heads == 2
    refused(to_gguf("llama", metadata={"llama.attention.head_count_kv": [2, 1, 2]}), "attention.head_count_kv")


def test_several_ends(to_gguf: ToGguf) -> None:
    more = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}
    assert read_gguf(to_gguf("llama", metadata=more))[0].eos_token_ids == (2, 5)


def drop(*names: str) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


def test_missing_tensors(to_gguf: ToGguf) -> None:
    refused(to_gguf("llama", change=drop("blk.1.ffn_up.weight", "output_norm.weight")), "2 missing", "blk.1.ffn_up")
    refused(to_gguf("llama", change=drop("token_embd.weight")), "missing", "token_embd.weight")


def test_unexpected_tensor(to_gguf: ToGguf) -> None:
    extra = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    refused(to_gguf("llama", change=lambda tensors: tensors.update(extra)), "unexpected", "blk.0.attn_sinks.weight")


def test_wrong_shape(to_gguf: ToGguf) -> None:
    wrong = {"blk.2.ffn_down.weight": np.ones((32, 20), np.float32)}
    refused(
        to_gguf("llama", change=lambda tensors: tensors.update(wrong)), "blk.2.ffn_down.weight", "[32, 20]", "[32, 24]"
    )


def test_llama3_table_of_another_kind(to_gguf: ToGguf) -> None:
    table = {"rope_freqs.weight": np.array([1, 3, 2, 4, 8], np.float32)}
    refused(to_gguf("llama", change=lambda tensors: tensors.update(table)), "rope_freqs.weight")


@pytest.mark.parametrize(
    ("metadata", "part"),
    [
        ({"general.architecture": "mamba"}, "mamba"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.block_count": None}, "block_count"),
        ({"llama.block_count": 2_000_000_000}, "2000000000"),
        ({"llama.embedding_length": "wide"}, "wide"),
        ({"split.count": 3}, "parts"),
    ],
)
def test_unsupported_metadata(metadata: dict[str, object], part: str, to_gguf: ToGguf) -> None:
    file = to_gguf("llama", metadata={k: v for k, v in metadata.items() if k != "general.architecture"})
    if "general.architecture" in metadata:
        file.write_bytes(file.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1))
    refused(file, part)


def test_not_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK\x03\x04 something else")
    refused(file, "not a GGUF file")
    file.write_bytes(b"")
    refused(file, "not a GGUF file")
    refused(tmp_path / "absent.gguf", "No such file")
    refused(tmp_path, "directory")


def test_truncated(to_gguf: ToGguf) -> None:
    """Cut anywhere: in the magic, the metadata, the tensor table and the weights."""
    file = to_gguf("llama")
    whole = file.read_bytes()
    for end in [*range(4, 2000, 97), len(whole) // 2, len(whole) - 100]:
        file.write_bytes(whole[:end])
        refused(file, "truncated")
    file.write_bytes(whole[: len(whole) // 2])
    refused(file, "incomplete tensors", "blk.")


def test_damaged_header(to_gguf: ToGguf) -> None:
    """Any one byte of the header changed: read, or refused as a checkpoint error, never another exception."""
    file = to_gguf("llama")
    whole = file.read_bytes()
    rng = np.random.default_rng(0)
    for at in rng.integers(4, 2500, 150):
        damaged = bytearray(whole)
        damaged[at] ^= int(rng.integers(1, 256))
        file.write_bytes(damaged)
        with suppress(CheckpointError):
            read_gguf(file)


@pytest.mark.parametrize(("number", "part"), [(999, "999"), (int(Kind.Q8_K), "Q8_K")])
def test_unknown_quantisation(number: int, part: str, to_gguf: ToGguf) -> None:
    file = to_gguf("llama")
    whole = bytearray(file.read_bytes())
    name = b"token_embd.weight"
    at = whole.index(name) + len(name) + 4 + 2 * 8  # number of dimensions, dimensions
    whole[at : at + 4] = struct.pack("<I", number)
    file.write_bytes(whole)
    refused(file, part)


def test_unknown_version(to_gguf: ToGguf) -> None:
    file = to_gguf("llama")
    whole = bytearray(file.read_bytes())
    for version in (b"\x09\0\0\0", b"\0\0\0\x03"):
        whole[4:8] = version
        file.write_bytes(whole)
        refused(file, "version")


def refused(file: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_gguf(file)
    message = str(caught.value)
    assert message.startswith(str(file)), message
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def _logits(model: Decoder, ids: np.ndarray) -> np.ndarray:
    batch, length = ids.shape
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))
    return np.asarray(model.logits(model(jnp.asarray(ids), positions, mask).hidden))
