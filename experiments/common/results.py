"""Results on disk: where they came from, and written whole or not at all."""

import contextlib
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Literal

import jax

from specjax import InputError, Target

PACKAGES = ("specjax", "jax", "jaxlib", "flax", "transformers", "numpy")


def provenance(target: Target, **more: Any) -> dict[str, Any]:
    """Where numbers come from: command, commit, versions, machine, model."""
    devices = jax.devices()
    return {
        "command": shlex.join(["python", *sys.argv]),
        **_commit(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "device": devices[0].device_kind,
        "platform": devices[0].platform,
        "device_count": len(devices),
        "cpu": _cpu_name(),
        "cpu_count": cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "dtype": target.dtype,
        "matmul_precision": str(getattr(jax.config, "jax_default_matmul_precision", None) or "default"),
        "target": target.name,
        "target_revision": target.revision,
        "target_sha256": target.weights_hash,
        **more,
    }


def check_output(directory: Path | None) -> None:
    """Raise InputError, before anything is computed, where results could not be written. Leaves nothing behind."""
    if directory is None:
        return
    place = directory.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise InputError(f"--output {directory}: {place} is a file; expected a directory")
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise InputError(f"--output {directory}: cannot write in {place} ({error.strerror})") from None


def write_json(path: Path, content: Any) -> None:
    """Strict JSON: numbers that are none are refused."""

    def write(file: IO[str]) -> None:
        json.dump(content, file, indent=1, ensure_ascii=False, allow_nan=False)
        file.write("\n")

    _write_whole(path, "w", write)


def write_text(path: Path, text: str) -> None:
    _write_whole(path, "w", lambda file: file.write(text))


def write_bytes(path: Path, data: bytes) -> None:
    _write_whole(path, "wb", lambda file: file.write(data))


def cpu_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _commit() -> dict[str, Any]:
    """Of the repository this file is in: its commit, and whether tracked files were changed; None outside of git."""
    try:
        here = Path(__file__).resolve().parent
        git = ["git", "-C", str(here)]
        if _output([*git, "ls-files", Path(__file__).name]) == "":  # another project's repository around a copy of us
            return {"commit": None, "changed_since_commit": None}
        changed = _output([*git, "status", "--porcelain", "--untracked-files=no"])
        return {"commit": _output([*git, "rev-parse", "HEAD"]), "changed_since_commit": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "changed_since_commit": None}


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _write_whole(path: Path, mode: Literal["w", "wb"], write: Callable[[IO[Any]], Any]) -> None:
    """Write beside and rename, so that a file of this name is always whole."""
    name = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        encoding = "utf-8" if mode == "w" else None
        with tempfile.NamedTemporaryFile(
            mode, dir=path.parent, prefix=f".{path.name}.", delete=False, encoding=encoding
        ) as f:
            name = f.name
            write(f)
        os.chmod(name, 0o666 & ~_umask())  # a temporary file is its owner's alone
        os.replace(name, path)
        name = None
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(name)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
