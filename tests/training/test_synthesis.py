"""Answers by the target: the rows, questions from nothing, and runs that were killed, changed or had no room."""

import importlib.util
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import specjax
from specjax import Sampling, testing
from specjax.cli import run_command_line
from specjax.errors import InputError, SpecjaxError
from specjax.models.tokenizer import Tokenizer
from specjax.training import answers, shards, synthesis
from specjax.training.answers import Answer, decode_all
from specjax.training.conversations import read_conversations
from specjax.training.prompts import PromptFiles, parse_prompt
from specjax.training.questions import find_fault, is_looping, user_turn
from specjax.training.rendering import Renderer
from specjax.training.synthesis import FromNothing, Recipe, largest_size, num_texts, row_seed, synthesize

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "models" / "golden" / "llama"
SPECIAL = ["<s>", "<|user|>", "<|system|>", "<|end|>"]
BOS, USER, _, END = range(4)
LETTERS = "abcdefgh?ĠĊ:[]"  # as the byte-level alphabet spells them: Ġ is a space, Ċ a line break
CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role != 'assistant' %}{{ '<|' + m.role + '|>' }}{% endif %}"
    "{{ m.content + '<|end|>' }}{% endfor %}"
)
RECIPE = Recipe(max_new_tokens=12, question_tokens=12, batch_size=4, shard_size=6, temperature=0.8)


def make_tokenizer(template: str = CHAT, letters: str = LETTERS) -> Tokenizer:
    """One token a letter; raw text gets a BOS."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *letters])}
    fast = Fast(models.BPE(vocab=vocabulary, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(SPECIAL)
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    backend = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="<|end|>")
    backend.chat_template = template
    return Tokenizer(backend, "the test's tokenizer")


@pytest.fixture(scope="module")
def target() -> specjax.Target:
    """A table model that ends most texts within twelve tokens, and hardly ever says another special token.

    An answer depends on the last letter of the question.
    """
    size = len(SPECIAL) + len(LETTERS)
    table = 1.5 * np.random.default_rng(1).standard_normal((size, size, size)).astype(np.float32)
    table[:, :, :END] = -20
    table[:, :, END] += 1.5
    return testing.tiny_target(testing.TableModel(jnp.asarray(table)), eos=(END,), tokenizer=make_tokenizer())


def files(*rows: Any, turns: str = "last") -> PromptFiles:
    requests = tuple(parse_prompt(row, f"some/data.jsonl, line {n + 1}", n, turns) for n, row in enumerate(rows))
    return PromptFiles(requests, len(rows), 0, (("data.jsonl", "0"),))


PROMPTS = files(*(("abc" * 5)[:n] + "?abcdefgh"[n % 9] for n in range(14)), {"turns": ["ab", "cd", "ef"]})


def contents(directory: Path) -> dict[str, bytes]:
    """The shards."""
    return {file.name: file.read_bytes() for file in directory.glob("shard-*")}


def plainly(target: specjax.Target, prompts: Any, seeds: Any, drafter: Any = None, **options: Any) -> list[Answer]:
    """What `generate` gives, four prompts at a time: the programs are those of batches that do not shrink."""
    found = []
    for start in range(0, len(prompts), 4):
        rows = [min(n, len(prompts) - 1) for n in range(start, start + 4)]
        batch = specjax.generate(target, [prompts[n] for n in rows], drafter, seed=[seeds[n] for n in rows], **options)
        found += map(Answer, batch.token_ids, batch.texts, batch.finish_reasons)
    return found[: len(prompts)]


def rows_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for _, data in sorted(contents(directory).items()) for line in data.splitlines()]


def manifest(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "manifest.json").read_text())


# Batches


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [(None, Sampling()), (specjax.PromptLookup(3), Sampling(temperature=0.8))],
    ids=["plain", "lookup"],
)
def test_batches_that_shrink_give_what_generate_gives(
    drafter: Any, sampling: Sampling, table: specjax.Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that end at different times; the last batch is not full. The model refuses a cache that is not in order."""
    monkeypatch.setattr(answers, "SMALLEST", 2)
    target = replace(table, eos_token_ids=(5, 6, 7))
    random = np.random.default_rng(0)
    prompts = [random.integers(8, 64, size).tolist() for size in (3, 9, 2, 15, 5, 8, 4)]
    seeds = list(range(7))
    sizes: list[int] = []
    run = specjax.Job.run
    monkeypatch.setattr(
        specjax.Job, "run", lambda job, state, leave=0: sizes.append(state.length.shape[0]) or run(job, state, leave)
    )
    ended: list[int] = []
    found = decode_all(
        target,
        prompts,
        seeds,
        4,
        drafter=drafter,
        max_new_tokens=40,
        sampling=sampling,
        done=lambda answers: ended.append(len(answers)),
    )
    assert ended == [4, 3]
    assert set(sizes) == {4, 2}
    assert found == plainly(target, prompts, seeds, drafter, max_new_tokens=40, sampling=sampling)
    assert {answer.finish_reason for answer in found} == {"stop", "length"}


