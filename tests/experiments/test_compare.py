"""compare.py on a tiny target: with the others absent, with PyTorch where it is, with a llama.cpp that is made up."""

import importlib.machinery
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import compare as script
import gguf
import numpy as np
import pytest
from measure import hugging_face, llama_cpp
from measure.peers import Method, Ran, fastest, rate_interval, run_methods

import specjax
from specjax import testing

GOLDEN = Path(__file__).resolve().parents[1] / "models" / "golden"
LOOKUP = "specjax, prompt-lookup:k=3"


class Words(testing.TinyTokenizer):
    """Of 96 ids, as the checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes += [b"<%d>" % i for i in range(96 - len(self._bytes))]


@pytest.fixture(scope="module")
def target() -> specjax.Target:
    """A checkpoint that transformers can read too."""
    return replace(specjax.load(GOLDEN / "llama"), tokenizer=Words())


@pytest.fixture
def compared(
    target: specjax.Target, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[dict[str, Any], str]]:
    """Run compare.py: compare.json, and what it printed."""
    load = specjax.load
    monkeypatch.setattr(specjax, "load", lambda name, *args, **more: target if name == "tiny" else load(name, *args))
    rows = [
        {"question_id": i, "category": "a", "turns": [text]}
        for i, text in enumerate(["abcabcabc", "the cat and the", "in the end and in the"])
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    def run(*arguments: object, status: int = 0) -> tuple[dict[str, Any], str]:
        given = ["--target", "tiny", "--prompts", tmp_path / "prompts.jsonl", "--limit", 3, "--max-new-tokens", 16]
        given += ["--k", 3, "--repetitions", 1, "--no-compiled", "--output", tmp_path / "out"]
        code, out, err = command(script.main, *given, *arguments)
        assert code == status, err
        found = json.loads((tmp_path / "out" / "compare.json").read_text())
        assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")
        return found, " ".join(out.split())

    return run


def test_others_that_are_absent_are_left_out(compared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face, "why_not", lambda target: "PyTorch is not installed: do so")
    monkeypatch.setattr(llama_cpp, "why_not", lambda: "llama-cpp-python is not installed: do so")
    found, out = compared()
    rows = {row["name"]: row for row in found["methods"]}
    assert list(rows) == ["specjax, plain", LOOKUP]
    assert found["left_out"] == {
        "Hugging Face": "PyTorch is not installed: do so",
        "llama.cpp": "llama-cpp-python is not installed: do so",
    }
    assert "Left out: Hugging Face: PyTorch is not installed: do so." in out
    assert rows[LOOKUP]["same_texts"] == rows[LOOKUP]["prompts"] == 3
    assert rows["specjax, plain"]["relative"] == 1.0 and rows["specjax, plain"]["relative_interval"] is None
    low, high = rows[LOOKUP]["relative_interval"]
    assert 0 < low <= rows[LOOKUP]["relative"] <= high
    outputs = found["prompts"][2]["outputs"]
    assert [o["name"] for o in outputs] == list(rows)
    assert len(outputs[0]["seconds"]) == 1
    assert {"tokens_per_second", "same_texts"} <= set(found["definitions"])


@pytest.mark.torch
def test_beside_hugging_face(compared: Any) -> None:
    """Plainly, by prompt lookup and assisted: the same greedy text from two implementations and three ways."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    found, out = compared("--assistant", GOLDEN / "mistral")
    rows = {row["name"]: row for row in found["methods"]}
    ways = ["Hugging Face, plain", "Hugging Face, prompt lookup", "Hugging Face, assisted"]
    assert list(rows)[3:] == ways
    assert list(rows)[2].startswith("specjax, draft-model:")
    for row in rows.values():
        assert (row["same_texts"] + row["near_ties"], row["faults"]) == (3, 0), row
        assert row["tokens_per_second"] > 0
    assert any("static cache" in name for name in rows[ways[0]]["tried"])
    assert not any("static cache" in name for name in rows[ways[2]]["tried"])
    assert rows[ways[0]]["settings"] in rows[ways[0]]["tried"]
    assert set(found["provenance"]["peers"]) == {"torch", "transformers"}
    assert "Left out: llama.cpp: " in out


@pytest.mark.torch
def test_assistants_that_cannot_assist(target: specjax.Target, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "holds no whole model" in str(hugging_face.why_not_assistant(target, tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 97}')
    assert "another vocabulary" in str(hugging_face.why_not_assistant(target, tmp_path))
    assert "is no Hugging Face directory" in str(hugging_face.why_not_assistant(target, tmp_path / "nowhere"))
    assert hugging_face.why_not_assistant(target, GOLDEN / "mistral") is None


class Llama:
    """Says what plain decoding says, but for the last token of a text; keeps what it was given."""

    made: ClassVar[list[dict[str, Any]]] = []
    target: ClassVar[Any] = None

    def __init__(self, **options: Any):
        self.made.append(options)
        self.fresh = False

    def reset(self) -> None:
        self.fresh = True

    def generate(self, tokens: list[int], temp: float, repeat_penalty: float) -> Iterator[int]:
        assert self.fresh and (temp, repeat_penalty) == (0.0, 1.0)
        self.fresh = False
        *text, last = specjax.generate(self.target, [tokens], max_new_tokens=16).token_ids[0]
        yield from text
        yield (last + 1) % 96
        yield from [5] * 64


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, target: specjax.Target) -> list[dict[str, Any]]:
    """A module llama_cpp."""
    package, part = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    package.Llama, package.__path__ = Llama, []  # type: ignore[attr-defined]
    package.__spec__ = importlib.machinery.ModuleSpec("llama_cpp", None)
    part.LlamaPromptLookupDecoding = lambda num_pred_tokens: f"lookup {num_pred_tokens}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", part)
    monkeypatch.setattr(llama_cpp, "version", lambda: "9.9")
    monkeypatch.setattr(hugging_face, "why_not", lambda target: "not here")
    monkeypatch.setattr(Llama, "made", [])
    monkeypatch.setattr(Llama, "target", target)
    return Llama.made


