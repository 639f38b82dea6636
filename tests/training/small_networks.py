"""Random networks for a random target of few tokens, so that they are right now and then."""

from specjax import testing
from specjax.drafters.eagle_config import Eagle3Config, EagleConfig
from specjax.drafters.eagle_networks import Eagle3Network, EagleNetwork
from specjax.drafters.medusa import MedusaConfig, MedusaHeads
from specjax.drafters.mtp import MtpConfig, MtpNetwork
from specjax.drafters.vocabulary import offsets

V, WORDS = 12, [1, 2, 4, 6, 9, 11]
LAYERS = (0, 1, 2)
MODEL = testing.tiny_model(vocab_size=V, seed=1)
NETWORKS = {
    "eagle1": EagleNetwork.random(EagleConfig.of(MODEL.config), scale=0.3),
    "eagle3": Eagle3Network.random(
        Eagle3Config.of(MODEL.config, len(WORDS), feature_layers=LAYERS), scale=0.3, d2t=offsets(WORDS)
    ),
    "mtp": MtpNetwork.random(
        MtpConfig.of(MODEL.config, 2, feature="layer.2", norm_output=False, draft_vocab_size=len(WORDS)),
        scale=0.3,
        d2t=offsets(WORDS),
    ),
    "medusa": MedusaHeads.random(
        MedusaConfig(MODEL.config.hidden_size, V, num_heads=3, draft_vocab_size=len(WORDS)),
        scale=0.3,
        d2t=offsets(WORDS),
    ),
}
