"""What every training script does around its network: data, held-out prompts, features, the run, and measuring.

    session = Session.open(plan)
    outcome = session.learn(objective, network)

The scripts in `train/` add a drafter's own settings to `Plan` and say which network learns what.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import numpy as np
import tyro
from flax import nnx
from jaxtyping import Int
from rich import progress as bars
from rich.console import Console

from specjax.cli import Bar
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.medusa import best_tree
from specjax.drafters.stored import load_drafter, save_drafter
from specjax.errors import InputError, check_whole
from specjax.models.target import Target, load
from specjax.training.acceptance import HeldOut
from specjax.training.batches import Rows, lay_out, steps_per_epoch
from specjax.training.checkpoints import Checkpoints
from specjax.training.conversations import read_conversations
from specjax.training.features import Stored, store
from specjax.training.journal import Sink, TensorBoard, WeightsAndBiases
from specjax.training.loop import Outcome, Run, train
from specjax.training.mesh import parse_mesh
from specjax.training.optimizers import Optimization
from specjax.training.rendering import Rendered, Renderer
from specjax.training.state import likely_dtype
from specjax.training.supervised import room
from specjax.training.synthesis import FromNothing, Recipe, num_texts, synthesize
from specjax.trees import StaticTree

P = TypeVar("P", bound="Plan")

# what the preset of that name changes, in every script
FULL: dict[str, Any] = {"epochs": 2.5, "questions": 8000, "question_tokens": 160, "evaluate_every": 300}


@dataclass(frozen=True)
class Plan:
    """The settings that all training scripts share."""

    output: Path = Path("runs/drafter")
    """Directory of the run: features, checkpoints, metrics, and in the end the drafter. One that holds a run is
    continued."""
    preset: Literal["quick", "full"] = "quick"
    """What the other settings are where they are not given: a run of minutes, or the long recipe."""
    data: tuple[Path, ...] = ()
    """Files or directories of conversations. None: the target makes some up."""
    questions: int = 192
    """Without data: conversations that the target makes up, question and answer."""
    question_tokens: int = 96
    """Of a question made up; longer ones are dropped."""
    answer_tokens: int = 256
    """Of an answer; longer ones are cut."""
    target: str = "smollm2-135m-instruct"
    """The model to draft for: a name, a directory, a .gguf file or a Hub model."""
    length: int = 768
    """Tokens of a row; conversations are packed into rows."""
    overlong: Literal["cut", "drop"] = "cut"
    """What happens to conversations longer than a row."""
    held_out: int = 24
    """Conversations kept out of training, whose prompts measure tokens per call."""
    held_out_tokens: int = 96
    """New tokens a held-out prompt."""
    epochs: float = 1.0
    """How often the data is gone through."""
    batch_size: int = 4
    """Rows of a step."""
    accumulation: int = 1
    """Micro-batches of a step: less memory, the same gradient."""
    evaluate_every: int = 0
    """Steps between measurements of tokens per call by the engine; 0: at the end only."""
    save_every: int = 50
    """Steps between checkpoints."""
    optimization: Annotated[Optimization, tyro.conf.arg(name="")] = Optimization()
    features: Literal["stored", "online"] = "stored"
    """Whether the target's features are computed once and kept on disk, or in every step."""
    features_directory: Path | None = None
    """Where stored features are, if not in the output; runs over the same data can share them."""
    features_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of stored features."""
    features_budget: float = 20.0
    """The most that stored features may take, in GiB."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the drafter's training step; its parameters are float32. By itself bfloat16 where the device is faster with
    it."""
    target_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the target while training; tokens per call are measured in it too."""
    mesh: str | None = None
    """Devices, such as data=4,fsdp=2; None: the default device."""
    seed: int = 0
    """Of the order of the data and of random starting weights."""
    tensorboard: bool = False
    """Also write metrics for TensorBoard."""
    wandb: str | None = None
    """Also send metrics to this Weights & Biases project."""

    def __post_init__(self) -> None:
        check_whole("held_out", self.held_out, 1)
        check_whole("held_out_tokens", self.held_out_tokens, 1)
        if not self.epochs > 0:
            raise InputError(f"epochs is {self.epochs}; expected a number above 0")


