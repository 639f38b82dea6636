"""Trains Medusa heads.

    python train/medusa.py                                       # on conversations that the target makes up
    python train/medusa.py --data conversations.jsonl --output runs/medusa

Started again with the same output directory it goes on where it was. In the end the drafter is in OUTPUT/drafter, with
the static tree that accuracies over the held-out prompts make best.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from specjax.cli import run_command_line
from specjax.drafters.medusa import Medusa, MedusaConfig, MedusaHeads
from specjax.training.medusa import MedusaObjective
from specjax.training.medusa_joint import HeadsAndTarget, JointMedusaObjective
from specjax.training.optimizers import Optimization
from specjax.training.session import FULL, Plan, Session, parse
from specjax.trees import chain_tree


@dataclass(frozen=True)
class Settings(Plan):
    """Train Medusa heads, and measure them by decoding."""

    output: Path = Path("runs/medusa")
    heads: int = 4
    """Tokens guessed after the pending one."""
    layers: int = 1
    """Residual blocks of a head."""
    own_head: bool = False
    """A linear map to the vocabulary for each head, instead of the target's shared by all."""
    draft_vocab_size: int = 8192
    """Tokens that can be drafted: the most frequent ones of the training data."""
    joint: bool = False
    """Medusa-2: train the target too. It becomes another model, which is saved to OUTPUT/target."""
    tree_nodes: int = 26
    """Nodes of the drafter's tree."""
    epochs: float = 2.0
    """How often the data is gone through."""
    optimization: Annotated[Optimization, tyro.conf.arg(name="")] = Optimization(learning_rate=1e-3, warmup=0.1)


def main(settings: Settings) -> None:
    session = Session.open(settings)
    model = session.target.model
    tokens = session.frequent_tokens(settings.draft_vocab_size)
    config = MedusaConfig(
        model.config.hidden_size,
        model.vocab_size,
        settings.heads,
        settings.layers,
        shared_head=not settings.own_head,
        draft_vocab_size=len(tokens),
    )
    alone = MedusaObjective(capacity=session.capacity, tree=chain_tree(settings.heads))
    heads = MedusaHeads.start(config, model, tokens=tokens)
    if not settings.joint:
        if (outcome := session.learn(alone, heads)).finished:
            tree = session.best_tree(alone, outcome.network, settings.heads, settings.tree_nodes)
            session.save(Medusa(outcome.network, tree), outcome)
        return
    joint = JointMedusaObjective(capacity=session.capacity, tree=alone.tree)
    if (outcome := session.learn(joint, HeadsAndTarget(heads, model))).finished:
        drafter, target = joint.decoding(outcome.network, session.target)
        tree = session.best_tree(alone, drafter.heads, settings.heads, settings.tree_nodes, target)
        session.save(Medusa(drafter.heads, tree), outcome, target)


if __name__ == "__main__":
    run_command_line(lambda: main(parse(Settings, __doc__, FULL)))
