"""The scripts' modules, importable as the scripts import them, and a target that takes text."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import specjax
from specjax import testing

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> specjax.Target:
    """`specjax.load` returns a table model with a context of 512 tokens, whatever it is asked for."""
    model = testing.TableModel(testing.TableModel.random(64, seed=3).table, max_positions=512)
    target = testing.tiny_target(model, tokenizer=testing.TinyTokenizer())
    monkeypatch.setattr(specjax, "load", lambda *args, **kwargs: target)
    return target


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a script's `main` with arguments: exit status, stdout, stderr."""
    from specjax.cli import run_command_line

    def run(main: Callable[[], Any], *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["script.py", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            run_command_line(main)
        out, err = capsys.readouterr()
        return int(exit_.value.code or 0), out, err

    return run
