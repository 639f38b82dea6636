"""Trains MTP modules on a frozen target.

    python train/mtp.py                                          # one module, on conversations that the target makes up
    python train/mtp.py --data conversations.jsonl --output runs/mtp
    python train/mtp.py --modules 3 --num-draft-tokens 3         # DeepSeek-V3's form: a module for each token ahead

Started again with the same output directory it goes on where it was. In the end the drafter is in OUTPUT/drafter, where
`python experiments/eval.py --drafters mtp:OUTPUT/drafter` loads it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from specjax.cli import run_command_line
from specjax.drafters.mtp import Mtp, MtpConfig, MtpNetwork
from specjax.training.mtp import MtpObjective
from specjax.training.optimizers import Optimization
from specjax.training.session import FULL, Plan, Session, parse
from specjax.trees import chain_tree


@dataclass(frozen=True)
class Settings(Plan):
    """Train MTP modules, and measure them by decoding."""

    output: Path = Path("runs/mtp")
    modules: int = 1
    """Modules in the chain. Tokens further ahead than there are modules come from the last one again."""
    num_draft_tokens: int = 4
    """Length of the chain that is drafted, and of the one that is trained."""
    first: Literal["hidden", "embedding"] = "hidden"
    """What a module's projection reads first, as part of its configuration: the hidden state or the embedding."""
    soft: bool = True
    """Learn the target's law of each token; --no-soft learns the token alone."""
    draft_vocab_size: int = 8192
    """Tokens that can be drafted: the most frequent ones of the training data."""
    epochs: float = 2.0
    """How often the data is gone through."""
    optimization: Annotated[Optimization, tyro.conf.arg(name="")] = Optimization(
        optimizer="muon", learning_rate=2e-3, warmup=0.03
    )


def main(settings: Settings) -> None:
    session = Session.open(settings)
    model, tree = session.target.model, chain_tree(settings.num_draft_tokens)
    tokens = session.frequent_tokens(settings.draft_vocab_size)
    config = MtpConfig.of(
        model.config, settings.modules, hidden_first=settings.first == "hidden", draft_vocab_size=len(tokens)
    )
    objective = MtpObjective(
        settings.num_draft_tokens, soft=settings.soft, capacity=session.capacity, feature=config.feature, tree=tree
    )
    network = MtpNetwork.start(config, model, tokens, settings.seed)
    if (outcome := session.learn(objective, network)).finished:
        trained: Any = outcome.network
        session.save(Mtp(trained, tree), outcome)


if __name__ == "__main__":
    run_command_line(lambda: main(parse(Settings, __doc__, FULL)))
