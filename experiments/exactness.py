"""Whether sampled texts follow the target's own law: the law test for drafters, laws and settings, and laws on tables.

    python experiments/exactness.py --output results/exactness
    python experiments/exactness.py --samples 1000000 --laws rejection block --output results/exactness

A target whose law can be written down, four tokens and a table of logits, is decoded hundreds of thousands of times;
the joint law of the first three tokens is compared with the exact one. The distance is half the sum of all errors
(total variation). Beside it stands the noise: what texts drawn from the exact law itself show, mean plus five standard
deviations. Expect every lossless law below its noise in every row, at about a half of it, and ever smaller distances
with more samples, as 1 / √samples. Typical acceptance is lossy: expect it far above, wherever drafts are drawn or
guessed that the target would not say as often.

The simulations do the same with laws over one token, which can be looked at: right ones, and the mistakes that are
easily made (a temperature that the drafter's law is told without, or that only one side gets). Expect the right ones
within noise whatever the drafter says, only slower with a bad one; and the mistakes beside the exact law by what
`theory.output_law` says.

The first command takes minutes on two CPU cores; exit status 1 says that a lossless law has failed.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from common import plots
from common.console import make_table, number, percent, progress_bar, show
from common.options import check_least, check_seed, check_some, settings_of
from common.results import check_output, provenance, write_json
from rich.table import Table

import specjax
from specjax import InputError, Sampling, Target, simulate, testing, theory
from specjax.cli import run_command_line
from specjax.requests import LAWS
from specjax.simulate import Simulation
from specjax.testing import TableModel, TableTree

SIZE = 4  # tokens of the target
PROMPTS = [[1, 0, 2, 1, 0, 2, 1, 0], [3, 1, 3]]
SETTINGS = {
    "temperature 0.8": Sampling(temperature=0.8),
    "all filters and penalties": Sampling(
        temperature=[0.8, 1.2],
        top_k=3,
        top_p=[0.95, 0.9],
        min_p=0.05,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.2,
    ),
    "a greedy and a drawn row": Sampling(temperature=[0.0, 1.0], top_p=0.9),
}
DRAFTERS: dict[str, Callable[[], Any]] = {
    "plain": specjax.Plain,
    "prompt lookup": lambda: specjax.PromptLookup(3, max_ngram=3, min_ngram=1),
    "suffix": lambda: specjax.SuffixDecoding(3, min_match=1),
    "draft model": lambda: specjax.DraftModel(TableModel.random(SIZE, seed=1), 2),
    "draft model, its best": lambda: specjax.DraftModel(TableModel.random(SIZE, seed=1), 2, sample=False),
    "drawn tree": lambda: TableTree.random(SIZE, 2, "ss"),
    "deterministic tree": lambda: TableTree.random(SIZE, 2, "dd"),
    "mixed tree": lambda: TableTree.random(SIZE, 1, "ds"),
}
DEFINITIONS = {
    "distance": "total variation between the law of what was drawn and the exact one; of several prompts the worst",
    "noise": "the distance that sampling explains: mean plus five standard deviations of as many exact draws",
    "passed": "the distance is no more than noise",
    "lossless": "whether it should be",
    "crossed": "share of the texts that took more than one round",
    "acceptance_rate": "accepted / proposed draft tokens",
    "alpha": "accepted / tested draft tokens of the simulation, beside 1 - total variation of p and q (`theory`)",
}
# laws over one token: the target's, a drafter's that is near, and one's that is nearly the other way round
P = (0.5, 0.25, 0.15, 0.07, 0.03)
NEAR = (0.4, 0.3, 0.15, 0.1, 0.05)
FAR = (0.03, 0.07, 0.15, 0.25, 0.5)
TEMPERATURE = 0.5


@dataclass(frozen=True)
class Options:
    """Run the law test over drafters, laws and settings, and simulate laws over one token.

    Attributes:
        samples: texts of each law test and of each simulation.
        drafters: only these.
        laws: acceptance laws; typical is lossy.
        settings: only these.
        seed: of all draws.
        output: directory for exactness.json, law_tests.png and simulations.png.
    """

    samples: int = 100_000
    drafters: tuple[str, ...] = tuple(DRAFTERS)
    laws: tuple[str, ...] = ("rejection", "block", "typical")
    settings: tuple[str, ...] = tuple(SETTINGS)
    seed: int = 0
    output: Path | None = None

    def check(self) -> None:
        check_some(self, "drafters", "laws", "settings")
        check_least(self, samples=1)
        check_seed(self.seed)
        sampled = [name for name in LAWS if name != "greedy"]
        for option, known in (("drafters", list(DRAFTERS)), ("laws", sampled), ("settings", list(SETTINGS))):
            for name in getattr(self, option):
                if name not in known:
                    raise InputError(f"--{option}: unknown {name!r}; expected some of {', '.join(map(repr, known))}")


@dataclass(frozen=True)
class Tested:
    """One law test; see `DEFINITIONS`."""

    drafter: str
    law: str
    settings: str
    lossless: bool
    distance: float
    noise: float
    passed: bool
    samples: int
    crossed: float
    acceptance_rate: float | None


@dataclass(frozen=True)
class Simulated:
    """One simulation; see `DEFINITIONS`.

    Attributes:
        right: whether its law should be the target's.
        drawn: what was simulated.
        alpha: what `theory` says that is accepted; None where its formula does not apply.
        output: the law that `theory.output_law` says for a wrong one; None where it does not apply.
    """

    name: str
    right: bool
    drawn: Simulation
    alpha: float | None = None
    output: np.ndarray | None = None


def main() -> int:
    options = tyro.cli(Options)
    begin = time.perf_counter()
    options.check()
    check_output(options.output)
    target = testing.tiny_target(TableModel.random(SIZE), name=f"a table of {SIZE} tokens")
    with progress_bar() as bar:
        number_of_tests = len(options.drafters) * len(options.laws) * len(options.settings)
        work = bar.add_task("law tests", total=number_of_tests + 1)
        tested = law_tests(target, options, lambda: bar.advance(work))
        bar.update(work, description="simulations")
        simulated = simulations(options.samples, options.seed)
        bar.advance(work)
    seconds = time.perf_counter() - begin
    show(*report(tested, simulated))
    show(f"{seconds:.0f} s in all.")
    if options.output is not None:
        content = {
            "provenance": provenance(target, total_seconds=seconds),
            "settings": settings_of(options),
            "definitions": DEFINITIONS,
            "law_tests": [asdict(t) for t in tested],
            "simulations": [as_data(s) for s in simulated],
        }
        write_json(options.output / "exactness.json", content)
        plots.save(draw_tests(tested), options.output / "law_tests.png")
        plots.save(draw_simulations(simulated), options.output / "simulations.png")
        show(f"Written to {options.output}.")
    failed = [f"{t.drafter}, {t.law}, {t.settings}" for t in tested if t.lossless and not t.passed]
    failed += [s.name for s in simulated if s.right and not s.drawn.passed]
    for name in failed:
        print(f"FAULT: {name}: not the target's own law", file=sys.stderr)
    return 1 if failed else 0


def law_tests(target: Target, options: Options, done: Callable[[], None]) -> list[Tested]:
    """Every drafter under every law and setting."""
    tested = []
    for name in options.drafters:
        drafter = DRAFTERS[name]()
        for law in options.laws:
            for settings in options.settings:
                result = testing.law_test(
                    target,
                    drafter,
                    law=law,
                    sampling=SETTINGS[settings],
                    prompts=PROMPTS,
                    samples=options.samples,
                    seed=options.seed,
                )
                lossless = LAWS[law].lossless or drafter.num_nodes == 0
                found = Tested(
                    drafter=name,
                    law=law,
                    settings=settings,
                    lossless=lossless,
                    distance=result.distance,
                    noise=result.noise,
                    passed=result.passed,
                    samples=result.samples,
                    crossed=result.crossed,
                    acceptance_rate=result.acceptance_rate,
                )
                tested.append(found)
                done()
    return tested


def simulations(runs: int, seed: int) -> list[Simulated]:
    """Right laws with a near and a far drafter, a lossy one, and a temperature that is not applied to both sides."""
    found = []
    for name, q, law in (
        ("rejection, a near drafter", NEAR, "rejection"),
        ("rejection, a far drafter", FAR, "rejection"),
        ("block verification, a far drafter", FAR, "block"),
        ("typical acceptance, a far drafter", FAR, "typical"),
    ):
        drawn = simulate.texts(P, q, num_draft_tokens=3, runs=runs, law=law, seed=seed)
        alpha = float(theory.acceptance(P, q)) if law == "rejection" else None
        found.append(Simulated(name, LAWS[law].lossless, drawn, alpha))
    cold_p, cold_q = (simulate.tempered(law, TEMPERATURE) for law in (P, NEAR))
    wrong = {
        "q claimed untempered": theory.output_law(cold_p, cold_q, NEAR),
        "p untempered": theory.output_law(P, cold_q),
    }
    for name, drawn in simulate.mismatch(P, NEAR, TEMPERATURE, runs=runs, seed=seed).items():
        found.append(Simulated(f"temperature {TEMPERATURE}: {name}", name not in wrong, drawn, output=wrong.get(name)))
    return found


def as_data(s: Simulated) -> dict[str, Any]:
    return {
        "name": s.name,
        "right": s.right,
        "law": s.drawn.law.tolist(),
        "exact": s.drawn.exact.tolist(),
        "predicted": None if s.output is None else s.output.tolist(),
        "distance": s.drawn.distance,
        "noise": s.drawn.noise,
        "passed": s.drawn.passed,
        "alpha": s.drawn.alpha,
        "predicted_alpha": s.alpha,
        "tokens_per_call": s.drawn.tokens_per_call,
        "runs": s.drawn.runs,
    }


def report(tested: Sequence[Tested], simulated: Sequence[Simulated]) -> list[Table | str]:
    """Two tables, and what their columns mean."""
    rows: list[list[str] | None] = []
    for i, t in enumerate(tested):
        if i and tested[i - 1].drafter != t.drafter:
            rows.append(None)
        distances = [number(t.distance, 5), number(t.noise, 5), number(t.distance / t.noise)]
        counted = [percent(t.crossed), percent(t.acceptance_rate)]
        rows.append([t.drafter, t.law, t.settings, *distances, *counted, verdict(t.lossless, t.passed)])
    columns = ("drafter", "law", "settings", "distance", "noise", "ratio", "crossed", "accepted", "")
    samples = tested[0].samples
    tables: list[Table | str] = [
        make_table(f"Law tests: three tokens of {SIZE}, {samples} texts each", columns, rows, text=(0, 1, 2, 8))
    ]
    rows = []
    for s in simulated:
        d = s.drawn
        distances = [number(d.distance, 5), number(d.noise, 5), number(d.distance / d.noise)]
        more = [number(d.alpha), number(s.alpha), number(d.tokens_per_call), verdict(s.right, d.passed)]
        rows.append([s.name, *distances, *more])
    simulated_columns = ("simulated", "distance", "noise", "ratio", "α", "theory", "tokens/call", "")
    return [
        *tables,
        make_table(
            f"Laws over one of {len(P)} tokens, {simulated[0].drawn.runs} texts each", simulated_columns, rows, (0, 7)
        ),
        f"distance: {DEFINITIONS['distance']}. noise: {DEFINITIONS['noise']}.",
        f"crossed: {DEFINITIONS['crossed']}. accepted: {DEFINITIONS['acceptance_rate']}. α: {DEFINITIONS['alpha']}.",
        "exact: the distance is no more than noise, as it should be. other law: a lossy law, or a mistake, and seen to "
        "be one; not seen: there are too few texts to tell, or the drafts leave nothing to differ in.",
    ]


def verdict(right: bool, passed: bool) -> str:
    """What a distance says of a law that should, or should not, be the target's."""
    if right:
        return "exact" if passed else "FAULT"
    return "other law (not seen)" if passed else "other law"


