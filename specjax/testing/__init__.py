"""What the tests of specjax are made of, for your own drafters and laws too: models whose law is known, drafters whose
behaviour is known, and the test that a sampled text follows the target's law.

    target = testing.tiny_target(testing.TableModel.random(vocab_size=4))
    result = testing.law_test(target, MyDrafter())
    assert result.passed, result
"""

from specjax.testing.drafters import Adversarial, Idle, Oracle, Prober, Replaced, Replay, Stateless, TableTree
from specjax.testing.exact import exact_law, reference_law
from specjax.testing.law import LawResult, law_test
from specjax.testing.models import FAMILIES, TableModel, tiny_config, tiny_model, tiny_target
from specjax.testing.tokenizer import TinyTokenizer

__all__ = [
    "FAMILIES",
    "Adversarial",
    "Idle",
    "LawResult",
    "Oracle",
    "Prober",
    "Replaced",
    "Replay",
    "Stateless",
    "TableModel",
    "TableTree",
    "TinyTokenizer",
    "exact_law",
    "law_test",
    "reference_law",
    "tiny_config",
    "tiny_model",
    "tiny_target",
]
