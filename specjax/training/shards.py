"""Rows on disk, shard by shard: each file whole or not there, and a manifest that says what is done and from what.

output/manifest.json
output/shard-00000.jsonl, shard-00001.jsonl, …      (or .jsonl.gz)
"""

import contextlib
import gzip
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specjax.errors import InputError, SpecjaxError

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class Shard:
    """A file that is done.

    Attributes:
        file: its name.
        sha256, bytes: of the file.
        rows: lines in it.
        prompt_tokens, tokens: of all rows.
        finish_reasons: how many rows ended how.
        dropped: how many texts were left out for what reason.
        seconds: it took.
    """

    file: str
    sha256: str
    bytes: int
    rows: int
    prompt_tokens: int
    tokens: int
    finish_reasons: dict[str, int]
    dropped: dict[str, int]
    seconds: float


@dataclass(frozen=True)
class Run:
    """A directory of shards, begun or continued.

    Attributes:
        directory: where it is.
        identity: all that the rows depend on; JSON values only.
        num_shards: of the finished run.
        notes: further facts for the manifest, that may differ when it is continued (versions).
        shards: what is done, by number.
    """

    directory: Path
    identity: Mapping[str, Any]
    num_shards: int
    notes: Mapping[str, Any]
    shards: dict[int, Shard] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return len(self.shards) == self.num_shards

    def rows(self, number: int) -> list[dict[str, Any]]:
        """The rows of a shard that is done."""
        data = (self.directory / self.shards[number].file).read_bytes()
        text = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
        return [json.loads(line) for line in text.splitlines()]

    def add(
        self, number: int, rows: list[dict[str, Any]], dropped: dict[str, int], began: float, compress: bool
    ) -> None:
        """Write a shard, then the manifest. `began` is when it was begun, by `time.monotonic`."""
        lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n" for row in rows]
        data = "".join(lines).encode()
        if compress:
            data = gzip.compress(data, mtime=0)  # the time of writing is no part of the rows
        name = f"shard-{number:05}.jsonl" + (".gz" if compress else "")
        reasons = [row["finish_reason"] for row in rows]
        self._write(self.directory / name, data)
        self.shards[number] = Shard(
            file=name,
            sha256=hashlib.sha256(data).hexdigest(),
            bytes=len(data),
            rows=len(rows),
            prompt_tokens=sum(len(row["prompt_ids"]) for row in rows),
            tokens=sum(len(row["token_ids"]) for row in rows),
            finish_reasons={reason: reasons.count(reason) for reason in sorted(set(reasons))},
            dropped=dropped,
            seconds=round(time.monotonic() - began, 1),
        )
        self.write_manifest()

    def write_manifest(self) -> None:
        done = [asdict(self.shards[number]) for number in sorted(self.shards)]
        content = {"format": FORMAT, **self.identity, **self.notes, "num_shards": self.num_shards}
        content |= {"finished": self.finished, "totals": self.totals(), "shards": done}
        self._write(self.directory / MANIFEST, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())

    def totals(self) -> dict[str, Any]:
        """Everything countable, over all shards that are done."""
        done = self.shards.values()
        counts: dict[str, Any] = {
            name: sum(getattr(shard, name) for shard in done) for name in ("rows", "prompt_tokens", "tokens", "bytes")
        }
        counts["seconds"] = round(sum(shard.seconds for shard in done), 1)
        return counts | {name: _add(getattr(shard, name) for shard in done) for name in ("finish_reasons", "dropped")}

    def _write(self, path: Path, data: bytes) -> None:
        try:
            write_whole(path, data)
        except OSError as error:
            raise SpecjaxError(
                f"{path}: cannot be written ({error.strerror or error}); {len(self.shards)} of {self.num_shards} "
                "shards are whole; make room and give the same command again to go on"
            ) from None


def open_run(directory: Path, identity: Mapping[str, Any], num_shards: int, notes: Mapping[str, Any]) -> Run:
    """Begin a run, or continue the one in the directory. What a killed process left half written is removed.

    A shard that has gone from the directory is to be written again.

    Raises:
        InputError: a directory that cannot be written or holds something else; a run of another identity; a shard that
            was changed.
    """
    file = directory / MANIFEST
    run = Run(directory, identity, num_shards, notes)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            if foreign := next(directory.glob("shard-*"), None):
                raise InputError(f"{directory}: has {foreign.name}, but no {MANIFEST}; expected an empty directory")
            run.write_manifest()
            return run
        for leftover in directory.glob(".*.part"):
            leftover.unlink()
        stored = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(stored, dict):
            raise ValueError("expected an object")
        _compare(file, stored, {"format": FORMAT, **identity})
        for entry in stored["shards"]:
            shard = Shard(**entry)
            path = directory / shard.file
            if not path.exists():
                continue
            if hashlib.sha256(path.read_bytes()).hexdigest() != shard.sha256:
                raise InputError(f"{path}: is not as it was written; remove it to have it written again")
            run.shards[int(shard.file[6:11])] = shard
    except OSError as error:
        raise InputError(f"{directory}: cannot be read or written ({error.strerror or error})") from None
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, SpecjaxError):
            raise
        raise InputError(f"{file}: not a manifest of this library ({type(error).__name__}: {error})") from None
    return run


def write_whole(path: Path, data: bytes) -> None:
    """Write beside and rename: a file of this name is whole, or the one that was there before."""
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def _compare(file: Path, stored: Mapping[str, Any], given: Mapping[str, Any], prefix: str = "") -> None:
    """Raise InputError for the first fact that is not as it was."""
    for name, value in given.items():
        before = stored.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            _compare(file, before, value, f"{prefix}{name}.")
        elif value != before:
            raise InputError(
                f"{file}: was begun with {prefix}{name} {_short(before)}, not {_short(value)}; "
                "continue with the same, or write to another directory"
            )


def _add(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in counts:
        for name, number in each.items():
            total[name] = total.get(name, 0) + number
    return dict(sorted(total.items()))


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"
