"""Distils a draft model: some of the target's own layers, trained to say what the target would say.

    python train/draft_model.py                                  # on conversations that the target makes up
    python train/draft_model.py --data conversations.jsonl --layers 0 29 --output runs/draft

Started again with the same output directory it goes on where it was. In the end the drafter is in OUTPUT/drafter.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from specjax.cli import run_command_line
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.small_decoder import SmallDecoder
from specjax.training.distillation import Distillation
from specjax.training.optimizers import Optimization
from specjax.training.session import FULL, Plan, Session, parse


@dataclass(frozen=True)
class Settings(Plan):
    """Distil a draft model, and measure it by decoding."""

    output: Path = Path("runs/draft-model")
    layers: tuple[int, ...] = (0, 14, 29)
    """Layers of the target that it starts from, by their numbers there."""
    draft_vocab_size: int | None = 8192
    """Tokens that can be drafted: the most frequent ones of the training data; None: all."""
    divergence: Literal["forward-kl", "reverse-kl", "tvd", "labels"] = "forward-kl"
    """Between the target's law and the draft model's."""
    num_draft_tokens: int = 4
    """Length of the chain that is drafted."""
    epochs: float = 2.0
    """How often the data is gone through."""
    optimization: Annotated[Optimization, tyro.conf.arg(name="")] = Optimization(
        optimizer="muon", learning_rate=2e-3, warmup=0.03
    )


def main(settings: Settings) -> None:
    session = Session.open(settings)
    size = settings.draft_vocab_size
    tokens = None if size is None else session.frequent_tokens(size)
    objective = Distillation(settings.divergence, capacity=session.capacity, num_draft_tokens=settings.num_draft_tokens)
    network: Any = SmallDecoder.start(session.target.model, settings.layers, tokens)
    if (outcome := session.learn(objective, network)).finished:
        trained: Any = outcome.network
        session.save(DraftModel(trained, settings.num_draft_tokens), outcome)


if __name__ == "__main__":
    run_command_line(lambda: main(parse(Settings, __doc__, FULL)))
