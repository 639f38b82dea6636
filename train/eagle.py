"""Trains an EAGLE drafter.

    python train/eagle.py                                        # EAGLE-3, on conversations that the target makes up
    python train/eagle.py --data conversations.jsonl --output runs/eagle3
    python train/eagle.py --version 1 --data conversations.jsonl

Started again with the same output directory it goes on where it was. In the end the drafter is in OUTPUT/drafter, where
`python experiments/eval.py --drafters eagle:OUTPUT/drafter` and serving engines load it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from specjax.cli import run_command_line
from specjax.drafters.eagle import Eagle
from specjax.drafters.eagle_config import Eagle3Config, EagleConfig, default_layers
from specjax.drafters.eagle_networks import Eagle3Network, EagleNetwork
from specjax.training.eagle import Eagle3Objective, EagleObjective
from specjax.training.optimizers import Optimization
from specjax.training.session import FULL, Plan, Session, parse
from specjax.trees import chain_tree


@dataclass(frozen=True)
class Settings(Plan):
    """Train an EAGLE drafter, and measure it by decoding."""

    output: Path = Path("runs/eagle")
    version: Literal[1, 3] = 3
    """EAGLE-1 (whose weights are EAGLE-2's) or EAGLE-3."""
    draft_vocab_size: int = 8192
    """Tokens that EAGLE-3 can draft: the most frequent ones of the training data. For EAGLE-1, those its token loss is
    taken over."""
    unroll: int | None = None
    """Steps of the training-time test; by default 3 for EAGLE-3 and 1 for EAGLE-1."""
    shifted: bool = True
    """EAGLE-1: pair each feature with the token after it. --no-shifted is a comparison: it is scored, not decoded."""
    num_draft_tokens: int = 5
    """Length of the chain that is drafted."""
    epochs: float = 2.0
    """How often the data is gone through."""
    optimization: Annotated[Optimization, tyro.conf.arg(name="")] = Optimization(
        optimizer="muon", learning_rate=2e-3, warmup=0.03
    )


def main(settings: Settings) -> None:
    session = Session.open(settings)
    model, tree = session.target.model, chain_tree(settings.num_draft_tokens)
    tokens = session.frequent_tokens(settings.draft_vocab_size)
    objective: Any
    network: Any
    if settings.version == 3:
        layers = default_layers(model.config.num_layers)
        objective = Eagle3Objective(settings.unroll or 3, capacity=session.capacity, feature_layers=layers, tree=tree)
        network = Eagle3Network.start(Eagle3Config.of(model.config, len(tokens)), model, tokens, settings.seed)
    else:
        objective = EagleObjective(
            settings.unroll or 1,
            vocabulary=tuple(tokens.tolist()),
            shifted=settings.shifted,
            capacity=session.capacity,
            tree=tree,
        )
        network = EagleNetwork.start(EagleConfig.of(model.config), model, settings.seed)
    if (outcome := session.learn(objective, network)).finished and settings.shifted:
        session.save(Eagle(outcome.network, tree), outcome)


if __name__ == "__main__":
    run_command_line(lambda: main(parse(Settings, __doc__, FULL)))