def test_sizes_of_batches() -> None:
    assert [answers.sizes(size) for size in (1, 4, 16, 32, 50)] == [[1], [4], [16, 8], [32, 16, 8], [50, 25, 12]]


def test_logits_that_are_not_finite(target: specjax.Target) -> None:
    broken = replace(target, model=testing.TableModel(target.model.table * jnp.nan))
    with pytest.raises(SpecjaxError, match=r"not finite .* begins with the ids \[1, 2\]"):
        decode_all(broken, [[1, 2]], [0], 4, max_new_tokens=12, sampling=RECIPE.sampling)


# Rows


def test_rows(target: specjax.Target, tmp_path: Path) -> None:
    """Each row is what `generate` writes after its prompt with its seed, and is learned from as it is."""
    run = synthesize(target, PROMPTS, RECIPE, tmp_path)
    rows = rows_of(tmp_path)
    assert [(row["index"], row["turn"]) for row in rows] == [(n, 0) for n in range(14)] + [(14, n) for n in range(3)]
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    assert rows[2]["source"] == "data.jsonl, line 3"
    assert rows[2]["seed"] == row_seed(0, 2, synthesis.ANSWER)
    prompts, seeds = [row["prompt_ids"] for row in rows], [row["seed"] for row in rows]
    assert [Answer(row["token_ids"], row["messages"][-1]["content"], row["finish_reason"]) for row in rows] == plainly(
        target, prompts, seeds, max_new_tokens=12, sampling=RECIPE.sampling
    )

    assert target.tokenizer is not None
    render = Renderer.of(target)
    for row, conversation in zip(rows, read_conversations(tmp_path), strict=True):
        assert row["prompt_ids"] == target.tokenizer.encode_chat(row["messages"][:-1])
        assert row["prompt_ids"].count(BOS) == 1
        rendered = render(conversation)
        assert rendered.ids.tolist() == row["prompt_ids"] + row["token_ids"]
        assert rendered.ids[rendered.mask].tolist() == row["token_ids"]
        assert conversation.finished == (row["finish_reason"] == "stop")
    totals = run.totals()
    assert (totals["rows"], totals["tokens"]) == (17, sum(len(row["token_ids"]) for row in rows))
    assert manifest(tmp_path)["totals"] == totals


def test_own_answers_are_the_history(target: specjax.Target, tmp_path: Path) -> None:
    synthesize(target, PROMPTS, RECIPE, tmp_path)
    first, second, third = rows_of(tmp_path)[-3:]
    said = [message["content"] for message in third["messages"]]
    assert said[::2] == ["ab", "cd", "ef"]
    assert third["messages"][:4] == second["messages"]
    assert second["messages"][:2] == first["messages"]
    assert len({row["seed"] for row in (first, second, third)}) == 3


