"""Trains an EAGLE drafter.

    python train/eagle.py                                        # EAGLE-3; needs no data: the target writes some
    python train/eagle.py --data conversations.jsonl --output runs/eagle3
    python train/eagle.py --version 1 --data conversations.jsonl

Started again with the same output directory it goes on where it was. In the end the drafter is in OUTPUT/drafter, where
`experiments/eval.py --drafters eagle3:OUTPUT/drafter` and serving engines load it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from specjax.cli import run_command_line
from specjax.drafters.eagle_config import Eagle3Config, EagleConfig, default_layers
from specjax.drafters.eagle_networks import Eagle3Network, EagleNetwork
from specjax.training.eagle import Eagle3Objective, EagleObjective
from specjax.training.optimizers import Optimization
from specjax.training.session import Plan, Session
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
    num_draft_tokens: int = 5
    """Length of the chain that is measured while training."""
    batch_size: int = 8
    optimization: Annotated[Optimization, tyro.conf.arg(name="")] = Optimization(
        optimizer="muon", learning_rate=1e-3, warmup=20, clip=1.0
    )


def main(settings: Settings) -> None:
    session = Session.open(settings)
    model, tree = session.target.model, chain_tree(settings.num_draft_tokens)
    tokens = session.frequent_tokens(settings.draft_vocab_size)
    if settings.version == 3:
        layers = default_layers(model.config.num_layers)
        objective = Eagle3Objective(settings.unroll or 3, capacity=session.capacity, feature_layers=layers, tree=tree)
        config = Eagle3Config.of(model.config, len(tokens))
        network = Eagle3Network.start(config, model, tokens, settings.seed)
    else:
        objective = EagleObjective(
            settings.unroll or 1, vocabulary=tuple(tokens.tolist()), capacity=session.capacity, tree=tree
        )
        network = EagleNetwork.start(EagleConfig.of(model.config), model, settings.seed)
    session.learn(objective, network)


if __name__ == "__main__":
    run_command_line(lambda: main(tyro.cli(Settings, description=__doc__)))
