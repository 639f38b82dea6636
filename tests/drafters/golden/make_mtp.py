"""Makes the golden files of MTP modules: a checkpoint in MiMo-7B's layout, and what PyTorch computes with it.

    python tests/drafters/golden/make_mtp.py

Needs PyTorch (CPU) and `transformers` 5.24, whose `MtpModel` (`transformers.modeling_layers`, the modules that its
`generate(use_mtp=True)` drafts with) is the reference, around its `Qwen2ForCausalLM`: MiMo-7B is a Qwen2, and the two
agree with the module of its authors (`MiMoMTPLayers` in `modeling_mimo.py`), which has no decoding of its own. Tensors
have the names of MiMo-7B's checkpoints. Two modules, where MiMo-7B has one, so that the chain is compared too.

`mimo` holds config.json, model.safetensors and expected.npz: a text `[T]`; the target's residual stream before its
final norm `[T, M]` and its logits `[T, V]`; for each module its output `[N, T, M]` and logits `[N, T, V]` at every
position t that has a token at t + k, and the outputs where the projection takes its two inputs the other way round
(`swapped`), which is the order of DeepSeek's checkpoints. Sizes are chosen so that a mistake shows: head_dim is not
hidden / heads, norm weights and biases are random.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

FOLDER = Path(__file__).parent / "mimo"
LENGTH, MODULES = 13, 2
SIZES = {
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
NAMES = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "post_norm": "final_layernorm",
}


def main() -> None:
    config = Qwen2Config(
        **SIZES,
        rope_parameters={"rope_type": "default", "rope_theta": 640000.0},
        num_mtp_layers=MODULES,
        mtp_layer_types=["full_attention"] * MODULES,
        mtp_hidden_states_first=True,
        attn_implementation="eager",
    )
    target = Qwen2ForCausalLM(config).eval()
    modules = MtpModel(target, MODULES).eval()
    randomize(target, 0)
    randomize(modules.layers, 1)
    tokens = torch.from_numpy(np.random.default_rng(2).integers(0, config.vocab_size, LENGTH))
    with torch.no_grad():
        hidden, logits = of_target(target, tokens)
        outputs, drafts = of_modules(modules, hidden, tokens)
        modules.config.mtp_hidden_states_first = False
        swapped, _ = of_modules(modules, hidden, tokens)
    FOLDER.mkdir(exist_ok=True)
    arrays = {"hidden": hidden, "logits": logits, "outputs": outputs, "drafts": drafts, "swapped": swapped}
    np.savez_compressed(
        FOLDER / "expected.npz", tokens=tokens.numpy(), **{name: value.numpy() for name, value in arrays.items()}
    )
    tensors = {name: value for name, value in target.state_dict().items() if "rotary" not in name}
    tensors |= {mimo_name(name): value for name, value in modules.layers.state_dict().items()}
    tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in tensors.items()}
    save_file(tensors, FOLDER / "model.safetensors", metadata={"format": "pt"})
    raw = SIZES | {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": MODULES}
    raw |= {"attention_bias": True, "hidden_act": "silu", "rope_theta": 640000.0, "use_sliding_window": False}
    raw |= {"eos_token_id": 0, "torch_dtype": "bfloat16", "use_mrope": False}
    (FOLDER / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    (FOLDER / "model.safetensors").chmod(0o644)
    print(f"{sum(f.stat().st_size for f in FOLDER.iterdir()) / 1000:.0f} kB")


def randomize(model: Any, seed: int) -> None:
    """Every weight random, norms and biases included, rounded to bfloat16 but kept in float32."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            noise = 1 + 0.3 * noise if "norm" in name else (1.0 if "embed" in name else 0.3) * noise
            value.copy_(noise.to(torch.bfloat16))


def of_target(target: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What goes into the final norm, and logits."""
    seen = []
    hook = target.model.norm.register_forward_hook(lambda module, given, result: seen.append(given[0]))
    logits = target(tokens[None], use_cache=False).logits
    hook.remove()
    return seen[0][0], logits[0]


def of_modules(modules: Any, hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each module's outputs and logits over the text; zeros at the last positions, whose tokens it does not have."""
    cache = MtpCache(config=modules.config)
    outputs, logits = [], []
    given = hidden[None]
    for i in range(MODULES):
        given = given[:, : LENGTH - 1 - i]
        positions = torch.arange(i + 1, LENGTH)[None]
        given = modules.forward_layer(i, given, positions, cache, input_ids=tokens[None, i + 1 :])
        rest = (0, 0, 0, i + 1)
        outputs.append(torch.nn.functional.pad(given[0], rest))
        logits.append(torch.nn.functional.pad(modules.shared_head(given)[0], rest))
    return torch.stack(outputs), torch.stack(logits)


def mimo_name(name: str) -> str:
    """The name in MiMo-7B's checkpoints of a parameter of `MtpModel.layers`."""
    number, part = name.split(".", 1)
    part = part.removeprefix("mtp_block.")
    for theirs, mimo in NAMES.items():
        part = part.replace(theirs, mimo) if part.startswith(theirs) else part
    return f"model.mtp_layers.{number}.{part}"


if __name__ == "__main__":
    main()
