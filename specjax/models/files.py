"""Files of a model's directory: JSON and safetensors in, whole files out, with errors that name file and tensor."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from specjax.errors import CheckpointError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16", "F64")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def read_json(file: Path) -> dict[str, Any]:
    """Raises CheckpointError where there is no such file, or none that holds a JSON object."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror or error}; expected a Hugging Face model directory") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: not valid JSON ({one_line(error)})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object")
    return value


def safetensors_files(folder: Path, single: str = WEIGHTS) -> list[Path]:
    """The file `single`, or the shards that an index lists; empty where the directory has neither."""
    if (folder / single).is_file():
        return [folder / single]
    if not (folder / INDEX).is_file():
        return []
    names = read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{folder / INDEX}: missing key 'weight_map'")
    shards = [folder / name for name in sorted(set(names.values()))]
    if missing := [file.name for file in shards if not file.is_file()]:
        raise CheckpointError(f"{folder}: missing file(s) that {INDEX} lists: {some(missing)}")
    return shards


def pickles(folder: Path) -> list[str]:
    """Names of files that PyTorch pickled; they are not read, since opening one can run code."""
    return sorted(f.name for f in folder.iterdir() if f.suffix in PICKLES)


def open_safetensors(file: Path) -> Any:
    """A `safe_open` handle; raises CheckpointError for a truncated file, or another format."""
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: truncated or not a safetensors file ({one_line(error)})") from error


def compare_shapes(
    where: str,
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    kind: str = "tensor",
) -> None:
    """Names and shapes must agree."""
    if missing := [name for name in expected if name not in found]:
        raise CheckpointError(f"{where}: {len(missing)} missing {kind}(s): {some(missing)}")
    if unexpected := [name for name in found if name not in expected]:
        raise CheckpointError(f"{where}: {len(unexpected)} unexpected {kind}(s): {some(unexpected)}")
    wrong = [name for name in expected if found[name] != expected[name]]
    if wrong:
        shapes = [f"{n} is {list(found[n])}, {CONFIG} asks for {list(expected[n])}" for n in wrong]
        raise CheckpointError(f"{where}: {len(wrong)} {kind}(s) of the wrong shape: {some(shapes, 2)}")


def replace_files(folder: Path, writers: Mapping[str, Callable[[Path], Any]]) -> None:
    """Write every file under a temporary name first, then rename them all."""
    made = not folder.exists()
    temporary = {name: folder / f".{name}.{os.getpid()}.tmp" for name in writers}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, write in writers.items():
            temporary[name].touch()
            mode = temporary[name].stat().st_mode
            write(temporary[name])
            temporary[name].chmod(mode)  # safetensors makes its file private to the user
        for name, file in temporary.items():
            os.replace(file, folder / name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot write the checkpoint: {one_line(error)}") from error
    finally:
        if folder.is_dir():
            for file in temporary.values():
                file.unlink(missing_ok=True)
            if made and not any(folder.iterdir()):
                folder.rmdir()


def some(names: Iterable[str], count: int = 4) -> str:
    """The first few of a list, and how many more there are."""
    names = list(names)
    rest = len(names) - count
    return ", ".join(names[:count]) + (f" and {rest} more" if rest > 0 else "")


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
