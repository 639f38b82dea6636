"""Pieces of an HTML page that loads nothing: any text made safe and visible, tables, and rounds of coloured tokens."""

import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from common.trace import ACCEPTED, BONUS, CORRECTED, PLAIN_STEP, guesses, sources

SOURCES = {
    ACCEPTED: "drafted and accepted",
    BONUS: "bonus: the target's own, after all of a draft's path",
    CORRECTED: "after a rejection: the target's own instead of a guess",
    PLAIN_STEP: "nothing was proposed",
}

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #1b1b1b;
  background: #fff; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 2em; } h3 { font-size: 1em; margin-bottom: .3em; }
table { border-collapse: collapse; font-size: .85em; margin: 1em 0; display: block; overflow-x: auto; }
th, td { padding: .2em .7em; border-bottom: 1px solid #ddd; text-align: right; }
th { vertical-align: bottom; } .name { text-align: left; }
img { max-width: 100%; }
dl { font-size: .85em; display: grid; grid-template-columns: max-content auto; gap: .1em 1em; } dd { margin: 0; }
summary { cursor: pointer; }
.note { font-size: .85em; color: #555; margin: .2em 0; } .fault { color: #b00020; font-weight: bold; }
.text { font: 14px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; padding: .5em .8em;
  background: #fafafa; border: 1px solid #e5e5e5; border-radius: 4px; position: relative; }
.text i { color: #888; font-style: normal; user-select: none; }
.round { border-left: 2px solid #777; padding-left: 1px; margin-left: 1px;
  -webkit-box-decoration-break: slice; box-decoration-break: slice; }
.round:hover, .round:focus { background: #eee; outline: none; }
.token { border-radius: 2px; padding: .1em 0; }
.accepted { background: #bfe3c8; } .bonus { background: #bcd8f2; } .corrected { background: #f8d0a8; }
.rejected { background: #f3c1c1; text-decoration: line-through; }
.guesses { display: none; position: absolute; left: .4em; z-index: 1; background: #fff; white-space: pre-wrap;
  border: 1px solid #999; border-radius: 4px; padding: .3em .6em; width: max-content; max-width: calc(100% - 2.2em);
  box-shadow: 0 2px 6px #0003; line-height: 1.5; pointer-events: none; }
.round:hover > .guesses, .round:focus > .guesses { display: block; }
.guess { display: block; } .guess .token { margin-right: 2px; }
.has { border-left-color: #c0392b; }
.sample { border-radius: 2px; padding: .1em .4em; margin-right: .8em; }
@media (prefers-color-scheme: dark) {
  body { background: #16181b; color: #e4e4e4; } .text { background: #1d2024; border-color: #333; }
  th, td { border-color: #333; } .note { color: #aaa; } img { background: #fff; }
  .accepted { background: #23563a; } .bonus { background: #234a73; } .corrected { background: #7a4a1c; }
  .rejected { background: #6d2b2b; } .round:hover, .round:focus { background: #333; } .guesses { background: #222; }
}
"""


def page(title: str, *parts: str) -> str:
    """A whole page."""
    name = escape("".join(c for c in title if not invisible(c)))
    head = f'<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n<title>{name}</title>'
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n'
        "</body>\n</html>\n"
    )


def shown(text: str) -> str:
    """Any text as HTML: markup escaped, and what cannot be seen by its number. Line ends and tabs stay, with a mark."""
    marks = {"\n": "<i>↵</i>\n", "\t": "<i>→</i>\t"}
    return "".join(
        marks.get(c) or (f"<i>⟨U+{ord(c):04X}⟩</i>" if invisible(c) else escape(c, quote=True)) for c in text
    )


def invisible(character: str) -> bool:
    """Control characters, marks that turn the direction of text or have no width, lone surrogates, no characters."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Cn", "Zl", "Zp")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> str:
    """A table of plain text; the first `names` columns are text, the others numbers."""

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = [' class="name"' if i < names else "" for i in range(len(cells))]
        inner = "".join(f"<{tag}{kind}>{shown(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{inner}</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return f"<table>\n<thead>{line('th', columns)}</thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def definitions(values: Mapping[str, Any]) -> str:
    inner = "".join(f"<dt>{shown(str(name))}</dt><dd>{shown(str(value))}</dd>" for name, value in values.items())
    return f"<dl>{inner}</dl>"


def legend() -> str:
    inner = "".join(f'<span class="sample {name}">{shown(text)}</span>' for name, text in SOURCES.items())
    rejected = '<span class="sample rejected">rejected guess (hover over a round)</span>'
    return f'<p class="legend">{inner}{rejected}</p>'


def counts(rounds: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Tokens by where they came from."""
    return Counter(source for r in rounds for source in sources(r))


def coloured(rounds: Sequence[Mapping[str, Any]], texts: Mapping[int, str]) -> str:
    """A text, round by round: every token in the colour of where it came from, rejected guesses below on hover.

    Args:
        rounds: as in results.json.
        texts: of every token id.
    """
    return f'<div class="text">{"".join(_round(i, r, texts) for i, r in enumerate(rounds, 1))}</div>'


def plain(ids: Sequence[int], texts: Mapping[int, str]) -> str:
    """A text without colours."""
    return f'<div class="text">{"".join(_text(i, texts) for i in ids)}</div>'


def _round(number: int, r: Mapping[str, Any], texts: Mapping[int, str]) -> str:
    tokens = "".join(
        f'<span class="token {source}">{_text(token, texts)}</span>'
        for token, source in zip(r["committed"], sources(r), strict=True)
    )
    lines = guesses(r)
    box = ""
    if lines:
        inner = "".join(
            f'<span class="guess" style="padding-left: {depth}em">'
            + "".join(f'<span class="token rejected">{_text(token, texts)}</span>' for token in line)
            + "</span>"
            for depth, line in lines
        )
        said = f"round {number}: {len(r['accepted'])} of {len(r['proposed'])} accepted, block of {r['block_tokens']}"
        box = f'<span class="guesses"><span class="note">{said}; not accepted:</span>{inner}</span>'
    kind = 'class="round has" tabindex="0"' if lines else 'class="round"'
    return f'<span {kind} data-round="{number}">{tokens}{box}</span>'


def _text(token: int, texts: Mapping[int, str]) -> str:
    """A token as HTML; the id where it has no text."""
    return shown(texts[token]) or f"<i>⟨{token}⟩</i>"
