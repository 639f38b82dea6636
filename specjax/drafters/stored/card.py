"""The model card: the README.md of a stored drafter."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.drafters.stored.drafting import Drafter
from specjax.drafters.stored.engines import ENGINES, HERE, command, kind_of, obstacles
from specjax.models.config import ModelConfig

_NAMES = {
    "eagle1": "EAGLE-1 drafter",
    "eagle3": "EAGLE-3 drafter",
    "mtp": "MTP modules",
    "medusa": "Medusa heads",
    "small-decoder": "Draft model",
    "draft-model": "Draft model",
}


def model_card(
    drafter: Drafter,
    section: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    target: ModelConfig | None,
    form: str,
    base_model: str | None,
) -> str:
    """The card's text.

    Args:
        section: our key of its `config.json`; its "training" is printed.
        tensors: what is stored.
        target, form: see `obstacles`.
        base_model: name of the target for those who serve it.
    """
    of = base_model or section["target"]["name"] or "its target"
    front = f"---\nbase_model: {json.dumps(base_model)}\ntags: [speculative-decoding]\n---\n\n" if base_model else ""
    title = f"# {_NAMES[kind_of(drafter)]} for {of}"
    text = (
        "It guesses tokens that the target checks in one pass: text comes faster, and stays the target's own. Trained "
        "with specjax."
    )
    parts = [
        front + title,
        text,
        _facts(drafter, section, tensors, form),
        "## Use",
        _use(section["target"]["name"] or of),
    ]
    parts += [_engine(drafter, target, form, engine, base_model) for engine in ENGINES]
    if kind_of(drafter) == "medusa":
        parts.append(_medusa(form, section))
    return "\n\n".join(parts + _training(section.get("training") or {})) + "\n"


def _facts(drafter: Drafter, section: Mapping[str, Any], tensors: Mapping[str, np.ndarray], form: str) -> str:
    floats = [x for name, x in tensors.items() if name not in ("d2t", "t2d")]
    target, drafting = section["target"], section["drafting"]
    size, dtype = sum(x.size for x in floats), floats[0].dtype
    rows = {
        "stored": f"{size:,} numbers in {dtype}, in the form {form!r}",
        "features": section.get("features"),
        "feature layers": _list(section.get("feature_layers")),
        "draft vocabulary": _vocabulary(section),
        "drafts": f"a chain of {drafter.max_depth}" if drafter.max_depth == drafter.num_nodes else json.dumps(drafting),
        "target's weights": f"{target['name']!r}, fingerprint {target['fingerprint']}",
        "chat template": target["chat_template"],
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value is not None]
    return "\n".join(["| | |", "|---|---|", *lines])


def _use(of: str) -> str:
    return (
        f"```python\nimport specjax\n\ntarget = specjax.load({of!r})\n"
        f"drafter = specjax.load_drafter({HERE!r}, target)\n"
        'print(specjax.generate(target, ["Once upon a time"], drafter=drafter).texts[0])\n```'
    )


def _engine(drafter: Drafter, target: ModelConfig | None, form: str, engine: str, base_model: str | None) -> str:
    against = obstacles(drafter, target, form, engine)
    if against:
        return f"{engine} does not serve these files: {'; '.join(against)}."
    return f"{engine}:\n\n```\n{command(drafter, form, engine, base_model)}\n```"


def _medusa(form: str, section: Mapping[str, Any]) -> str:
    text = "Text Generation Inference and TensorRT-LLM read Medusa's official form"
    if form == "specjax" and section["shared_head"]:
        return f"{text}, with copies of the target's head: specjax.save_drafter(…, format='medusa') writes it."
    if section["draft_vocab_size"] is not None:
        return f"{text}, which has no draft vocabularies."
    return f"{text}, which these files have."


def _training(training: Mapping[str, Any]) -> list[str]:
    figures = training.get("figures")
    rest = {name: value for name, value in training.items() if name != "figures"}
    parts = []
    if figures:
        parts += ["## Figures", "\n".join(_figures(figures))]
    if rest:
        parts += ["## Training", "\n".join(f"- {name}: {_text(value)}" for name, value in rest.items())]
    return parts


def _figures(figures: Any) -> list[str]:
    """A mapping, or a mapping of mappings, as a table."""
    if not isinstance(figures, Mapping):
        return [_text(figures)]
    if not all(isinstance(row, Mapping) for row in figures.values()):
        return ["| | |", "|---|---|", *(f"| {name} | {_text(value)} |" for name, value in figures.items())]
    columns = list(dict.fromkeys(name for row in figures.values() for name in row))
    lines = ["| | " + " | ".join(map(str, columns)) + " |", "|---" * (len(columns) + 1) + "|"]
    return lines + [
        f"| {name} | " + " | ".join(_text(row.get(column, "")) for column in columns) + " |"
        for name, row in figures.items()
    ]


def _vocabulary(section: Mapping[str, Any]) -> str | None:
    size = section.get("draft_vocab_size")
    return None if size is None else f"{size} of {section['target']['vocab_size']} tokens"


def _list(values: Any) -> str | None:
    return None if values is None else ", ".join(map(str, values))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
