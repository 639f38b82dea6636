"""Drafters on the command line: `plain`, `prompt-lookup:k=8,max_ngram=3`, `draft-model:PATH,k=4`.

A name, then after a colon its settings, separated by commas; what has no `=` is the path. `KINDS` has one entry each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import specjax
from specjax import Drafter, InputError

PLAIN = "plain"


@dataclass(frozen=True)
class Named:
    """A drafter as it was asked for.

    Attributes:
        label: the text it was asked for with; it names the drafter in tables and results.
        kind: the part before the colon.
        drafter: the object.
    """

    label: str
    kind: str
    drafter: Drafter

    @property
    def num_draft_tokens(self) -> int:
        return getattr(self.drafter, "num_draft_tokens", self.drafter.num_nodes)


@dataclass(frozen=True)
class Setting:
    """One key of a drafter: the argument it becomes, and how its text is read (ValueError where it can't be)."""

    argument: str
    read: Callable[[str], Any]
    expected: str


def whole(argument: str, least: int) -> Setting:
    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise ValueError
        return value

    return Setting(argument, read, f"a whole number of at least {least}")


def yes_or_no(argument: str) -> Setting:
    return Setting(argument, {"true": True, "false": False}.__getitem__, "true or false")


@dataclass(frozen=True)
class Kind:
    """A kind of drafter: its settings, and how it is made (`path` comes first where `takes_path`)."""

    settings: dict[str, Setting]
    make: Callable[..., Drafter]
    takes_path: bool = False


def _draft_model(path: str, dtype: str, **settings: Any) -> Drafter:
    draft: Any = specjax.load(path, dtype=dtype)
    return specjax.DraftModel(draft, **settings)


KINDS = {
    PLAIN: Kind({}, specjax.Plain),
    "prompt-lookup": Kind(
        {
            "k": whole("num_draft_tokens", 1),
            "max_ngram": whole("max_ngram", 1),
            "min_ngram": whole("min_ngram", 1),
            "window": whole("window", 1),
        },
        specjax.PromptLookup,
    ),
    "draft-model": Kind(
        {"k": whole("num_draft_tokens", 1), "sample": yes_or_no("sample")}, _draft_model, takes_path=True
    ),
}


def parse_drafter(text: str, dtype: str = "float32") -> Named:
    """The drafter that `text` asks for; models are loaded in `dtype`.

    Raises:
        InputError: an unknown name or key, or a value out of range.
    """
    name, _, rest = text.partition(":")
    if name not in KINDS:
        raise InputError(f"unknown drafter {name!r}: expected one of {', '.join(KINDS)}")
    kind = KINDS[name]
    settings: dict[str, Any] = {}
    paths = []
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            paths.append(part)
            continue
        if key not in kind.settings:
            raise InputError(f"{text}: unknown setting {key!r}; {name} has {', '.join(kind.settings) or 'no settings'}")
        setting = kind.settings[key]
        if setting.argument in settings:
            raise InputError(f"{text}: {key} is given twice")
        try:
            settings[setting.argument] = setting.read(value)
        except (ValueError, KeyError):
            raise InputError(f"{text}: {key} is {value!r}; expected {setting.expected}") from None
    if kind.takes_path:
        if len(paths) != 1:
            raise InputError(f"{text}: expected {name}:PATH with one path or model name, and settings like k=4")
        return Named(text, name, kind.make(paths[0], dtype, **settings))
    if paths:
        raise InputError(f"{text}: {paths[0]!r} is no setting; expected key=value")
    return Named(text, name, kind.make(**settings))


def parse_drafters(texts: Sequence[str], dtype: str = "float32") -> list[Named]:
    """Several drafters; plain decoding comes first, asked for or not, because the others are compared with it."""
    for text in texts:
        if texts.count(text) > 1:
            raise InputError(f"drafter {text!r} is given twice")
    named = [parse_drafter(text, dtype) for text in texts if text != PLAIN]
    return [parse_drafter(PLAIN), *named]
