"""Drafters on the command line: `plain`, `prompt-lookup:k=8,max_ngram=3`, `eagle:PATH,k=5`,
`eagle:PATH,depth=6,top_k=8,total=32`, `combined:prompt-lookup:k=4;suffix`, `adaptive:eagle:PATH,k=5`.

A name, then after a colon its settings, separated by commas; what has no `=` is the path, which drafters that come with
specjax do without: `eagle3`, `draft-model:k=3`. `KINDS` has one entry each. After `combined:` come drafters like these,
separated by semicolons (which shells want quoted), and settings of the combination: what has its `=` before any colon,
as in `combined:total=32;prompt-lookup:k=4;suffix`. After `adaptive:` comes one drafter like these, which may be a
combination, behind settings of the adapting, if any: `adaptive:prior=0.7;prompt-lookup:k=8`.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console

import specjax
from specjax import Drafter, DraftModel, InputError, Target
from specjax.drafters.eagle import Eagle
from specjax.drafters.growing import GrownTree
from specjax.drafters.medusa import Medusa
from specjax.drafters.mtp import Mtp
from specjax.shipped import SHIPPED

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


def number(argument: str) -> Setting:
    return Setting(argument, float, "a number")


def array(argument: str) -> Setting:
    def read(text: str) -> Any:
        try:
            return jnp.asarray(np.load(text, allow_pickle=False))
        except OSError:
            raise ValueError from None

    return Setting(argument, read, "a .npy file of an array")


@dataclass(frozen=True)
class Kind:
    """A kind of drafter: its settings, and how it is made of them.

    Attributes:
        make: of the target, the dtype and the settings; the path comes third where `takes_path`.
        takes_batch_size: `batch_size` is one of the settings, which the script sets and not the text.
    """

    settings: dict[str, Setting]
    make: Callable[..., Drafter]
    takes_path: bool = False
    takes_batch_size: bool = False


@dataclass(frozen=True)
class Asked:
    """A drafter as the command line asks for it; read, but not made yet."""

    label: str
    kind: str
    path: str | None
    settings: dict[str, Any]

    def make(self, target: Target, dtype: str = "float32", batch_size: int = 1) -> Named:
        """Load or build it, models in `dtype`.

        Args:
            batch_size: rows that it will be run with: what a drafter that adapts has to know.

        Raises:
            InputError: settings that do not go together, or a drafter of another kind or for another target.
        """
        kind = KINDS[self.kind]
        where = [self.path] if kind.takes_path else []
        more = {"batch_size": batch_size} if kind.takes_batch_size else {}
        return Named(self.label, self.kind, kind.make(target, dtype, *where, **self.settings, **more))


def _stored(kind: type[Drafter], name: str) -> Callable[..., Drafter]:
    """How a drafter of that kind is read from a directory."""

    def make(target: Target, dtype: str, path: str, **settings: Any) -> Drafter:
        grown = {key: settings.pop(key) for key in GROWN if key in settings}
        if grown and "num_draft_tokens" in settings:
            raise InputError(f"{name}:{path}: k is a chain's length; {', '.join(grown)} are a grown tree's")
        if grown:
            settings["tree"] = GrownTree(**grown)
        drafter = specjax.load_drafter(path, target, dtype=dtype, **settings)
        if not isinstance(drafter, kind):
            raise InputError(
                f"{name}:{path}: that is another kind of drafter, {drafter.name}; ask for it by its own name"
            )
        return drafter

    return make


def _combined(target: Target, dtype: str, parts: Sequence[Asked], **settings: Any) -> Drafter:
    return specjax.Combined([part.make(target, dtype).drafter for part in parts], **settings)


def _adaptive(target: Target, dtype: str, parts: Sequence[Asked], batch_size: int, **settings: Any) -> Drafter:
    """With costs as measured, or as they were measured the first time; that takes about a minute."""
    (asked,) = parts
    drafter = asked.make(target, dtype, batch_size).drafter
    context = min(COSTS_CONTEXT, target.model.max_positions // 2)
    with Console(stderr=True).status(f"{asked.label}, batch {batch_size}: measuring costs, unless known"):
        costs = specjax.measure_costs(target, drafter, batch_size, context)
    return specjax.Adaptive(drafter, costs, **settings)


COMBINED, ADAPTIVE = "combined", "adaptive"
COSTS_CONTEXT = 256  # tokens of the text that costs are measured at
GROWN = ("depth", "top_k", "total")
CHAIN = {
    "k": whole("num_draft_tokens", 1),
    "sample": yes_or_no("sample"),
    "min_confidence": number("min_confidence"),
}
EAGLE = Kind(CHAIN | {key: whole(key, 1) for key in GROWN}, _stored(Eagle, "eagle"), takes_path=True)
KINDS = {
    PLAIN: Kind({}, lambda target, dtype: specjax.Plain()),
    "prompt-lookup": Kind(
        {
            "k": whole("num_draft_tokens", 1),
            "max_ngram": whole("max_ngram", 1),
            "min_ngram": whole("min_ngram", 1),
            "window": whole("window", 1),
        },
        lambda target, dtype, **settings: specjax.PromptLookup(**settings),
    ),
    "draft-model": Kind(
        CHAIN,
        _stored(DraftModel, "draft-model"),
        takes_path=True,
    ),
    "medusa": Kind({"k": whole("num_draft_tokens", 1)}, _stored(Medusa, "medusa"), takes_path=True),
    "eagle": EAGLE,
    "mtp": Kind(CHAIN | {key: whole(key, 1) for key in GROWN}, _stored(Mtp, "mtp"), takes_path=True),
    "eagle3": EAGLE,
    "recycling": Kind(
        {
            "k": whole("k", 1),
            "fresh": whole("fresh", 1),
            "matrix": array("matrix"),
            "seed_prompt": yes_or_no("seed_prompt"),
        },
        lambda target, dtype, **settings: specjax.TokenRecycling(**settings),
    ),
    "suffix": Kind(
        {
            "k": whole("num_draft_tokens", 1),
            "factor": number("factor"),
            "min_probability": number("min_probability"),
            "min_match": whole("min_match", 1),
            "max_match": whole("max_match", 1),
            "places": whole("places", 1),
        },
        lambda target, dtype, **settings: specjax.SuffixDecoding(**settings),
    ),
    "lookahead": Kind(
        {
            "W": whole("window", 0),
            "N": whole("ngram", 2),
            "G": whole("guesses", 1),
            "seed_prompt": yes_or_no("seed_prompt"),
        },
        lambda target, dtype, **settings: specjax.LookaheadDecoding(**settings),
    ),
    "early-exit": Kind(
        {"layers": whole("layers", 1)} | CHAIN,
        lambda target, dtype, layers=None, **settings: specjax.EarlyExit(layers, **settings),
    ),
    COMBINED: Kind({"total": whole("total", 1)}, _combined),
    ADAPTIVE: Kind(
        {
            "prior": number("prior"),
            "weight": number("weight"),
            "memory": number("memory"),
            "patience": whole("patience", 1),
            "most_patience": whole("most_patience", 1),
        },
        _adaptive,
        takes_batch_size=True,
    ),
}


def parse_drafter(text: str) -> Asked:
    """The drafter that `text` asks for.

    Raises:
        InputError: an unknown name or key, or a value out of range.
    """
    name, _, rest = text.partition(":")
    if name not in KINDS:
        raise InputError(f"unknown drafter {name!r}: expected one of {', '.join(KINDS)}")
    kind = KINDS[name]
    settings: dict[str, Any] = {}
    paths = []
    if name in (COMBINED, ADAPTIVE):
        settings["parts"], rest = _parts(text, name, rest)
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
    if kind.takes_path and not paths and name in SHIPPED:
        paths = [name]
    if kind.takes_path and len(paths) != 1:
        raise InputError(f"{text}: expected {name}:PATH with one path or model name, and settings like k=4")
    if paths and not kind.takes_path:
        raise InputError(f"{text}: {paths[0]!r} is no setting; expected key=value")
    return Asked(text, name, paths[0] if paths else None, settings)


def _parts(text: str, name: str, rest: str) -> tuple[tuple[Asked, ...], str]:
    """The drafters that a combination, or one that adapts, is made of; and its own settings as text."""

    def is_setting(piece: str) -> bool:
        return "=" in piece.partition(":")[0]

    pieces = [piece for piece in rest.split(";") if piece]
    if name == COMBINED:
        parts = tuple(parse_drafter(piece) for piece in pieces if not is_setting(piece))
        if len(parts) < 2:
            raise InputError(f"{text}: expected two drafters or more, such as {COMBINED}:prompt-lookup:k=4;suffix")
        if any(part.kind == ADAPTIVE for part in parts):
            raise InputError(f"{text}: parts do not adapt by themselves; expected {ADAPTIVE}:{COMBINED}:…")
        return parts, ",".join(filter(is_setting, pieces))
    own = list(itertools.takewhile(is_setting, pieces))
    if len(own) == len(pieces):
        raise InputError(f"{text}: expected a drafter, such as {ADAPTIVE}:prompt-lookup:k=8")
    part = parse_drafter(";".join(pieces[len(own) :]))
    if part.kind in (PLAIN, ADAPTIVE):
        raise InputError(f"{text}: there is nothing to adapt in {part.label}")
    return (part,), ",".join(own)


def parse_drafters(texts: Sequence[str]) -> list[Asked]:
    """Several drafters; plain decoding comes first, asked for or not, because the others are compared with it."""
    for text in texts:
        if texts.count(text) > 1:
            raise InputError(f"drafter {text!r} is given twice")
    asked = [parse_drafter(text) for text in texts if text != PLAIN]
    return [parse_drafter(PLAIN), *asked]
