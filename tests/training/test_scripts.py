"""The training scripts from the command line to a drafter that decodes, on a small random target."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specjax
from specjax import testing
from specjax.training import journal, session

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "train"))

import draft_model
import eagle
import medusa
import mtp

SETTINGS = ["--length", "32", "--batch-size", "2", "--held-out", "3", "--held-out-tokens", "12", "--epochs", "0.5"]
SETTINGS += ["--compute-dtype", "float32"]  # the tokens per call of both kinds are compared


@pytest.fixture(scope="module")
def target() -> specjax.Target:
    """Eight layers, the fewest that have EAGLE-3's default ones."""
    return testing.tiny_target(testing.tiny_model(vocab_size=24, num_layers=8, windows=(None,) * 8, seed=1), eos=[3])


@pytest.fixture(scope="module")
def data(target: specjax.Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the target says after random prompts."""
    random = np.random.default_rng(0)
    prompts = [random.integers(4, 24, size).tolist() for size in random.integers(2, 6, 16)]
    out = specjax.generate(target, prompts, max_new_tokens=12)
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    rows = [{"prompt_ids": p, "token_ids": t} for p, t in zip(prompts, out.token_ids, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(
    target: specjax.Target, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Any, Path]]:
    monkeypatch.setattr(session, "load", lambda *args, **kwargs: target)

    def train(script: Any, *arguments: str) -> tuple[Any, Path]:
        output = tmp_path / "run"
        monkeypatch.setattr(sys, "argv", ["x", "--data", str(data), "--output", str(output), *SETTINGS, *arguments])
        script.main(session.parse(script.Settings, None, script.FULL))
        return specjax.load_drafter(output / "drafter", target), output

    return train


def check(drafter: Any, output: Path, target: specjax.Target) -> None:
    prompts = [[5, 6, 7], [9, 8]]
    plain = specjax.generate(target, prompts, max_new_tokens=12)
    assert specjax.generate(target, prompts, drafter=drafter, max_new_tokens=12).token_ids == plain.token_ids
    config = json.loads((output / "drafter" / "config.json").read_text())
    training = config.get("specjax", {})["training"]
    assert training["figures"]["tokens per call"] >= 1
    assert training["steps"] == journal.read(output)[-1]["step"]


def test_eagle3(run: Any, target: specjax.Target, capsys: pytest.CaptureFixture[str]) -> None:
    """Trained, measured, saved, and nothing but that the second time."""
    drafter, output = run(eagle, "--draft-vocab-size", "16", "--num-draft-tokens", "2")
    check(drafter, output, target)
    assert (drafter.name, drafter.num_nodes, drafter.network.config.draft_vocab_size) == ("eagle3", 2, 16)
    out = capsys.readouterr().out
    assert "tokens per call before training" in out
    assert "tokens per call after training" in out
    last = [line for line in journal.read(output) if "evaluation.tokens_per_call" in line][-1]
    assert last["evaluation.teacher_forced"] == last["evaluation.tokens_per_call"]
    weights = (output / "drafter" / "model.safetensors").read_bytes()
    run(eagle, "--draft-vocab-size", "16", "--num-draft-tokens", "2")
    assert (output / "drafter" / "model.safetensors").read_bytes() == weights
    with pytest.raises(specjax.CheckpointError, match=r"optimization\.learning_rate"):
        run(eagle, "--draft-vocab-size", "16", "--num-draft-tokens", "2", "--learning-rate", "0.5")


@pytest.mark.slow
def test_eagle1(run: Any, target: specjax.Target) -> None:
    drafter, output = run(eagle, "--version", "1", "--draft-vocab-size", "16", "--features", "online")
    check(drafter, output, target)
    assert (drafter.name, drafter.num_nodes) == ("eagle1", 5)


@pytest.mark.slow
def test_mtp(run: Any, target: specjax.Target) -> None:
    """A chain longer than there are modules, learned and drafted alike; the order is part of what is stored."""
    options = ("--modules", "2", "--num-draft-tokens", "3", "--first", "embedding", "--draft-vocab-size", "16")
    drafter, output = run(mtp, *options)
    check(drafter, output, target)
    config = drafter.network.config
    assert (drafter.num_nodes, config.num_modules, config.hidden_first, config.draft_vocab_size) == (3, 2, False, 16)
    last = [line for line in journal.read(output) if "evaluation.tokens_per_call" in line][-1]
    assert last["evaluation.teacher_forced"] == last["evaluation.tokens_per_call"]


@pytest.mark.slow
def test_medusa(run: Any, target: specjax.Target) -> None:
    drafter, output = run(medusa, "--draft-vocab-size", "16", "--heads", "2", "--tree-nodes", "6")
    check(drafter, output, target)
    assert (drafter.num_nodes, drafter.max_depth) == (6, 2)


@pytest.mark.slow
def test_medusa_2(run: Any, target: specjax.Target, tmp_path: Path) -> None:
    """The drafter is the changed target's, is refused for the one before, and is lossless for its own."""
    with pytest.raises(specjax.InputError, match="this drafter was made for"):
        run(medusa, "--joint", "--draft-vocab-size", "16", "--heads", "2", "--tree-nodes", "4")
    changed = specjax.load(tmp_path / "run" / "target")
    drafter = specjax.load_drafter(tmp_path / "run" / "drafter", changed)
    check(drafter, tmp_path / "run", changed)
    assert np.abs(changed.model.embed[...] - target.model.embed[...]).max() > 0


@pytest.mark.slow
def test_draft_model(run: Any, target: specjax.Target) -> None:
    drafter, output = run(draft_model, "--layers", "0", "7", "--draft-vocab-size", "16", "--num-draft-tokens", "3")
    check(drafter, output, target)
    assert drafter.num_nodes == 3


def test_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The full recipe's settings, where the command line does not say otherwise."""
    monkeypatch.setattr(sys, "argv", ["x", "--preset", "full", "--epochs", "1.5"])
    settings = session.parse(eagle.Settings, None, eagle.FULL)
    assert (settings.preset, settings.epochs, settings.questions) == ("full", 1.5, eagle.FULL["questions"])
    monkeypatch.setattr(sys, "argv", ["x"])
    assert session.parse(eagle.Settings, None, eagle.FULL).preset == "quick"
