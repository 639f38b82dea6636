"""The drafters that ship: they load by name, draft losslessly, and give the tokens per call that their cards say."""

import json
from pathlib import Path
from typing import Any

import pytest

import specjax
from specjax.errors import CheckpointError, InputError
from specjax.shipped import SHIPPED, shipped_path

PROMPTS = Path(__file__).parent.parent / "experiments" / "prompts.jsonl"
TASK, NEW_TOKENS = "code", 128


@pytest.fixture(scope="module")
def target() -> specjax.Target:
    try:
        return specjax.load()
    except InputError as error:
        pytest.skip(f"the default target is not to be had here: {error}")


@pytest.fixture(scope="module")
def prompts() -> list[Any]:
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    return [[{"role": "user", "content": row["turns"][0]}] for row in rows if row["category"] == TASK]


@pytest.fixture(scope="module")
def plain(target: specjax.Target, prompts: list[Any]) -> specjax.Generation:
    return specjax.generate(target, prompts, max_new_tokens=NEW_TOKENS)


@pytest.mark.parametrize("name", SHIPPED)
def test_figures_come_back(name: str, target: specjax.Target, prompts: list[Any], plain: specjax.Generation) -> None:
    """Greedily, in float32. Another processor may round a near-tie the other way, which moves a few rounds."""
    drafter = specjax.load_drafter(name, target)
    out = specjax.generate(target, prompts, drafter=drafter, max_new_tokens=NEW_TOKENS)
    assert out.token_ids == plain.token_ids
    folder = shipped_path(name)
    assert folder is not None
    said = json.loads((folder / "config.json").read_text())["specjax"]["training"]["figures"][TASK]
    assert said["new tokens"] == out.stats.new_tokens
    assert out.stats.tokens_per_call == pytest.approx(said["tokens per call"], rel=0.02)
    card = (folder / "README.md").read_text()
    assert f"| {TASK} | {said['tokens per call']:.4g} |" in card
    assert (folder / "log.jsonl").exists()


def test_they_are_small() -> None:
    files = [file for name in SHIPPED for file in Path(str(shipped_path(name))).iterdir()]
    assert sum(file.stat().st_size for file in files) <= 56e6


def test_names(target: specjax.Target) -> None:
    assert shipped_path("eagle3/") is None
    with pytest.raises(CheckpointError, match="no such directory"):
        specjax.load_drafter("eagle9", target)