@dataclass(frozen=True, eq=False)
class Session:
    """A plan with its target and data at hand.

    Attributes:
        rendered: the conversations to learn from.
        rows: the same in rows.
        prompts: those of the conversations that were held out.
    """

    plan: Plan
    target: Target
    rendered: tuple[Rendered, ...]
    rows: Rows
    prompts: tuple[tuple[int, ...], ...]
    console: Console

    @classmethod
    def open(cls, plan: Plan, console: Console | None = None) -> "Session":
        """Load the target, render the data, hold some of it out.

        Raises:
            InputError: data that cannot be read, or too little of it.
        """
        console = console or Console(highlight=False, soft_wrap=True)
        if plan.output.exists() and not plan.output.is_dir():
            raise InputError(f"--output {plan.output}: expected a directory, or a name for one, and that is a file")
        target = load(plan.target, dtype=plan.target_dtype, mesh=parse_mesh(plan.mesh) if plan.mesh else None)
        data = plan.data or (_make_up(plan, target, console),)
        rendered = Renderer.of(target).render_all(read_conversations(*data))
        learned, held = hold_out(rendered, plan.held_out)
        rows = lay_out(learned, plan.length, plan.overlong)
        console.print(f"{rows.report}; {len(held)} held out")
        return cls(plan, target, tuple(learned), rows, tuple(held), console)

    @cached_property
    def capacity(self) -> int:
        """Most supervised tokens of a row."""
        return room(self.rows)

    @property
    def steps(self) -> int:
        return max(round(self.plan.epochs * steps_per_epoch(self.rows, self.plan.batch_size)), 1)

    def frequent_tokens(self, count: int) -> Int[np.ndarray, "Vd"]:
        """The supervised tokens that are most frequent in the training data, ascending: a draft vocabulary.

        Where fewer have been seen, the lowest ids fill it up.
        """
        size = self.target.model.vocab_size
        if not 0 < count <= size:
            raise InputError(f"draft vocabulary of {count} tokens: expected 1 to the target's {size}")
        seen = np.bincount(self.rows.tokens[self.rows.mask], minlength=size)
        return np.sort(np.argsort(-seen, kind="stable")[:count])

    @cached_property
    def held_out(self) -> HeldOut:
        self.console.print(f"the target answers {len(self.prompts)} held-out prompts")
        return HeldOut.of(self.target, [list(p) for p in self.prompts], self.plan.held_out_tokens)

    def evaluate(self, objective: Any, network: nnx.Module) -> dict[str, float]:
        """Tokens per call over the held-out prompts: by the engine, and teacher-forced where the draft is a chain."""
        found: dict[str, float] = {}
        if (chain := objective.chain_length) is not None:
            found["teacher_forced"] = self.held_out.teacher_forced(objective, network, chain)
        if not getattr(objective, "decodes", True):
            return found | {"tokens_per_call": found["teacher_forced"]}
        stats = self.held_out.decode(objective, network)
        return found | {
            "tokens_per_call": stats.tokens_per_call or 0.0,
            "acceptance_rate": stats.acceptance_rate or 0.0,
        }

    def learn(self, objective: Any, network: nnx.Module, described: Mapping[str, Any] | None = None) -> Outcome:
        """Train as planned, or go on with it; says tokens per call before and after."""
        p = self.plan
        run = Run(
            p.output,
            self.steps,
            p.batch_size,
            p.accumulation,
            evaluate_every=p.evaluate_every,
            save_every=p.save_every,
            seed=p.seed,
            mesh=p.mesh,
            compute_dtype=likely_dtype() if p.compute_dtype == "auto" else p.compute_dtype,
        )
        features_of = self.stored(objective) if p.features == "stored" and objective.features else None
        if not Checkpoints.begun(p.output):
            before = self.evaluate(objective, network)["tokens_per_call"]
            self.console.print(f"tokens per call before training: {before:.3f}; {self.steps} steps")
        outcome = train(
            objective,
            network,
            self.target,
            self.rows,
            run,
            p.optimization,
            features_of=features_of,
            evaluate=lambda network: self.evaluate(objective, network),
            sinks=self._sinks,
            described=described,
        )
        if outcome.finished:
            after = self.evaluate(objective, outcome.network)["tokens_per_call"]
            self.console.print(f"tokens per call after training: {after:.3f}")
        return outcome

    def best_tree(
        self, objective: Any, network: Any, depth: int, num_nodes: int, target: Target | None = None, ranks: int = 10
    ) -> StaticTree:
        """The static tree of `num_nodes` nodes that accuracies over the held-out prompts make best.

        Args:
            target: if training changed it.
        """
        held_out = self.held_out if target is None else self.held_out.answered_by(target)
        accuracies = held_out.rank_accuracies(objective, network, depth, ranks)
        return best_tree(accuracies.tolist(), num_nodes)

    def save(self, drafter: Any, outcome: Outcome, target: Target | None = None, dtype: str | None = None) -> None:
        """Write the drafter to OUTPUT/drafter, with what it was trained on; say what it gives there.

        The figures are those of what was written, read again: rounded, and with its own tree.

        Args:
            target: the one that was trained with it, if it was; it is written to OUTPUT/target.
            dtype: of the drafter's file; None for float32.
        """
        if target is not None:
            whole: Any = DraftModel(cast(Any, target))
            save_drafter(self.plan.output / "target", whole, target, format="huggingface")
            self.console.print(f"{self.plan.output / 'target'}: the target as it is now; the drafter is for this one")
        target = target or self.target
        p, folder = self.plan, self.plan.output / "drafter"
        training: dict[str, Any] = {
            "settings": json.loads(json.dumps(asdict(p), default=str)),
            "data": str(self.rows.report),
            "rows": self.rows.fingerprint,
            "steps": outcome.step,
            "supervised_tokens_seen": round(outcome.step / steps_per_epoch(self.rows, p.batch_size) * self.supervised),
        }
        save_drafter(folder, drafter, target, dtype=dtype, training=training)
        stats = self.held_out.decode_with(load_drafter(folder, target), target)
        training["figures"] = {
            "held-out prompts": len(self.prompts),
            "new tokens": stats.new_tokens,
            "tokens per call": stats.tokens_per_call,
            "acceptance rate": stats.acceptance_rate,
        }
        save_drafter(folder, drafter, target, dtype=dtype, training=training)
        shape = "chain" if getattr(drafter, "tree", None) is None or drafter.max_depth == drafter.num_nodes else "tree"
        self.console.print(
            f"{folder}: {stats.tokens_per_call:.3f} tokens per call on held-out prompts, with a {shape} of "
            f"{drafter.num_nodes} nodes"
        )

    @property
    def supervised(self) -> int:
        return self.rows.report.supervised

    def stored(self, objective: Any) -> Stored:
        """The features that the objective wants, computed as far as they are missing."""
        p = self.plan
        with _bar("features") as advance:
            return store(
                self.target.model,
                self.rows,
                objective.features,
                p.features_directory or p.output / "features",
                self.target.weights_hash,
                p.features_dtype,
                budget_bytes=int(p.features_budget * 2**30),
                progress=advance,
            )

    def _sinks(self, resumed: int, configuration: Mapping[str, Any]) -> tuple[Sink, ...]:
        sinks: list[Sink] = []
        if self.plan.tensorboard:
            sinks.append(TensorBoard(self.plan.output, resumed))
        if self.plan.wandb:
            sinks.append(WeightsAndBiases(self.plan.output, self.plan.wandb, configuration))
        return tuple(sinks)


