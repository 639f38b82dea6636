"""report.py: the page, read by a parser, has what the results have, whatever the tokens are."""

import json
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import eval as evaluation
import pytest
import report as script
from common import page
from common.trace import guesses, ids_of, sources, token_texts

import specjax
from specjax import testing

VOID = {"meta", "img", "hr"}
CHAIN = {"proposed": [5, 6, 7], "accepted": [0, 1], "committed": [5, 6, 9], "block_tokens": 4}
WHOLE = {"proposed": [5], "accepted": [0], "committed": [5, 9], "block_tokens": 2}
NOTHING = {"proposed": [], "accepted": [], "committed": [8], "block_tokens": 1}
CUT = {"proposed": [5, 6, 7], "accepted": [0, 1], "committed": [5, 6], "block_tokens": 4}
TREE = {
    "proposed": [1, 2, 3, 4, 5, 6],
    "parents": [-1, -1, 0, 1, 1, 4],
    "accepted": [1],
    "committed": [2, 9],
    "block_tokens": 7,
}


class Reader(HTMLParser):
    """Counts elements by class, keeps the text of tokens, and fails where tags do not match or something is loaded."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, list[str]]] = []
        self.classes: Counter[str] = Counter()
        self.tokens: list[list[tuple[str, str]]] = []  # of each output: class and text
        self.rejected = 0
        self.images = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        for name, value in given.items():
            assert name not in ("href", "srcset", "action", "onclick", "onload", "onerror")
            assert name != "src" or (value or "").startswith("data:image/png;base64,")
        assert tag not in ("script", "link", "iframe", "base", "object")
        self.images += tag == "img"
        classes = (given.get("class") or "").split()
        self.classes.update(classes)
        if tag == "article":
            self.tokens.append([])
        if "token" in classes:
            if "rejected" in classes:
                self.rejected += 1
            elif any("output" in c for _, c in self.open):
                self.tokens[-1].append((classes[1], ""))
        if tag not in VOID:
            self.open.append((tag, classes))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        inner = [classes for _, classes in self.open if "token" in classes]
        if inner and "rejected" not in inner[-1] and self.open[-1][0] != "i":
            kind, text = self.tokens[-1][-1]
            self.tokens[-1][-1] = (kind, text + data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def test_where_tokens_came_from():
    assert sources(CHAIN) == ["accepted", "accepted", "corrected"]
    assert sources(WHOLE) == ["accepted", "bonus"]
    assert sources(NOTHING) == ["plain"]
    assert sources(CUT) == ["accepted", "accepted"]
    assert sources(TREE) == ["accepted", "corrected"]
    leaf = TREE | {"accepted": [1, 3], "committed": [2, 4, 9]}
    assert sources(leaf) == ["accepted", "accepted", "bonus"]


def test_every_guess_that_was_not_accepted_is_shown_once():
    assert guesses(CHAIN) == [(2, [7])]
    assert guesses(WHOLE) == guesses(NOTHING) == []
    assert guesses(CUT) == [(2, [7])]
    assert guesses(TREE) == [(0, [1, 3]), (1, [4]), (1, [5, 6])]
    forked = {"proposed": [1, 2, 3], "parents": [-1, 0, 0], "accepted": [], "committed": [9], "block_tokens": 4}
    assert guesses(forked) == [(0, [1, 2]), (1, [3])]


@pytest.mark.parametrize(
    "text",
    ["<script>alert(1)</script>", "&amp;", "\"'>", "</div></span>", "<!--", "]]>", "&#0;", " ", "\\xe2\\x82", "é €"],
)
def test_any_text_is_read_back_as_it_is(text: str):
    round = {"proposed": [], "accepted": [], "committed": [0], "block_tokens": 1}
    html = page.page(text, f'<article class="output">{page.coloured([round], {0: text})}</article>')
    assert read(html).tokens == [[("plain", text)]]


def test_trees_and_texts_that_were_cut_are_shown_round_by_round():
    rounds = [CHAIN, WHOLE, NOTHING, TREE, CUT]
    html = page.page("", f'<article class="output">{page.coloured(rounds, {i: f"t{i}" for i in range(10)})}</article>')
    reader = read(html)
    assert "".join(text for _, text in reader.tokens[0]) == "t5t6t9t5t9t8t2t9t5t6"
    assert page.counts(rounds) == {"accepted": 6, "corrected": 2, "bonus": 1, "plain": 1}
    assert Counter(kind for kind, _ in reader.tokens[0]) == page.counts(rounds)
    assert (reader.classes["round"], reader.classes["has"], reader.classes["guess"]) == (5, 3, 5)
    assert reader.rejected == 7
    assert 'class="guess" style="padding-left: 1em"' in html


def test_what_cannot_be_seen_is_shown_by_its_number():
    assert page.shown("a\x00b\u202e\ud800\u200b") == "a<i>⟨U+0000⟩</i>b<i>⟨U+202E⟩</i><i>⟨U+D800⟩</i><i>⟨U+200B⟩</i>"
    assert page.shown("a\n\tb") == "a<i>↵</i>\n<i>→</i>\tb"
    assert "<i>⟨7⟩</i>" in page.plain([7], {7: ""})


def test_tokens_read_by_themselves():
    tokenizer = testing.TinyTokenizer()
    euro = [i for i, b in enumerate(tokenizer.token_bytes()) if b in (b"\xe2\x82", "€".encode())]
    texts = token_texts(tokenizer, [*euro, 2, 4, 4, 99])
    assert texts == {2: "<eos>", 4: "a", euro[0]: "\\xe2\\x82", euro[1]: "€", 99: ""}


@pytest.fixture
def results(loaded: specjax.Target, command: Callable[..., Any], tmp_path: Path) -> Path:
    """What eval.py writes of two prompts, one with two turns."""
    rows = [
        {"question_id": 1, "category": "a", "turns": ["abcd abcd abcd", "again"]},
        {"question_id": "<2>", "category": "b&", "turns": ["the cat and the other cat"]},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = ("--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", 24, "--repetitions", 1)
    drafter = "prompt-lookup:k=3,min_ngram=1"
    code, _, err = command(evaluation.main, *options, "--drafters", drafter, "--output", tmp_path / "out")
    assert code == 0, err
    return tmp_path / "out" / "results.json"


def test_the_page_has_what_the_results_have(results: Path, command: Any, monkeypatch: pytest.MonkeyPatch):
    found = json.loads(results.read_text(encoding="utf-8"))
    monkeypatch.setattr(specjax, "load", lambda *args, **kwargs: pytest.fail("loaded a target"))
    code, _, err = command(script.main, results)
    assert code == 0, err
    html = results.with_name("report.html").read_text(encoding="utf-8")
    reader = read(html)
    outputs = [output for prompt in found["prompts"] for output in prompt["outputs"]]
    rounds = [r for output in outputs for r in output["rounds"]]
    assert reader.classes["prompt"] == len(found["prompts"]) == 3
    assert reader.classes["output"] == len(outputs) == 6
    assert reader.classes["round"] == len(rounds)
    assert reader.classes["has"] == sum(len(r["proposed"]) > len(r["accepted"]) for r in rounds)
    assert reader.rejected == sum(len(r["proposed"]) - len(r["accepted"]) for r in rounds) > 0
    assert reader.images == 2
    for tokens, output in zip(reader.tokens, outputs, strict=True):
        kinds = Counter(kind for kind, _ in tokens)
        assert kinds["accepted"] == sum(len(r["accepted"]) for r in output["rounds"])
        assert kinds.total() == len(output["token_ids"])
        texts = [found["tokens"][str(i)] for i in output["token_ids"]]
        assert [text for _, text in tokens] == texts
    assert "b&amp; &lt;2&gt;, turn 1" in html

    # an older file has no texts of tokens: the tokenizer reads them, and the page is the same
    old = {key: value for key, value in found.items() if key != "tokens"}
    results.with_name("old.json").write_text(json.dumps(old), encoding="utf-8")
    target = testing.tiny_target(testing.TableModel.random(64), tokenizer=testing.TinyTokenizer())
    monkeypatch.setattr(specjax, "load", lambda name: target)
    code, _, err = command(script.main, results.with_name("old.json"), "--output", results.parent / "old")
    assert code == 0, err
    again = read((results.parent / "old" / "report.html").read_text(encoding="utf-8"))
    assert again.tokens == reader.tokens

    code, _, err = command(script.main, results, "--limit", 1)
    assert code == 0, err
    assert set(ids_of(found["prompts"])) == {int(i) for i in found["tokens"]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read as JSON"),
        ("{", "cannot be read as JSON"),
        ("[]", "no 'provenance'; expected the results.json of eval.py"),
        ('{"provenance": {}, "settings": {}}', "no 'definitions'"),
        (
            json.dumps({key: {} for key in script.KEYS[""]} | {"prompts": [{"task": "a"}]}),
            "no 'question_id' in prompts; expected the results.json of eval.py",
        ),
    ],
)
def test_another_file_is_named_in_one_line(command: Any, tmp_path: Path, content: str | None, message: str):
    file = tmp_path / "results.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    code, _, err = command(script.main, file)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert list(tmp_path.glob("*.html")) == []