def test_given_answers(target: specjax.Target, tmp_path: Path) -> None:
    """Kept before the last turn, or written anew."""
    chat = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "hhh"},
        {"role": "user", "content": "c"},
    ]
    for turns in ("last", "all"):
        synthesize(target, files({"messages": chat}, turns=turns), RECIPE, tmp_path / turns)
    (last,), (first, second) = rows_of(tmp_path / "last"), rows_of(tmp_path / "all")
    assert last["messages"][:3] == chat
    assert first["messages"][0] == chat[0]
    assert first["messages"][1] == second["messages"][1] != chat[1]


def test_prompts_of_ids(target: specjax.Target, tmp_path: Path) -> None:
    """Taken as they are; a target without a tokenizer can do no other."""
    blind = replace(target, tokenizer=None)
    synthesize(blind, files({"prompt_ids": [4, 5]}, {"prompt_ids": [5]}), RECIPE, tmp_path)
    rows = rows_of(tmp_path)
    assert [row["prompt_ids"] for row in rows] == [[4, 5], [5]]
    assert "messages" not in rows[0]
    assert len(read_conversations(tmp_path)) == 2
    with pytest.raises(InputError, match=r"line 1: token id 99 is outside the target's vocabulary of 18"):
        synthesize(blind, files({"prompt_ids": [99]}), RECIPE, tmp_path / "no")
    with pytest.raises(InputError, match=r"line 1: this target has no tokenizer"):
        synthesize(blind, files("a"), RECIPE, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_batches_and_shards_do_not_show(target: specjax.Target, tmp_path: Path) -> None:
    for n, (batch, shard) in enumerate([(4, 6), (3, 100), (4, 2)]):
        recipe = replace(RECIPE, batch_size=batch, shard_size=shard)
        synthesize(target, PROMPTS, recipe, tmp_path / str(n))
    assert rows_of(tmp_path / "0") == rows_of(tmp_path / "1") == rows_of(tmp_path / "2")
    assert [len(contents(tmp_path / str(n))) for n in range(3)] == [3, 1, 8]
    other = replace(RECIPE, seed=1)
    synthesize(target, PROMPTS, other, tmp_path / "other")
    assert rows_of(tmp_path / "other") != rows_of(tmp_path / "0")


def test_prompts_that_are_too_long(target: specjax.Target, tmp_path: Path) -> None:
    """Left out and counted, with the turns that would have followed."""
    prompts = files("a" * 30, "b", {"turns": ["c", "d" * 30, "e"]})
    told: list[int] = []
    run = synthesize(
        target,
        prompts,
        replace(RECIPE, max_prompt_tokens=25),
        tmp_path,
        progress=lambda texts, tokens: told.append(texts),
    )
    assert [row["index"] for row in rows_of(tmp_path)] == [1, 2]
    assert run.totals()["dropped"] == {"too long": 3}
    assert sum(told) == num_texts(prompts) == 5


def test_compressed(target: specjax.Target, tmp_path: Path) -> None:
    synthesize(target, PROMPTS, RECIPE, tmp_path / "plain")
    for name in ("a", "b"):
        synthesize(target, PROMPTS, replace(RECIPE, compress=True), tmp_path / name)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert [c.token_ids for c in read_conversations(tmp_path / "a")] == [
        c.token_ids for c in read_conversations(tmp_path / "plain")
    ]


# Questions from nothing


def test_questions_from_nothing(target: specjax.Target, tmp_path: Path) -> None:
    run = synthesize(target, FromNothing(40), RECIPE, tmp_path)
    rows = rows_of(tmp_path)
    assert target.tokenizer is not None
    totals = run.totals()
    assert len(rows) + sum(totals["dropped"].values()) == 40
    assert set(totals["dropped"]) >= {"unfinished", "repeated"}
    questions = [row["messages"][0]["content"] for row in rows]
    assert len({" ".join(q.split()) for q in questions}) == len(questions) > 8
    assert [row["index"] for row in rows] == sorted(row["index"] for row in rows)
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert row["prompt_ids"] == target.tokenizer.encode_chat(row["messages"][:1])
    # the target wrote the question, after nothing but the opening of a user's turn
    turn = user_turn(target, {})
    assert (turn.opening, turn.stop, turn.target) == ([BOS, USER], (), target)
    seeds = [row_seed(0, row["index"], synthesis.QUESTION) for row in rows]
    openings = [turn.opening] * len(rows)
    again = plainly(target, openings, seeds, max_new_tokens=12, sampling=RECIPE.question_sampling)
    assert [answer.text.strip() for answer in again] == questions


def test_a_question_is_not_repeated_after_a_restart(target: specjax.Target, tmp_path: Path) -> None:
    """Shards that are there still say what was asked."""
    synthesize(target, FromNothing(40), RECIPE, tmp_path)
    before = contents(tmp_path)
    for name in ("shard-00002.jsonl", "shard-00005.jsonl"):
        (tmp_path / name).unlink()
    synthesize(target, FromNothing(40), RECIPE, tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("template", "eos", "opening", "ends", "stop"),
    [
        (CHAT, (END,), "<s><|user|>", (END,), ()),
        (CHAT, (7,), "<s><|user|>", (7, END), ()),
        ("{% for m in messages %}{{ '[' + m.content + ']' }}{% endfor %}", (END,), "[", (END,), ("]",)),
        ("{% for m in messages %}{{ 'a:' + m.content }}{% endfor %}{{ '\nb: ' }}", (END,), "a:", (END,), ("\nb:",)),
        (
            "{{ 'h? ' }}{% for m in messages %}{{ 'b:' + m.content + '<|end|>' }}{% endfor %}",
            (END,),
            "h? b:",
            (END,),
            (),
        ),
    ],
    ids=["eos", "another special token", "text", "a line", "letters before"],
)
def test_how_a_template_opens_and_closes_a_user_turn(
    target: specjax.Target, template: str, eos: tuple[int, ...], opening: str, ends: Any, stop: tuple[str, ...]
) -> None:
    tokenizer = make_tokenizer(template)
    turn = user_turn(replace(target, tokenizer=tokenizer, eos_token_ids=eos), {})
    assert tokenizer.decode(turn.opening, skip_special_tokens=False) == opening
    assert turn.target.eos_token_ids == ends
    assert turn.stop == stop


def test_questions_that_end_at_a_text(target: specjax.Target, tmp_path: Path) -> None:
    spoken = replace(target, tokenizer=make_tokenizer("{% for m in messages %}{{ '[' + m.content + ']' }}{% endfor %}"))
    run = synthesize(spoken, FromNothing(40), RECIPE, tmp_path)
    rows = rows_of(tmp_path)
    assert rows
    assert not any("]" in row["messages"][0]["content"] for row in rows)
    assert any(row["prompt_ids"][-1] == len(SPECIAL) + LETTERS.index("]") for row in rows)
    assert run.totals()["rows"] == len(rows)


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{% for m in messages %}{{ m.content + m.content + '<|end|>' }}{% endfor %}", "just once"),
        ("{% for m in messages %}{{ '[' + m.content }}{% endfor %}", "nothing after"),
        ("{% for m in messages %}{{ m.content + ']' }}{% endfor %}", "nothing before"),
    ],
)
def test_templates_that_do_not_show_the_user_turn(target: specjax.Target, template: str, part: str) -> None:
    with pytest.raises(InputError, match=part):
        user_turn(replace(target, tokenizer=make_tokenizer(template)), {})
    with pytest.raises(InputError, match="need a tokenizer"):
        user_turn(replace(target, tokenizer=None), {})


