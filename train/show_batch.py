"""Shows what a drafter would be trained on: a batch of conversations as the target sees them.

    python train/show_batch.py --data conversations.jsonl
    python train/show_batch.py --data conversations.jsonl --target Qwen/Qwen3-0.6B --length 1024 --batch-size 2

Supervised tokens are green (their line breaks ↵), special ones bold; without colours, ⟦ ⟧ stand around supervised
tokens. Each conversation begins with its file and line. The last line says what became of the data.
"""

from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.text import Text

import specjax
from specjax.cli import json_object, run_command_line
from specjax.errors import InputError
from specjax.models.tokenizer import Tokenizer
from specjax.training.batches import Batch, Rows, batches, lay_out, steps_per_epoch
from specjax.training.conversations import read_conversations
from specjax.training.rendering import Renderer

SUPERVISED, PROMPT, SPECIAL = "green", "dim", "bold"


@dataclass(frozen=True)
class Settings:
    """Print a batch of training data, supervised tokens in colour."""

    data: tuple[Path, ...]
    """Files of conversations: JSON lines or a JSON array, gzipped or not, or directories of them."""
    target: str = "smollm2-135m-instruct"
    """Whose tokenizer and chat template: a name, a directory, a .gguf file or a Hub model."""
    length: int = 512
    """Tokens of a row."""
    batch_size: int = 4
    """Rows of a batch."""
    buckets: tuple[int, ...] | None = None
    """Shorter row lengths: one conversation a row then, instead of several packed into one."""
    overlong: Literal["cut", "drop"] = "cut"
    """What happens to conversations longer than a row."""
    turns: Literal["all", "last"] = "all"
    """Which assistant messages are supervised."""
    template_options: Annotated[str, tyro.conf.arg(metavar="JSON")] = "{}"
    """Variables for the chat template, such as '{"enable_thinking": false}'."""
    seed: int = 0
    """Of the order."""
    batch: int = 0
    """Which batch to show, from 0; the epochs follow one another."""


def main(settings: Settings) -> None:
    options = json_object("--template-options", settings.template_options)
    if settings.batch < 0:
        raise InputError(f"--batch {settings.batch}: expected 0 or more")
    conversations = read_conversations(*settings.data)
    target = specjax.load(settings.target)
    rendered = Renderer.of(target, settings.turns, **options).render_all(conversations)
    rows = lay_out(rendered, settings.length, settings.overlong, settings.buckets)
    batch = next(islice(batches(rows, settings.batch_size, settings.seed), settings.batch, None))
    console = Console(highlight=False, soft_wrap=True)
    show(batch, rows, target.tokenizer, console)
    steps = steps_per_epoch(rows, settings.batch_size)
    console.print(f"batch {settings.batch}, {steps:,} an epoch; {rows.report}")


def show(batch: Batch, rows: Rows, tokenizer: Tokenizer | None, console: Console) -> None:
    """Print a batch, row by row and segment by segment."""
    colours = console.color_system is not None and not console.no_color
    spell = Speller(tokenizer)
    for b, row in enumerate(batch.rows.tolist()):
        used, width = int((batch.segments[b] > 0).sum()), batch.tokens.shape[1]
        title = f"row {b} (number {row})" if row >= 0 else f"row {b} (padding, to fill the batch)"
        console.rule(f"{title}: {used} of {width} tokens, {int(batch.mask[b].sum())} supervised", align="left")
        for segment, member in enumerate(rows.members[row] if row >= 0 else (), 1):
            here = batch.segments[b] == segment
            ids, mask = batch.tokens[b, here].tolist(), batch.mask[b, here]
            console.print(Text(f"[{rows.where[member]}: {len(ids)} tokens, {int(mask.sum())} supervised]", "cyan"))
            console.print(coloured(ids, mask, spell, colours))
    total, slots = int((batch.segments > 0).sum()), batch.tokens.size
    console.rule(f"{total:,} of {slots:,} tokens, {batch.num_supervised:,} supervised", align="left")


def coloured(ids: list[int], mask: np.ndarray, spell: "Speller", colours: bool) -> Text:
    """The text of tokens; runs of one kind are joined before decoding, since a character may span tokens."""
    text = Text()
    for supervised, marked in groupby(zip(ids, mask.tolist(), strict=True), key=lambda pair: pair[1]):
        text.append("⟦" if supervised and not colours else "")
        style = SUPERVISED if supervised else PROMPT
        for special, run in groupby((token for token, _ in marked), key=spell.is_special):
            spelled = spell(list(run))
            if supervised and colours:
                spelled = spelled.replace("\n", "↵\n")  # a colour cannot be seen on a line break
            text.append(spelled, f"{SPECIAL} {style}" if special else style)
        text.append("⟧" if supervised and not colours else "")
    return text


class Speller:
    """Token ids to text, special tokens by their names; without a tokenizer, to numbers."""

    def __init__(self, tokenizer: Tokenizer | None):
        self.bytes = tokenizer.token_bytes() if tokenizer else []
        self.names = tokenizer.tokens() if tokenizer else []

    def is_special(self, token: int) -> bool:
        return token < len(self.bytes) and not self.bytes[token]

    def __call__(self, ids: list[int]) -> str:
        known = all(token < len(self.bytes) for token in ids)
        if not known or not ids:
            return "".join(f" {token}" for token in ids)
        return b"".join(self.bytes[i] or self.names[i].encode() for i in ids).decode("utf-8", "replace")


if __name__ == "__main__":
    run_command_line(lambda: main(tyro.cli(Settings, description=__doc__)))
