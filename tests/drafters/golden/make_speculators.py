"""Makes the golden files: EAGLE-3 heads saved by the `speculators` package, and what it computes with them.

    python tests/drafters/golden/make_speculators.py

Needs PyTorch (CPU) and `speculators` 0.9.0. Each folder holds config.json, model.safetensors and expected.npz: features
`[T, 3 Mt]` at positions 0 to T - 1, the text's tokens `[T + 1]`, and for each step of the training-time test the
layer's output `[S, T, M]` and the logits `[S, T, Vd]`. The sizes are chosen so that a mistake shows: head_dim is not
hidden / heads, norm weights are random, the draft vocabulary has gaps.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

HERE = Path(__file__).parent
LENGTH, STEPS = 11, 4
VOCABULARY, WIDTH = 48, 24
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 300.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Case:
    """A head: its layer's family and options, the draft vocabulary, and flags of the speculator."""

    name: str
    family: Any
    layer: dict[str, Any]
    draft_tokens: tuple[int, ...]
    flags: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("raw-residual", LlamaConfig, {"rope_parameters": LLAMA3}, (0, 3, 7, 11, 12, 30, 41, 47)),
    Case(
        "normed-residual",
        LlamaConfig,
        {"attention_bias": True},
        (1, 2, 5, 8, 13, 21, 34),
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    ),
    Case("qwen3", Qwen3Config, {}, tuple(range(VOCABULARY)), {"norm_before_residual": True, "fc_norm": True}),
)


def main() -> None:
    for seed, case in enumerate(CASES):
        model = build(case)
        randomize(model, seed)
        features, tokens = inputs(seed)
        outputs, logits = unrolled(model, features, tokens)
        folder = HERE / case.name
        model.to(torch.bfloat16).save_pretrained(folder)
        (folder / "config.py").unlink()  # it saves its own code, too
        (folder / "model.safetensors").chmod(0o644)
        np.savez_compressed(folder / "expected.npz", features=features, tokens=tokens, outputs=outputs, logits=logits)
        size = sum(f.stat().st_size for f in folder.iterdir())
        print(f"{case.name}: {size / 1000:.0f} kB", file=sys.stderr)


def build(case: Case) -> Eagle3DraftModel:
    layer = case.family(**SIZES, **case.layer)
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=len(case.draft_tokens),
        eagle_aux_hidden_state_layer_ids=[1, 2, 4],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **case.flags,
    )
    model = Eagle3DraftModel(config).eval()
    tokens = torch.tensor(case.draft_tokens)
    t2d = torch.zeros(VOCABULARY, dtype=torch.bool)
    t2d[tokens] = True
    model.load_vocab_mappings(t2d, tokens - torch.arange(len(tokens)))
    return model


def randomize(model: Any, seed: int) -> None:
    """Every weight random, norms and biases included, rounded to bfloat16 but kept in float32."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            value = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                value = 1 + 0.4 * value
            elif weight.ndim > 1:
                value = value * 1.3 / weight.shape[-1] ** 0.5
            weight.copy_(value.to(torch.bfloat16).to(torch.float32))


def inputs(seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    features = random.standard_normal((LENGTH, 3 * WIDTH)).astype(np.float32)
    return features, random.integers(1, VOCABULARY, LENGTH + 1)


def unrolled(model: Any, features: np.ndarray, tokens: np.ndarray, steps: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    """The layer's outputs and the logits of every step: features at t with the token at t + 1."""
    outputs: list[np.ndarray] = []
    logits: list[np.ndarray] = []

    def keep(into: list[np.ndarray]) -> Any:
        return lambda module, given, result: into.append(result[0].float().numpy())

    hooks = [model.layers[0].register_forward_hook(keep(outputs)), model.lm_head.register_forward_hook(keep(logits))]
    with torch.no_grad():
        model(
            torch.from_numpy(features)[None],
            torch.from_numpy(tokens)[None, 1:],
            torch.zeros((1, len(features)), dtype=torch.long),
            ttt_steps=steps,
        )
    for hook in hooks:
        hook.remove()
    return np.stack(outputs), np.stack(logits)


if __name__ == "__main__":
    main()