def test_questions_of_no_use(target: specjax.Target) -> None:
    tokenizer = make_tokenizer(letters=LETTERS + "Ã")
    assert tokenizer is not None

    def fault(text: str, reason: str = "stop") -> str | None:
        ids = tokenizer.encode_chat([{"role": "user", "content": text}])[2:]
        return find_fault(tokenizer, Answer(ids, tokenizer.decode(ids), reason), {"a b"})

    assert fault("bad?") is None
    assert fault("bad?", "length") == fault("bad?", "context") == "unfinished"
    assert fault(" \n") == "empty"
    assert fault("a<|user|>b") == "broken"
    damaged = [*tokenizer.encode("a")[1:], len(SPECIAL) + len(LETTERS), END]  # the first half of a character
    assert find_fault(tokenizer, Answer(damaged, tokenizer.decode(damaged), "stop"), set()) == "broken"
    assert fault("abc" * 12) == "looping"
    assert fault("a\n b ") == "repeated"
    assert not is_looping([1, 2] * 8)  # a short text may repeat
    assert not is_looping(list(range(20)) + list(range(16)))


# Runs


class Dead(BaseException):
    """What a test dies of; nothing but the test catches it."""


@pytest.mark.parametrize("prompts", [PROMPTS, FromNothing(18)], ids=["files", "nothing"])
@pytest.mark.parametrize(("name", "there"), [("shard-00001.jsonl", 1), ("manifest.json", 2)])
def test_a_broken_run_goes_on(
    prompts: Any, name: str, there: int, target: specjax.Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a shard, and between a shard and its entry in the manifest."""
    synthesize(target, prompts, RECIPE, tmp_path / "whole")
    broken = tmp_path / "broken"
    write = shards.write_whole

    def write_half(path: Path, data: bytes) -> None:
        if path.name == name and (broken / "shard-00000.jsonl").exists() and len(contents(broken)) == there:
            path.with_name(f".{path.name}.part").write_bytes(data[: len(data) // 2])
            raise Dead
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_whole", write_half)
        with pytest.raises(Dead):
            synthesize(target, prompts, RECIPE, broken)
    assert not manifest(broken)["finished"]
    assert (len(contents(broken)), len(manifest(broken)["shards"])) == (there, 1)
    told: list[tuple[int, int | None]] = []
    run = synthesize(target, prompts, RECIPE, broken, progress=lambda *said: told.append(said))
    assert contents(broken) == contents(tmp_path / "whole")
    assert run.finished and manifest(broken)["finished"]
    assert sum(texts for texts, _ in told) == num_texts(prompts)
    assert sum(tokens is None for _, tokens in told) == 1
    assert {file.name for file in broken.iterdir()} == {*contents(broken), "manifest.json"}


def test_a_finished_run_is_left_as_it_is(
    target: specjax.Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synthesize(target, PROMPTS, RECIPE, tmp_path)
    before = (contents(tmp_path), (tmp_path / "manifest.json").read_bytes())

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(synthesis, "decode_all", refuse)
    monkeypatch.setattr(shards, "write_whole", refuse)
    assert synthesize(target, PROMPTS, RECIPE, tmp_path).finished
    assert (contents(tmp_path), (tmp_path / "manifest.json").read_bytes()) == before


@pytest.fixture(scope="module")
def finished(target: specjax.Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    synthesize(target, PROMPTS, RECIPE, folder)
    return folder


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"temperature": 0.5}, "settings.temperature 0.8, not 0.5"),
        ({"seed": 3}, "settings.seed 0, not 3"),
        ({"batch_size": 8}, "settings.batch_size 4, not 8"),
        ({"compress": True}, "settings.compress false, not true"),
        ({"template_options": {"thinking": False}}, "settings.template_options.thinking null, not false"),
    ],
)
def test_a_run_of_another_recipe(target: specjax.Target, finished: Path, change: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError, match=r"manifest\.json: was begun with") as caught:
        synthesize(target, PROMPTS, replace(RECIPE, **change), finished)
    assert part in str(caught.value)


def test_a_run_of_other_prompts_or_another_target(target: specjax.Target, finished: Path) -> None:
    fewer = replace(PROMPTS, requests=PROMPTS.requests[:5])
    other = replace(PROMPTS, files=(("data.jsonl", "1"),))
    for prompts, part in [
        (fewer, "prompts.number 15, not 5"),
        (other, "prompts.files"),
        (FromNothing(5), "from_nothing"),
    ]:
        with pytest.raises(InputError, match=part):
            synthesize(target, prompts, RECIPE, finished)
    with pytest.raises(InputError, match=r'target\.weights "tiny", not "another"'):
        synthesize(replace(target, name="another"), PROMPTS, RECIPE, finished)


def test_directories_that_are_not_as_they_were(target: specjax.Target, finished: Path, tmp_path: Path) -> None:
    changed, damaged, foreign, taken = (tmp_path / name for name in ("changed", "damaged", "foreign", "taken"))
    shutil.copytree(finished, changed)
    (changed / "shard-00001.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match=r"shard-00001\.jsonl: is not as it was written"):
        synthesize(target, PROMPTS, RECIPE, changed)
    shutil.copytree(finished, damaged)
    for text in ("{", "[]", "{}"):
        (damaged / "manifest.json").write_text(text)
        with pytest.raises(InputError, match=r"manifest\.json: "):
            synthesize(target, PROMPTS, RECIPE, damaged)
    foreign.mkdir()
    (foreign / "shard-7.jsonl").touch()
    with pytest.raises(InputError, match=r"has shard-7\.jsonl, but no manifest\.json"):
        synthesize(target, PROMPTS, RECIPE, foreign)
    taken.touch()
    with pytest.raises(InputError, match="cannot be read or written"):
        synthesize(target, PROMPTS, RECIPE, taken)


def test_a_full_disk(target: specjax.Target, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line; what was written before can be read, and the run goes on once there is room."""
    write = shards.write_whole
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def limited(path: Path, data: bytes) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(data) // 2 if path.name == "shard-00001.jsonl" else hard, hard))
        try:
            write(path, data)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_whole", limited)
        with pytest.raises(
            SpecjaxError, match=r"shard-00001\.jsonl: cannot be written \(.*\); 1 of 3 shards are whole"
        ):
            synthesize(target, PROMPTS, RECIPE, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"shard-00000.jsonl", "manifest.json"}
    assert len(read_conversations(tmp_path)) == 6
    synthesize(target, PROMPTS, RECIPE, tmp_path)
    assert contents(tmp_path) == contents(finished)


def test_budget(target: specjax.Target, finished: Path, tmp_path: Path) -> None:
    """An estimate from above, made before anything is computed or written."""
    for prompts in (PROMPTS, FromNothing(30)):
        first = synthesis._encode_first(target, prompts, RECIPE)
        largest = largest_size(target, prompts, first, RECIPE)
        run = synthesize(target, prompts, RECIPE, tmp_path / type(prompts).__name__, budget_mb=largest / 1e6)
        assert run.totals()["bytes"] <= largest
        assert run.totals()["bytes"] > 0.2 * largest or isinstance(prompts, FromNothing)  # some are dropped
        with pytest.raises(InputError, match=r"may take up to .* MB, over the budget of 0\.001 MB"):
            synthesize(target, prompts, RECIPE, tmp_path / "no", budget_mb=0.001)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"batch_size": 0}, "batch_size"),
        ({"seed": -1}, "seed"),
        ({"temperature": -1.0}, "temperature"),
        ({"drafter": "eagle"}, "drafter 'eagle'"),
        ({"question_temperature": 0.0}, "question_temperature 0"),
        ({"template_options": {"tools": []}}, "template option 'tools'"),
    ],
)
def test_recipes_that_cannot_be(change: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError, match=part):
        Recipe(**change)


