"""The viewer of training data: what it prints of a batch, and what it says about bad input."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import specjax
from specjax.cli import run_command_line
from specjax.models.tokenizer import Tokenizer

SCRIPT = Path(__file__).parents[2] / "train" / "show_batch.py"
TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("show_batch", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["show_batch"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def target(monkeypatch: pytest.MonkeyPatch) -> specjax.Target:
    """A target that is a tokenizer of single bytes."""
    fast = Fast(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast.add_special_tokens(["<|start|>", "<|end|>"])
    backend = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|end|>")
    backend.chat_template = TEMPLATE
    made = specjax.Target(SimpleNamespace(vocab_size=258), Tokenizer(backend, "bytes"), "bytes", eos_token_ids=(257,))
    monkeypatch.setattr(specjax, "load", lambda name: made)
    return made


@pytest.fixture
def data(tmp_path: Path) -> Path:
    chats = [[("user", "hé?"), ("assistant", "oui, €5"), ("user", "ok"), ("assistant", "bye")], [("user", "a")] * 2]
    chats[1][1] = ("assistant", "b")
    rows = [{"messages": [{"role": role, "content": content} for role, content in chat]} for chat in chats]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_supervised_text_stands_in_brackets(script: ModuleType, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(script.Settings((data,), length=128, batch_size=2))
    out = capsys.readouterr().out
    assert re.findall("⟦(.*?)⟧", out, re.DOTALL) == ["oui, €5<|end|>", "bye<|end|>", "b<|end|>"]
    assert f"[{data}, line 1: " in out
    assert "row 1 (padding, to fill the batch): 0 of 128 tokens, 0 supervised" in out
    assert "<|start|>user\nhé?<|end|>\n<|start|>assistant\n⟦oui" in out
    assert "batch 0, 1 an epoch; 2 conversations; 1 rows" in out.splitlines()[-1]


def test_supervised_text_is_coloured(script: ModuleType, target: specjax.Target) -> None:
    ids = [script.Speller(target.tokenizer).names.index(c) for c in "aĊbĊ"] + [257]
    mask = script.np.array([False, False, True, True, True])
    text = script.coloured(ids, mask, script.Speller(target.tokenizer), True)
    assert text.plain == "a\nb↵\n<|end|>"
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [
        ("a\n", "dim"),
        ("b↵\n", "green"),
        ("<|end|>", "bold green"),
    ]


def test_other_batches_and_layouts(script: ModuleType, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(script.Settings((data,), length=128, batch_size=1, buckets=(40,), batch=3, turns="last"))
    out = capsys.readouterr().out
    assert "batch 3, 2 an epoch; 2 conversations; 2 rows" in out
    assert "⟦oui" not in out


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"data": (Path("no-such-file.jsonl"),)}, "no-such-file.jsonl: cannot be read"),
        ({"length": 1}, "row length 1"),
        ({"batch_size": 0}, "batch size 0"),
        ({"batch": -1}, "--batch -1"),
        ({"template_options": "{"}, "--template-options '{'"),
        ({"length": 10}, "none of the 2 conversations has a supervised token"),
    ],
)
def test_errors_in_one_line(
    change: dict[str, Any], part: str, script: ModuleType, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = script.Settings(**{"data": (data,), **change})
    with pytest.raises(SystemExit) as caught:
        run_command_line(lambda: script.main(settings))
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert part in err
