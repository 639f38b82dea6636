"""Puts a trained drafter into the package: rounded to bfloat16, measured as it is then, its figures and log beside it.

    python train/ship.py runs/eagle3 eagle3

For maintainers. `specjax.load_drafter("eagle3", specjax.load())` then loads it, once its name is in `specjax.shipped`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

import specjax
from specjax.cli import run_command_line
from specjax.errors import InputError
from specjax.shipped import SHIPPED, shipped_path
from specjax.training.journal import FILE as METRICS

PROMPTS = Path(__file__).resolve().parent.parent / "experiments" / "prompts.jsonl"
NEW_TOKENS = 128


@dataclass(frozen=True)
class Settings:
    """Ship a trained drafter."""

    run: tyro.conf.Positional[Path]
    """Directory of a finished run."""
    name: tyro.conf.Positional[str]
    """The name that it ships under."""
    prompts: tuple[Path, ...] = (PROMPTS,)
    """JSON lines of question_id, category and turns; first turns are decoded greedily, in float32."""
    log_every: int = 10
    """Steps between the lines of the log that are kept; measurements of tokens per call all are."""


def main(settings: Annotated[Settings, tyro.conf.arg(name="")]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    folder = shipped_path(settings.name)
    if folder is None:
        raise InputError(f"{settings.name!r}: expected one of the names in specjax/shipped: {SHIPPED}")
    trained = settings.run / "drafter"
    target = specjax.load()
    drafter = specjax.load_drafter(trained, target)
    training: dict[str, Any] = json.loads((trained / "config.json").read_text())["specjax"]["training"]
    specjax.save_drafter(folder, drafter, target, dtype="bfloat16", training=training)
    figures = measure(target, specjax.load_drafter(folder, target), settings.prompts)
    specjax.save_drafter(folder, drafter, target, dtype="bfloat16", training=training | {"figures": figures})
    log = thin((settings.run / METRICS).read_text().splitlines(), settings.log_every)
    (folder / "log.jsonl").write_text("".join(f"{line}\n" for line in log))
    for task, row in figures.items():
        console.print(f"{task}: {row['tokens per call']:.3f} tokens per call")
    console.print(f"{folder}: {sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.1f} MB")


def measure(target: specjax.Target, drafter: Any, files: tuple[Path, ...]) -> dict[str, dict[str, Any]]:
    """Tokens per call for each category of each file, and for the whole file, by its name."""
    figures: dict[str, dict[str, Any]] = {}
    for file in files:
        rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
        found: list[specjax.Stats] = []
        for task in dict.fromkeys(row["category"] for row in rows):
            prompts = [[{"role": "user", "content": row["turns"][0]}] for row in rows if row["category"] == task]
            out = specjax.generate(target, prompts, drafter=drafter, max_new_tokens=NEW_TOKENS)
            figures[task] = _figures(out.row_stats)
            found += out.row_stats
        figures[file.stem] = _figures(found)
    return figures


def _figures(rows: list[specjax.Stats]) -> dict[str, Any]:
    stats = specjax.Stats.total(rows)
    return {
        "tokens per call": stats.tokens_per_call,
        "acceptance rate": stats.acceptance_rate,
        "new tokens": stats.new_tokens,
        "prompts": len(rows),
    }


def thin(lines: list[str], every: int) -> list[str]:
    """The lines of the log that are kept."""
    rows = [json.loads(line) for line in lines]
    return [
        line
        for line, row in zip(lines, rows, strict=True)
        if row["step"] % every == 0 or any(key.startswith("evaluation.") for key in row)
    ]


if __name__ == "__main__":
    run_command_line(lambda: main(tyro.cli(Settings, description=__doc__)))
