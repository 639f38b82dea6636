"""EAGLE-3's training step in PyTorch by the `speculators` package, for comparison."""

import time
from typing import Any

import numpy as np
from common.results import cpu_count

from specjax.drafters.eagle_networks import Eagle3Network
from specjax.models.config import ModelConfig
from specjax.training.batches import Batch

INSTALL = 'pip install -e ".[compare]" speculators==0.9.0'


def why_not() -> str | None:
    """Why the comparison cannot be made here; None where it can."""
    try:
        import speculators  # noqa: F401
        import torch  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed: {INSTALL}"
    return None


class TrainingStep:
    """Forward, backward and AdamW over packed rows, which it takes as one sequence of documents."""

    def __init__(
        self,
        target: ModelConfig,
        network: Eagle3Network,
        head: np.ndarray,
        batch: Batch,
        features: dict[str, np.ndarray],
        steps: int,
        attention: str,
    ):
        import torch
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.losses.utils import resolve_loss_config
        from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
        from speculators.proposals.greedy import GreedyTokenProposalConfig
        from transformers import LlamaConfig

        torch.set_num_threads(cpu_count())
        layer = LlamaConfig(
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=target.num_heads,
            num_key_value_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            rms_norm_eps=target.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": target.rope.theta},
            tie_word_embeddings=False,
        )
        layer._attn_implementation = attention
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=network.config.draft_vocab_size,
            eagle_aux_hidden_state_layer_ids=list(network.config.feature_layers),
            norm_before_residual=network.config.norm_before_residual,
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=steps)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
        )
        model: Any = Eagle3DraftModel(config).train()
        model.load_vocab_mappings(torch.from_numpy(np.array(network.t2d)), torch.from_numpy(np.array(network.d2t[...])))
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(0, 0.02)
            model.verifier_lm_head.weight.copy_(torch.from_numpy(np.array(head)))
            model.verifier_norm.weight.fill_(1)
        self._model, self._steps = model, steps
        self._loss = resolve_loss_config("kl_div", "eager")  # its fused losses need Triton
        self._optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], lr=1e-4)
        tokens = torch.from_numpy(np.concatenate([batch.tokens[:, 1:], np.zeros_like(batch.tokens[:, :1])], 1))
        documents = batch.segments + 1000 * np.arange(len(batch.segments))[:, None]
        names = [f"layer.{i}" for i in network.config.feature_layers]
        fused = np.concatenate([features[name] for name in names], axis=-1)
        mask = np.concatenate([batch.mask[:, 1:], np.zeros_like(batch.mask[:, :1])], 1)
        self._inputs = {
            "hidden_states": _flat(torch.from_numpy(fused)),
            "input_ids": _flat(tokens.long()),
            "document_ids": _flat(torch.from_numpy(documents).long()),
            "loss_mask": _flat(torch.from_numpy(mask)),
            "verifier_last_hidden_states": _flat(torch.from_numpy(features["hidden"])),
        }

    def __call__(self) -> float:
        """Seconds of one step."""
        begin = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        _, loss, _ = self._model(**self._inputs, ttt_steps=self._steps, loss_config=self._loss)
        loss.backward()
        self._optimizer.step()
        float(loss.detach())
        return time.perf_counter() - begin


def _flat(rows: Any) -> Any:
    """`[B, T, …]` as one sequence `[1, B*T, …]`."""
    return rows.reshape(1, -1, *rows.shape[2:])
