"""MTP modules on disk: those in a checkpoint of MiMo-7B's layout, against `transformers`, and what we write."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax import testing
from specjax.drafters.growing import GrownTree
from specjax.drafters.mtp import Mtp, MtpConfig, MtpNetwork
from specjax.drafters.mtp_unroll import unroll
from specjax.drafters.vocabulary import offsets
from specjax.errors import CheckpointError, InputError
from specjax.training.features import segment_mask
from specjax.trees import chain_tree

MIMO = Path(__file__).parent / "golden" / "mimo"
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def target() -> specjax.Target:
    return specjax.load(MIMO)


@jax.jit
def computed(network: Any, model: Any, tokens: Any) -> Any:
    """The target's residual stream and logits over a text; each module's outputs and logits."""
    mask, positions = segment_mask(jnp.ones_like(tokens)), jnp.arange(tokens.shape[1])[None]
    output = model(tokens, positions, mask, features=network.features)
    true = network.feature(output.features)
    outputs = unroll(network, model, true, tokens, positions, mask, network.num_modules)
    drafts = [network.child_logits(x, model, step) for step, x in enumerate(outputs)]
    return true[0], model.logits(output.hidden)[0], jnp.concatenate(outputs), jnp.concatenate(drafts)


def test_mimo_golden(target: specjax.Target) -> None:
    """Target and modules out of one checkpoint: `transformers`' `MtpModel` around its Qwen2 computes the same."""
    expected = np.load(MIMO / "expected.npz")
    drafter = specjax.load_drafter(MIMO, target)
    assert isinstance(drafter, Mtp)
    assert (drafter.tree, drafter.features, drafter.network.num_modules) == (chain_tree(2), ("layer.2",), 2)
    c = drafter.network.config
    assert (c.hidden_first, c.norm_output, c.layers.qkv_bias, c.layers.out_bias) == (True, True, True, False)
    found = computed(drafter.network, target.model, jnp.asarray(expected["tokens"])[None])
    for ours, name in zip(found, ("hidden", "logits", "outputs", "drafts"), strict=True):
        theirs = expected[name]
        real = [slice(None)] if theirs.ndim == 2 else [np.s_[i, : theirs.shape[1] - 1 - i] for i in range(2)]
        for part in real:
            np.testing.assert_allclose(ours[part], theirs[part], atol=TOLERANCE, rtol=TOLERANCE, err_msg=name)


def test_order_of_the_projection(target: specjax.Target) -> None:
    """`[embedding; hidden]` is another module of the same weights, which `transformers` computes too."""
    expected = np.load(MIMO / "expected.npz")
    drafter: Any = specjax.load_drafter(MIMO, target)
    drafter.network.config = replace(drafter.network.config, hidden_first=False)
    found = computed(drafter.network, target.model, jnp.asarray(expected["tokens"])[None])[2]
    for i in range(2):
        real = np.s_[i, : expected["tokens"].size - 1 - i]
        np.testing.assert_allclose(found[real], expected["swapped"][real], atol=TOLERANCE, rtol=TOLERANCE)
        assert not np.allclose(found[real], expected["outputs"][real], atol=0.1)


def test_mimo_decodes(target: specjax.Target) -> None:
    """Greedily the target's own text, with as many draft tokens as are asked for, in a batch of one."""
    prompts = [[5, 6, 7]]
    plain = specjax.generate(target, prompts, max_new_tokens=24)
    drafter: Any = specjax.load_drafter(MIMO, target, num_draft_tokens=3, block_sizes=(4,))
    out = specjax.generate(target, prompts, drafter=drafter, max_new_tokens=24)
    assert out.token_ids == plain.token_ids
    assert out.stats.proposed > 20
    assert specjax.load_drafter(MIMO, target, tree=GrownTree(2, 3, 7)).num_nodes == 6