def draw_tests(tested: Sequence[Tested]) -> Any:
    """Distances relative to the noise, a panel a setting, a line a drafter, a colour a law."""
    settings, laws, drafters = (
        list(dict.fromkeys(getattr(t, f) for t in tested)) for f in ("settings", "law", "drafter")
    )
    title = "Distance / noise; right of the line: another law"
    figure, axes = plots.panels(1, len(settings), title, 3.0, 0.6 + 0.3 * len(drafters))
    for column, name in enumerate(settings):
        axis = axes[0][column]
        for t in (t for t in tested if t.settings == name):
            place = drafters.index(t.drafter) + 0.16 * (laws.index(t.law) - (len(laws) - 1) / 2)
            axis.plot(max(t.distance / t.noise, 1e-2), place, "o", color=plots.colour(laws.index(t.law)), markersize=4)
        axis.axvline(1, color="0.4", linewidth=0.7)
        axis.set_xscale("log")
        axis.set_ylim(len(drafters) - 0.5, -0.5)
        axis.set_yticks(range(len(drafters)), drafters if column == 0 else [""] * len(drafters))
        plots.label(axis, name, "distance / noise")
    plots.legend(figure, laws)
    return figure


def draw_simulations(simulated: Sequence[Simulated]) -> Any:
    """Each simulated law beside the exact one, and the one that is predicted for a mistake."""
    columns = 4
    figure, axes = plots.panels(-(-len(simulated) // columns), columns, "Laws over one token", 2.6, 2.1)
    for axis in axes.flat[len(simulated) :]:
        axis.set_visible(False)
    for axis, s in zip(axes.flat, simulated, strict=False):
        places = np.arange(len(s.drawn.law))
        axis.bar(places - 0.2, s.drawn.exact, 0.38, color=plots.colour(0))
        axis.bar(places + 0.2, s.drawn.law, 0.38, color=plots.colour(1))
        if s.output is not None:
            axis.plot(places + 0.2, s.output, "x", color=plots.colour(6), markersize=4)
        axis.set_xticks(places)
        ratio = f"{verdict(s.right, s.drawn.passed)}: {s.drawn.distance / s.drawn.noise:.2f} × noise"
        plots.label(axis, f"{s.name}\n{ratio}", "token")
    plots.legend(figure, ["exact", "simulated"], [("crosses", "theory.output_law")])
    return figure


if __name__ == "__main__":
    run_command_line(main)