# The script


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("synthesize", ROOT / "train" / "synthesize.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["synthesize"] = module
    spec.loader.exec_module(module)
    return module


def test_the_script(
    script: Any, target: specjax.Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(specjax, "load", lambda name, dtype: target)
    data = tmp_path / "data.jsonl"
    data.write_text('"a"\n"b"\n"a"\n' + json.dumps("c" * 40))
    same: dict[str, Any] = {"max_new_tokens": 12, "question_tokens": 12, "batch_size": 4, "temperature": 0.8}
    settings = script.Settings(tmp_path / "out", (data,), max_prompt_tokens=30, limit=3, **same)
    script.main(settings)
    out = capsys.readouterr().out.splitlines()
    rows = rows_of(tmp_path / "out")
    tokens = sum(len(row["token_ids"]) for row in rows)
    assert out[0].startswith(f"3 texts; {tokens} tokens written, ")
    assert out[1].startswith("2 rows (")
    assert out[2] == "left out: 1 too long, 1 duplicates"
    script.main(settings)
    assert "finished already" in capsys.readouterr().out.splitlines()[0]
    script.main(script.Settings(tmp_path / "nothing", from_nothing=9, limit=5, **same))
    assert manifest(tmp_path / "nothing")["prompts"] == {"from_nothing": 5}


def test_the_bar(script: Any) -> None:
    """Tokens per second and the time left, of what this call did alone."""
    screen = io.StringIO()
    with script.Meter(10, Console(file=screen, force_terminal=True, width=100)) as meter:
        meter(4, None)
        assert (meter.resumed, meter.ended, meter.tokens) == (4, 0, 0)
        meter(2, 50)
        meter(1, 0)
        assert (meter.resumed, meter.ended, meter.tokens) == (4, 3, 50)
        meter._began = time.monotonic() - 1e6  # 50 tokens in 1e6 seconds, whatever this machine is doing
        assert meter.rate == pytest.approx(5e-5, rel=0.01)
        assert meter.left == pytest.approx(1e6, rel=0.01)  # three texts are left
        meter(1, 10)
    shown = screen.getvalue()
    assert "8/10" in shown
    assert "0 tokens/s · 138:53:" in shown  # two texts, 250,000 seconds each
    assert script._clock(3725.4) == "1:02:05"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({}, "expected either --prompts"),
        ({"prompts": (Path("none.jsonl"),), "from_nothing": 5}, "expected either --prompts"),
        ({"prompts": (Path("none.jsonl"),)}, "none.jsonl: cannot be read"),
        ({"from_nothing": 0}, "questions from nothing"),
        ({"from_nothing": 3, "limit": 0}, "--limit"),
        ({"from_nothing": 3, "template_options": "5"}, "--template-options '5'"),
        ({"from_nothing": 3, "top_p": 2.0}, "top_p is 2"),
        ({"from_nothing": 10**6, "max_new_tokens": 10**4}, "over the budget of 1000 MB"),
    ],
)
def test_the_scripts_errors_in_one_line(
    change: dict[str, Any],
    part: str,
    script: Any,
    target: specjax.Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.setattr(specjax, "load", lambda name, dtype: target)
    with pytest.raises(SystemExit) as caught:
        run_command_line(lambda: script.main(script.Settings(tmp_path / "out", **change)))
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert part in err
    assert not (tmp_path / "out").exists()


def test_a_killed_process(script: Any, tmp_path: Path) -> None:
    """SIGKILL, wherever it strikes; the same command again gives what an unbroken run gives."""
    data = tmp_path / "ids.jsonl"
    random = np.random.default_rng(0)
    data.write_text("".join(json.dumps({"prompt_ids": random.integers(3, 96, 5).tolist()}) + "\n" for _ in range(120)))
    options = {"target": str(GOLDEN), "max_new_tokens": 60, "batch_size": 2, "shard_size": 2, "temperature": 0.9}
    words = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, str(ROOT / "train" / "synthesize.py"), "--prompts", str(data), *words]
    broken = tmp_path / "broken"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*command, "--output", str(broken)], env=environment, stderr=subprocess.PIPE)
    while not (broken / "shard-00002.jsonl").exists() and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err.decode()
    done = len(contents(broken))
    assert 3 <= done < 60
    assert not manifest(broken)["finished"]
    for folder in (broken, tmp_path / "whole"):
        script.main(script.Settings(folder, (data,), **options))
    assert contents(broken) == contents(tmp_path / "whole")
    assert len(contents(broken)) == 60