def test_saved_and_loaded_again(few: specjax.Target, tmp_path: Path) -> None:
    """Bitwise the same, whatever the configuration; the names are MiMo-7B's."""
    words = [3, 7, 11]
    config = MtpConfig.of(
        few.model.config, 2, hidden_first=False, feature="layer.2", norm_output=False, draft_vocab_size=3
    )
    drafter = Mtp(MtpNetwork.random(config, d2t=offsets(words)), chain_tree(4), sample=False, min_confidence=0.25)
    specjax.save_drafter(tmp_path, drafter, few, training={"data": "none"})
    again = specjax.load_drafter(tmp_path, few)
    assert jax.tree.structure(again) == jax.tree.structure(drafter)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(drafter), strict=True):
        np.testing.assert_array_equal(a, b)
    tensors = load_file(tmp_path / "model.safetensors")
    at = "model.mtp_layers.1."
    shapes = {name.removeprefix(at): value.shape for name, value in tensors.items() if name.startswith(at)}
    assert shapes == {
        "token_layernorm.weight": (32,),
        "hidden_layernorm.weight": (32,),
        "input_proj.weight": (32, 64),
        "final_layernorm.weight": (32,),
        "input_layernorm.weight": (32,),
        "post_attention_layernorm.weight": (32,),
        "self_attn.q_proj.weight": (48, 32),
        "self_attn.k_proj.weight": (24, 32),
        "self_attn.v_proj.weight": (24, 32),
        "self_attn.o_proj.weight": (32, 48),
        "mlp.gate_proj.weight": (48, 32),
        "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48),
    }
    assert len(tensors) == 2 * len(shapes) + 2
    np.testing.assert_array_equal(tensors[at + "input_proj.weight"].T, drafter.network.around[1].proj[...])
    card = (tmp_path / "README.md").read_text()
    assert "# MTP modules for" in card
    assert "vLLM does not serve these files: it takes MTP modules from the target's own checkpoint only." in card


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
def test_layers_of_every_family(family: str, tmp_path: Path) -> None:
    """Modules have the target's own kind of layer: biases, norms of queries and keys, norms around."""
    target = testing.tiny_target(testing.tiny_model(family, vocab_size=12))
    drafter = Mtp(MtpNetwork.start(MtpConfig.of(target.model.config), target.model), chain_tree(1))
    specjax.save_drafter(tmp_path, drafter, target)
    again: Any = specjax.load_drafter(tmp_path, target)
    layer = again.network.layers[0]
    names = {"qwen2": "qkv_bias", "qwen3": "q_norm", "gemma3": "post_mlp_norm"}
    np.testing.assert_array_equal(
        getattr(layer, names[family])[...], getattr(target.model.layers[-1], names[family])[...]
    )
    again.network.config = replace(again.network.config, layers=drafter.network.config.layers)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(drafter), strict=True):
        np.testing.assert_array_equal(a, b)


def changed(folder: Path, **changes: Any) -> Path:
    """A copy of the checkpoint with another configuration."""
    shutil.copytree(MIMO, folder)
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_refused(target: specjax.Target, few: specjax.Target, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="for a target with hidden_size 24, and the target has 32"):
        specjax.load_drafter(MIMO, few)
    shallow = testing.tiny_target(
        testing.tiny_model("qwen2", vocab_size=48, hidden_size=24, num_layers=1, windows=(None,))
    )
    with pytest.raises(InputError, match="for a target with num_layers 2, and the target has 1"):
        specjax.load_drafter(MIMO, shallow)
    for i, (changes, message) in enumerate(
        (
            ({"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}, "of model type 'deepseek_v3'"),
            ({"model_type": "glm4_moe", "num_nextn_predict_layers": None, "num_mtp_layers": 1}, "type 'glm4_moe'"),
            ({"num_nextn_predict_layers": 3}, r"missing tensor\(s\): model\.mtp_layers\.2"),
            ({"use_sliding_window": True, "max_window_layers": 0}, "sliding window"),
            ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "MTP modules of model type 'qwen2'"),
        )
    ):
        with pytest.raises(CheckpointError, match=message):
            specjax.load_drafter(changed(tmp_path / str(i), **changes), target)
    other = changed(tmp_path / "next", model_type="qwen3_next", architectures=[], num_nextn_predict_layers=None)
    save_file({"mtp.fc.weight": np.zeros((2, 2), np.float32)}, other / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor mtp\.fc\.weight is of MTP modules that are not supported"):
        specjax.load_drafter(other, target)
    with pytest.raises(InputError, match="a stored Mtp has no setting 'depth'"):
        specjax.load_drafter(MIMO, target, depth=3)


def test_a_target_ignores_its_modules(target: specjax.Target, tmp_path: Path) -> None:
    """With or without them, it is the same model."""
    tensors = {n: v for n, v in load_file(MIMO / "model.safetensors").items() if "mtp_layers" not in n}
    alone = changed(tmp_path / "alone", num_nextn_predict_layers=0)
    save_file(tensors, alone / "model.safetensors")
    for a, b in zip(jax.tree.leaves(specjax.load(alone).model), jax.tree.leaves(target.model), strict=True):
        np.testing.assert_array_equal(a, b)
    assert isinstance(specjax.load_drafter(alone, target), specjax.DraftModel)  # a model like any other
