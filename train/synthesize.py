"""Answers by the target itself, to be trained on: to the prompts of files, or to questions that it makes up.

    python train/synthesize.py --prompts questions.jsonl --output data/answers
    python train/synthesize.py --from-nothing 2000 --output data/magpie --temperature 0.7 --top-p 0.95
    python train/show_batch.py --data data/answers

Rows come in shards of JSON lines with the ids that the target saw and wrote. The same command again goes on where a
killed one stopped, and ends with the rows that an unbroken run would have given.

On two CPU cores, with one other process at work, SmolLM2-135M wrote about 35 tokens a second in batches of 1, 165 in
8, 240 in 16 and 310 in 32 (float32, 100 tokens after prompts of about 80, without prefill). Prompt lookup made 70 out
of the 35 and lost from batches of 8 on (70 to 110), where a round costs nearly as much as it has tokens: it is for
`--batch-size 1`, and for machines with arithmetic to spare.
"""

import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

import specjax
from specjax.cli import Bar, json_object, run_command_line
from specjax.errors import InputError, check_whole
from specjax.training.prompts import PromptFiles, read_prompts
from specjax.training.shards import Run
from specjax.training.synthesis import FromNothing, Recipe, num_texts, synthesize


@dataclass(frozen=True)
class Settings:
    """Write answers of the target, as data for a drafter's training."""

    output: Path
    """Directory for the shards and their manifest; a run that is there already is continued."""
    prompts: tuple[Path, ...] = ()
    """Files of prompts: JSON lines or a JSON array, gzipped or not, or directories of them."""
    from_nothing: int | None = None
    """Instead of files: so many questions by the target itself. Those of no use are dropped and not replaced."""
    target: str = "smollm2-135m-instruct"
    """A name, a directory, a .gguf file or a Hub model."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights and computation."""
    turns: Literal["last", "all"] = "last"
    """Of conversations that have answers: answer the last turn after those, or all turns in place of those."""
    limit: int | None = None
    """Only the first so many prompts."""
    max_new_tokens: int = 512
    """Of an answer."""
    temperature: float = 0.0
    """Of the answers; 0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 is off."""
    top_p: float = 1.0
    """Keep the most likely tokens that together hold this mass; 1 is off."""
    min_p: float = 0.0
    """Keep tokens at least this times as likely as the most likely one; 0 is off."""
    question_tokens: int = 256
    """Of a question from nothing; longer ones are dropped."""
    question_temperature: float = 1.0
    """Of the questions from nothing."""
    question_top_p: float = 0.95
    """Of the questions from nothing."""
    max_prompt_tokens: int = 1024
    """Longer prompts are left out."""
    template_options: Annotated[str, tyro.conf.arg(metavar="JSON")] = "{}"
    """Variables for the chat template, such as '{"enable_thinking": false}'."""
    drafter: Literal["plain", "prompt-lookup"] = "plain"
    """How to decode. Neither changes the answers' law; sampled tokens are other ones."""
    batch_size: int = 32
    """Prompts decoded together."""
    shard_size: int = 256
    """Prompts of a file of rows."""
    compress: bool = False
    """Write .jsonl.gz."""
    budget_mb: float = 1000
    """Refuse to begin where the rows may take more megabytes than this."""
    seed: int = 0
    """Of everything drawn."""

    @property
    def recipe(self) -> Recipe:
        same = {f.name: getattr(self, f.name) for f in fields(Recipe) if f.name != "template_options"}
        return Recipe(**same, template_options=json_object("--template-options", self.template_options))


def main(settings: Settings) -> None:
    recipe = settings.recipe
    prompts = find_prompts(settings)
    target = specjax.load(settings.target, dtype=settings.dtype)
    with Meter(num_texts(prompts)) as meter:
        run = synthesize(target, prompts, recipe, settings.output, settings.budget_mb, meter)
    if meter.resumed == num_texts(prompts):
        print(f"{settings.output}: finished already, nothing to do")
    else:
        before = f" ({meter.resumed:,} were there)" if meter.resumed else ""
        print(f"{meter.ended:,} texts{before}; {meter.tokens:,} tokens written, {meter.rate:.0f} a second")
    print(report(run, prompts))


def find_prompts(settings: Settings) -> PromptFiles | FromNothing:
    if (settings.from_nothing is None) == (not settings.prompts):
        raise InputError("expected either --prompts FILE … or --from-nothing N")
    if settings.limit is not None:
        check_whole("--limit", settings.limit, 1)
    if settings.from_nothing is not None:
        return FromNothing(min(settings.from_nothing, settings.limit or settings.from_nothing))
    return read_prompts(settings.prompts, settings.turns, settings.limit)


def report(run: Run, prompts: PromptFiles | FromNothing) -> str:
    """What became of everything."""
    totals = run.totals()
    ended = ", ".join(f"{number:,} {reason}" for reason, number in totals["finish_reasons"].items())
    lines = [
        f"{totals['rows']:,} rows ({ended or 'none'}), {totals['tokens']:,} tokens of answers and "
        f"{totals['prompt_tokens']:,} of prompts, {totals['bytes'] / 1e6:.1f} MB in {len(run.shards)} shards"
    ]
    left_out = dict(totals["dropped"])
    if isinstance(prompts, PromptFiles) and prompts.duplicates:
        left_out["duplicates"] = prompts.duplicates
    if left_out:
        lines.append("left out: " + ", ".join(f"{number:,} {reason}" for reason, number in left_out.items()))
    return "\n".join(lines)


class Meter:
    """Texts, tokens per second of this call, and the time left."""

    def __init__(self, texts: int, console: Console | None = None):
        self.tokens = self.ended = self.resumed = 0
        self._began = time.monotonic()
        self._bar = Bar(
            BarColumn(), MofNCompleteColumn(), TextColumn("texts · {task.fields[figures]}"), console=console
        )
        self._task = self._bar.add_task("texts", total=texts, figures="compiling")
        self._texts = texts

    def __enter__(self) -> "Meter":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, texts: int, tokens: int | None) -> None:
        if tokens is None:
            self.resumed += texts
        else:
            self.ended += texts
            self.tokens += tokens
        done = self.resumed + self.ended
        figures = f"{self.rate:,.0f} tokens/s · {_clock(self.left)} left" if self.ended else "compiling"
        self._bar.update(self._task, completed=done, figures=figures)

    @property
    def rate(self) -> float:
        """Tokens per second, questions' included, since the beginning: compiling and prefill count."""
        return self.tokens / max(time.monotonic() - self._began, 1e-9)

    @property
    def left(self) -> float:
        """Seconds."""
        left = self._texts - self.resumed - self.ended
        return left * (time.monotonic() - self._began) / self.ended


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


if __name__ == "__main__":
    run_command_line(lambda: main(tyro.cli(Settings, description=__doc__)))