def hold_out(rendered: list[Rendered], count: int) -> tuple[list[Rendered], list[tuple[int, ...]]]:
    """Keep `count` conversations out, evenly spread over the data: the rest, and the prompts of those.

    A prompt is what stands before the first supervised token. Conversations whose prompt was kept out are kept out too,
    so that no prompt that is measured on has been learned.
    """
    if len(rendered) < 2 * count:
        raise InputError(
            f"{len(rendered)} conversations, of which {count} would be held out: expected at least twice as many; "
            "give more data, or hold out fewer (--held-out)"
        )
    prompts = [tuple(r.ids[: int(np.argmax(r.mask))].tolist()) for r in rendered]
    places = np.linspace(0, len(rendered) - 1, count).astype(int)
    held = list(dict.fromkeys(prompts[i] for i in places if prompts[i]))
    if not held:
        raise InputError("held-out conversations have no prompt (plain text?); give conversations with a user's turn")
    kept = set(held)
    return [r for r, prompt in zip(rendered, prompts, strict=True) if prompt not in kept], held


def parse(kind: type[P], description: str | None, full: Mapping[str, Any]) -> P:
    """A script's settings from the command line; `full` are what the preset of that name changes."""
    preset = tyro.cli(_Preset, return_unknown_args=True, add_help=False)[0].preset
    return tyro.cli(kind, description=description, default=kind(preset="full", **full) if preset == "full" else kind())


@dataclass(frozen=True)
class _Preset:
    preset: Literal["quick", "full"] = "quick"


def _make_up(plan: Plan, target: Target, console: Console) -> Path:
    """Let the target write questions and answers into OUTPUT/data, as far as they are not there yet."""
    folder, wanted = plan.output / "data", FromNothing(plan.questions)
    recipe = Recipe(max_new_tokens=plan.answer_tokens, question_tokens=plan.question_tokens, seed=plan.seed)
    console.print(f"no data given: {target.name} makes up {plan.questions} conversations")
    total = num_texts(wanted)
    with _bar("texts") as advance:
        done = 0

        def count(texts: int, tokens: int | None) -> None:
            nonlocal done
            done += texts
            advance(done, total)

        totals = synthesize(target, wanted, recipe, folder, progress=count).totals()
    dropped = ", ".join(f"{number} {why}" for why, number in totals["dropped"].items())
    console.print(f"{totals['rows']} of them are of use" + (f" (dropped: {dropped})" if dropped else ""))
    return folder


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Progress with the time left, told how many of how many are done."""
    with Bar(
        bars.TextColumn(what), bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeRemainingColumn()
    ) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