def test_beside_llama_cpp(compared: Any, made_up: list[dict[str, Any]], tmp_path: Path) -> None:
    """Its own weights, and it says so: other texts are no faults."""
    file = write_gguf(tmp_path / "model.gguf")
    found, out = compared("--gguf", file)
    rows = {row["name"]: row for row in found["methods"]}
    assert list(rows)[2:] == ["llama.cpp, plain", "llama.cpp, prompt lookup"]
    for row in list(rows.values())[2:]:
        assert (row["same_weights"], row["same_texts"], row["faults"]) == (False, 0, 0)
        assert "Q8_0 and F32 weights as the file has them, 0 MB; float16 cache" in row["settings"]
    assert {m["draft_model"] for m in made_up} == {None, "lookup 3"}
    assert all(m["model_path"] == str(file) and m["n_ctx"] >= 16 + 64 for m in made_up)
    assert found["provenance"]["peers"] == {"llama-cpp-python": "9.9"}
    assert "other weights; same on 0 of 3" in out


def test_llama_cpp_without_a_file(compared: Any, made_up: list[dict[str, Any]]) -> None:
    found, _ = compared()
    assert "name one of the same model with --gguf" in found["left_out"]["llama.cpp"]
    assert not made_up


def write_gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("a", np.zeros((256, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("b", np.zeros((32, 32), np.float32))
    writer.add_tensor("c", np.zeros((1, 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def scripted(texts: dict[int, list[int]], seconds: float, calls: list[str], name: str = "x") -> Method:
    def decode(prompt: Sequence[int], max_new_tokens: int) -> tuple[list[int], float]:
        calls.append(f"{name}{prompt[0]}")
        return texts[prompt[0]], seconds

    return Method(name, decode)


def test_a_wrong_text_is_a_fault(compared: Any, target: specjax.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(prompt: Sequence[int], max_new_tokens: int) -> tuple[list[int], float]:
        text = specjax.generate(target, [list(prompt)], max_new_tokens=16).token_ids[0]
        return [*text[:4], (text[4] + 1) % 96], 1.0

    def add(peers: Any, *_: Any) -> None:
        peers.methods.append(Method("Hugging Face, plain", decode))

    monkeypatch.setattr(script, "add_hugging_face", add)
    monkeypatch.setattr(script, "add_llama_cpp", lambda *_: None)
    found, out = compared(status=1)
    assert found["methods"][-1]["faults"] == 3
    assert "Hugging Face, plain, prompt 1: FAULT at new token 5" in out


def test_in_turns_after_a_run_that_is_not_timed() -> None:
    calls: list[str] = []
    a, b = ({1: [5, 6], 2: [7]}, 0.5), ({1: [5, 6], 2: [8]}, 0.25)
    methods = [scripted(*a, calls, "a"), scripted(*b, calls, "b")]
    first, second = run_methods(methods, [[1], [2]], 4, repetitions=2)
    assert calls == ["b1", "a1", "a2", "b2", "a1", "b1", "b2", "a2", "b1", "a1", "a2", "b2"]
    assert first.seconds == [[0.5, 0.5], [0.5, 0.5]]
    assert (first.rate, second.rate, second.rates) == (3.0, 6.0, [8.0, 4.0])
    assert second.same_texts(first) == 1
    assert rate_interval(second, first) == [2.0, 2.0]
    assert rate_interval(*(Ran(m, [[1]], [[1.0]]) for m in methods)) is None
    calls.clear()
    run_methods(methods, [[1]], 4, warm=False)
    assert calls == ["a1", "b1"]


def test_the_fastest_settings() -> None:
    def broken(prompt: Sequence[int], max_new_tokens: int) -> tuple[list[int], float]:
        raise RuntimeError("no compiler\nand a long story")

    calls: list[str] = []
    slow, quick = (scripted({1: [5, 6]}, seconds, calls).decode for seconds in (2.0, 1.0))
    name, rates = fastest({"slow": slow, "quick": quick, "broken": broken}, [1])
    assert (name, rates) == (
        "quick",
        {"slow": 1.0, "quick": 2.0, "broken": "does not work here: RuntimeError: no compiler"},
    )
    with pytest.raises(specjax.SpecjaxError, match="broken does not work here"):
        fastest({"broken": broken}, [1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "0"], "--k: expected at least 1, got 0"),
        (["--gguf", "nowhere.gguf"], "--gguf nowhere.gguf: no such file"),
        (["--assistant", "nowhere"], "--assistant nowhere: no such directory"),
        (["--drafters", "unknown"], "unknown drafter"),
        (["--output", "/proc/nothing"], "cannot write"),
    ],
)
def test_bad_input_is_one_line(command: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str):
    monkeypatch.setattr(specjax, "load", lambda *args, **kwargs: pytest.fail("loaded a target"))
    code, _, err = command(script.main, *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
