"""Drafters on disk: what is written, tensor by tensor, and that what is read drafts as what was saved."""

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax import testing
from specjax.decode import context
from specjax.drafters.eagle import Eagle
from specjax.drafters.eagle_config import Eagle3Config, EagleConfig
from specjax.drafters.eagle_networks import Eagle3Network, EagleNetwork
from specjax.drafters.growing import GrownTree
from specjax.drafters.medusa import Medusa, MedusaConfig, MedusaHeads
from specjax.drafters.small_decoder import SmallDecoder
from specjax.drafters.stored import fingerprint, load_drafter, save_drafter, saving
from specjax.drafters.vocabulary import offsets
from specjax.errors import CheckpointError
from specjax.trees import chain_tree, static_tree

WORDS = [3, 7, 11]
TREE = static_tree([(0,), (1,), (0, 0), (0, 2), (0, 0, 0)])


@pytest.fixture(scope="module")
def deep() -> specjax.Target:
    """A tied target of 64 tokens and 8 layers, so that EAGLE-3's default layers are 2, 4 and 5."""
    model = testing.tiny_model(num_layers=8, windows=(None,) * 8)
    return testing.tiny_target(model, tokenizer=testing.TinyTokenizer(), name="owner/deep")


def eagle1(target: specjax.Target, **changes: Any) -> EagleNetwork:
    return EagleNetwork.random(EagleConfig.of(target.model.config, **changes), scale=0.3)


def eagle3(target: specjax.Target, words: list[int], **changes: Any) -> Eagle3Network:
    config = Eagle3Config.of(target.model.config, len(words), **changes)
    return Eagle3Network.random(config, scale=0.3, d2t=offsets(words))


def medusa(target: specjax.Target, **changes: Any) -> MedusaHeads:
    return MedusaHeads.random(MedusaConfig(32, target.model.vocab_size, 3, **changes), scale=0.3)


def saved(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    (weights,) = folder.glob("*.safetensors")
    return json.loads((folder / "config.json").read_text()), load_file(weights)


def same(a: Any, b: Any) -> None:
    """The same program with bitwise the same numbers: so the same proposals, whatever the text."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


FORMS = ["eagle1 vllm", "eagle1 sglang", "eagle3 vllm", "eagle3 sglang", "eagle3 speculators", "medusa specjax"]
FORMS += ["medusa medusa", "shared medusa", "shared specjax"]


@pytest.mark.parametrize("form", FORMS)
def test_saved_and_loaded_again(form: str, deep: specjax.Target, tmp_path: Path) -> None:
    kind, format = form.split()
    drafter: Any = {
        "eagle1": lambda: Eagle(eagle1(deep), GrownTree(4, 3, 10), block_sizes=(4, 10)),
        "eagle3": lambda: Eagle(eagle3(deep, WORDS), TREE, sample=True),
        "medusa": lambda: Medusa(medusa(deep, num_layers=2), TREE),
        "shared": lambda: Medusa(medusa(deep, shared_head=True), chain_tree(2)),
    }[kind]()
    save_drafter(tmp_path / "a" / "b", drafter, deep, format=format)
    again = load_drafter(tmp_path / "a" / "b", deep)
    same(drafter, again)
    assert again.name == drafter.name
    weights = "model.safetensors" if kind.startswith("eagle") else "medusa_lm_head.safetensors"
    assert {file.name for file in (tmp_path / "a" / "b").iterdir()} == {"config.json", "README.md", weights}


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_same_proposals(kind: str, few: specjax.Target, tmp_path: Path) -> None:
    """Proposals of the loaded drafter, drawn ones with their law, are bitwise those of the saved one."""
    drafter: Any = {
        "eagle3": lambda: Eagle(eagle3(few, WORDS, feature_layers=(0, 1, 2)), chain_tree(3), block_sizes=(4,)),
        "medusa": lambda: Medusa(medusa(few), static_tree([(0,), (1,), (0, 0)]), block_sizes=(4,)),
    }[kind]()
    save_drafter(tmp_path, drafter, few)
    again = load_drafter(tmp_path, few)
    propose = jax.jit(lambda drafter, memory, seen: drafter.propose(memory, seen)[0])
    drafts = []
    for one in (drafter, again):
        rules = specjax.Sampling(temperature=[1.0, 0.0])
        job = specjax.prepare(few, [[1, 2, 3, 7], [4, 5]], drafter=one, sampling=rules, max_new_tokens=20, seed=3)
        state = job.prefill()
        drafts.append(propose(one, state.memory, context(few.model, state)))
    same(*drafts)
    assert propose._cache_size() == 1
    if kind == "eagle3":
        assert set(np.asarray(drafts[1].tokens).ravel().tolist()) <= set(WORDS)
        np.testing.assert_array_equal(again.network.target_ids, WORDS)


def test_eagle1_tensors(deep: specjax.Target, tmp_path: Path) -> None:
    """Names and shapes as engines read them; M 32, F 48, H·D 48, K·D 24, V 64: head_dim 12 is not 32 / 4."""
    network = eagle1(deep)
    expected = {
        "embed_tokens.weight": (64, 32),
        "fc.weight": (32, 64),
        "layers.0.self_attn.q_proj.weight": (48, 32),
        "layers.0.self_attn.k_proj.weight": (24, 32),
        "layers.0.self_attn.v_proj.weight": (24, 32),
        "layers.0.self_attn.o_proj.weight": (32, 48),
        "layers.0.mlp.gate_proj.weight": (48, 32),
        "layers.0.mlp.up_proj.weight": (48, 32),
        "layers.0.mlp.down_proj.weight": (32, 48),
        "layers.0.post_attention_layernorm.weight": (32,),
    }
    save_drafter(tmp_path / "vllm", Eagle(network), deep)
    config, tensors = saved(tmp_path / "vllm")
    assert {name: value.shape for name, value in tensors.items()} == expected
    np.testing.assert_array_equal(tensors["embed_tokens.weight"], deep.model.embed[...])
    # the embedding's half of fc comes first
    np.testing.assert_array_equal(tensors["fc.weight"][:, :32].T, network.fc[...][:32])
    assert config["architectures"] == ["LlamaForCausalLM"]
    facts = {"num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 64, "head_dim": 12, "num_attention_heads": 4}
    facts |= {"model_type": "llama", "tie_word_embeddings": True}  # as the target: its head reads the output
    assert {key: config[key] for key in facts} == facts
    assert "bias" not in config

    save_drafter(tmp_path / "sglang", Eagle(network), deep, format="sglang", embeddings=False)
    config, tensors = saved(tmp_path / "sglang")
    del expected["embed_tokens.weight"]
    assert {name: value.shape for name, value in tensors.items()} == expected | {"fc.bias": (32,)}
    assert not tensors["fc.bias"].any()  # the engine's fc has one, and would start it at random
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    same(Eagle(network), load_drafter(tmp_path / "sglang", deep))

    biased = eagle1(deep, fc_bias=True, own_embedding=True)
    save_drafter(tmp_path / "own", Eagle(biased), deep, format="sglang", force=True)
    same(Eagle(biased), load_drafter(tmp_path / "own", deep))


def test_eagle3_tensors(deep: specjax.Target, tmp_path: Path) -> None:
    """V 64, Vd 3, three features of 32; the mapping is stored as offsets, the head never tied, though the target is."""
    network = eagle3(deep, WORDS)
    layer = {
        "input_layernorm.weight": (32,),
        "hidden_norm.weight": (32,),
        "post_attention_layernorm.weight": (32,),
        "self_attn.q_proj.weight": (48, 64),
        "self_attn.k_proj.weight": (24, 64),
        "self_attn.v_proj.weight": (24, 64),
        "self_attn.o_proj.weight": (32, 48),
        "mlp.gate_proj.weight": (48, 32),
        "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48),
    }
    outer = {"fc.weight": (32, 96), "norm.weight": (32,), "lm_head.weight": (3, 32), "d2t": (3,), "t2d": (64,)}
    save_drafter(tmp_path / "vllm", Eagle(network), deep)
    config, tensors = saved(tmp_path / "vllm")
    shapes = {name: value.shape for name, value in tensors.items()}
    assert shapes == outer | {f"midlayer.{name}": shape for name, shape in layer.items()}
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (np.int64, np.bool_)
    np.testing.assert_array_equal(tensors["d2t"], [3, 6, 9])
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), WORDS)
    # attention reads the embedding first
    qkv = np.asarray(network.layers[0].qkv[...])
    np.testing.assert_array_equal(tensors["midlayer.self_attn.q_proj.weight"][12:24, :32].T, qkv[:32, 0, 1])
    np.testing.assert_array_equal(tensors["midlayer.self_attn.k_proj.weight"][12:, 32:].T, qkv[32:, 1, 2])
    facts = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "draft_vocab_size": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    assert {key: config[key] for key in facts} == facts
    # the default layers, which engines take where nothing is said
    assert not {"eagle_config", "eagle_aux_hidden_state_layer_ids", "norm_before_residual"} & config.keys()
    assert network.config.feature_layers == (2, 4, 5)
    save_drafter(tmp_path / "sglang", Eagle(network), deep, format="sglang")
    assert saved(tmp_path / "sglang")[0] == config

    save_drafter(tmp_path / "speculators", Eagle(network, chain_tree(4)), deep, format="speculators")
    config, tensors = saved(tmp_path / "speculators")
    shapes = {name: value.shape for name, value in tensors.items()}
    assert shapes == outer | {f"layers.0.{name}": shape for name, shape in layer.items()}
    facts = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": 3,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "owner/deep", "architectures": ["LlamaForCausalLM"]},
        },
    }
    assert {key: config[key] for key in facts} == facts
    assert config["transformer_layer_config"]["num_hidden_layers"] == 1


def test_reduced_vocabulary_of_a_tied_target(deep: specjax.Target, tmp_path: Path) -> None:
    """V 64, draft V 32: the head that was trained is the head that is loaded, not the target's embeddings."""
    drafter = Eagle(eagle3(deep, list(range(1, 64, 2))))
    assert deep.model.config.tie_embeddings
    save_drafter(tmp_path, drafter, deep)
    network = load_drafter(tmp_path, deep).network
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, 32)), jnp.float32)
    np.testing.assert_array_equal(network.logits(x, deep.model), drafter.network.logits(x, deep.model))
    assert network.logits(x, deep.model).shape == (1, 4, 32)
    np.testing.assert_array_equal(network.target_ids, np.arange(1, 64, 2))


def test_eagle3_options(deep: specjax.Target, tmp_path: Path) -> None:
    """Extra norms, embeddings of its own, another width, every token drafted; other names for the layer."""
    flags = {"norm_before_residual": True, "norm_output": True, "fc_norm": True}
    network = eagle3(deep, list(range(64)), **flags)
    save_drafter(tmp_path / "a", Eagle(network), deep)
    config, tensors = saved(tmp_path / "a")
    assert {key: config[key] for key in flags} == flags
    assert [tensors[f"fc_norm.{i}.weight"].shape for i in range(3)] == [(32,)] * 3
    same(Eagle(network), load_drafter(tmp_path / "a", deep))

    narrow = Eagle3Config.of(deep.model.config, 3, norm_before_fc=True, own_embedding=True)
    narrow = replace(narrow, layer=replace(narrow.layer, hidden_size=24))
    network = Eagle3Network.random(narrow, d2t=offsets(WORDS))
    for format in ("vllm", "sglang", "speculators"):
        save_drafter(tmp_path / format, Eagle(network), deep, format=format)
        config, tensors = saved(tmp_path / format)
        assert config["target_hidden_size"] == 32
        assert tensors["fc.weight"].shape == (24, 96)
        assert tensors["input_norm.weight"].shape == (96,)
        assert tensors["embed_tokens.weight"].shape == (64, 24)
        same(Eagle(network), load_drafter(tmp_path / format, deep))


def test_other_feature_layers(deep: specjax.Target, tmp_path: Path) -> None:
    """The key of vLLM numbers the residual stream as we do, SGLang's one less; each form is for its engine."""
    drafter = Eagle(eagle3(deep, WORDS, feature_layers=(1, 4, 7)))
    for format in ("vllm", "sglang", "speculators"):
        save_drafter(tmp_path / format, drafter, deep, format=format)
        same(drafter, load_drafter(tmp_path / format, deep))
    config = saved(tmp_path / "vllm")[0]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 7]
    assert "eagle_config" not in config
    config = saved(tmp_path / "sglang")[0]
    assert config["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 3, 6]}
    assert "eagle_aux_hidden_state_layer_ids" not in config
    cards = {name: (tmp_path / name / "README.md").read_text() for name in ("vllm", "sglang")}
    assert "SGLang does not serve these files: it would take the features of its default layers" in cards["vllm"]
    assert "vLLM does not serve these files: its files number the layers as SGLang does" in cards["sglang"]


def test_medusa_tensors(deep: specjax.Target, tmp_path: Path) -> None:
    """Three heads of two blocks. Our own form leaves out heads that are the target's, the official one copies them."""
    heads = medusa(deep, num_layers=2, shared_head=True)
    blocks = {f"{i}.{j}.linear.weight": (32, 32) for i in range(3) for j in range(2)}
    blocks |= {f"{i}.{j}.linear.bias": (32,) for i in range(3) for j in range(2)}
    save_drafter(tmp_path / "ours", Medusa(heads, TREE), deep)
    config, tensors = saved(tmp_path / "ours")
    assert {name: value.shape for name, value in tensors.items()} == blocks
    np.testing.assert_array_equal(tensors["2.1.linear.weight"].T, heads.linear[...][2, 1])
    save_drafter(tmp_path / "official", Medusa(heads, TREE), deep, format="medusa")
    config, tensors = saved(tmp_path / "official")
    assert {name: value.shape for name, value in tensors.items()} == blocks | {
        f"{i}.2.weight": (64, 32) for i in range(3)
    }
    np.testing.assert_array_equal(tensors["1.2.weight"], deep.model.embed[...])
    facts = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "owner/deep", "version": "2"}
    assert {key: config[key] for key in facts} == facts
    same(Medusa(heads, TREE), load_drafter(tmp_path / "official", deep))

    # without our section it is anybody's: heads of its own, a chain of them
    config.pop("specjax")
    (tmp_path / "official" / "config.json").write_text(json.dumps(config))
    foreign = load_drafter(tmp_path / "official", deep)
    assert foreign.tree == chain_tree(3)
    assert not foreign.heads.config.shared_head
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 32)), jnp.float32)
    np.testing.assert_allclose(foreign.heads.logits(x, deep.model), heads.logits(x, deep.model), atol=1e-5)


def test_medusa_draft_vocabulary(deep: specjax.Target, tmp_path: Path) -> None:
    """In our own form; engines get the target's whole head where it is shared."""
    for shared in (False, True):
        config = MedusaConfig(32, 64, 3, shared_head=shared, draft_vocab_size=3)
        drafter = Medusa(MedusaHeads.random(config, d2t=offsets(WORDS)), chain_tree(2))
        save_drafter(tmp_path / str(shared), drafter, deep)
        tensors = saved(tmp_path / str(shared))[1]
        np.testing.assert_array_equal(tensors["d2t"], [3, 6, 9])
        assert ("0.1.weight" in tensors) == (not shared)
        assert shared or tensors["0.1.weight"].shape == (3, 32)
        same(drafter, load_drafter(tmp_path / str(shared), deep))
    save_drafter(tmp_path / "official", drafter, deep, format="medusa")
    tensors = saved(tmp_path / "official")[1]
    assert tensors["0.1.weight"].shape == (64, 32)
    assert "d2t" not in tensors
    assert load_drafter(tmp_path / "official", deep).heads.config == MedusaConfig(32, 64, 3, shared_head=True)


def test_draft_model(deep: specjax.Target, tmp_path: Path) -> None:
    drafter = specjax.DraftModel(testing.tiny_model("qwen3", seed=3), num_draft_tokens=2, sample=False)
    save_drafter(tmp_path, drafter, deep, training={"recipe": "none"})
    same(drafter, load_drafter(tmp_path, deep))
    assert specjax.load(tmp_path).model.config == drafter.model.config  # an ordinary model, too
    config = saved(tmp_path)[0]
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    config.pop("specjax")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_drafter(tmp_path, deep, num_draft_tokens=7).num_draft_tokens == 7


def test_small_decoder(deep: specjax.Target, tmp_path: Path) -> None:
    """Without the target's embeddings in our form; with them, as an ordinary model of the same scores."""
    reduced = specjax.DraftModel(SmallDecoder.start(deep.model, (0, 7), WORDS))
    save_drafter(tmp_path / "reduced", reduced, deep)
    tensors = saved(tmp_path / "reduced")[1]
    assert tensors["lm_head.weight"].shape == (3, 32)
    np.testing.assert_array_equal(tensors["d2t"], [3, 6, 9])
    assert {name.split(".")[0] for name in tensors} == {"model", "lm_head", "d2t", "t2d"}
    assert "model.embed_tokens.weight" not in tensors
    same(reduced, load_drafter(tmp_path / "reduced", deep))

    whole = specjax.DraftModel(SmallDecoder.start(deep.model, (0, 7)), num_draft_tokens=3)
    save_drafter(tmp_path / "ours", whole, deep)
    same(whole, load_drafter(tmp_path / "ours", deep))
    save_drafter(tmp_path / "whole", whole, deep, format="huggingface")
    again = load_drafter(tmp_path / "whole", deep)
    assert again.num_draft_tokens == 3
    tokens, mask = jnp.array([[5, 9, 2]]), jnp.tril(jnp.ones((1, 3, 3), bool))
    logits = jax.jit(lambda model: model.logits(model(tokens, jnp.arange(3)[None], mask).hidden))
    np.testing.assert_allclose(logits(whole.over(deep.model)), logits(again.model), atol=1e-5)


def test_dtypes(deep: specjax.Target, tmp_path: Path) -> None:
    network = eagle3(deep, WORDS)
    save_drafter(tmp_path, Eagle(network), deep, dtype="bfloat16")
    config, tensors = saved(tmp_path)
    assert config["dtype"] == "bfloat16"
    kinds = {np.dtype(ml_dtypes.bfloat16), np.dtype(np.int64), np.dtype(np.bool_)}
    assert {value.dtype for value in tensors.values()} == kinds
    loaded = load_drafter(tmp_path, deep).network
    assert loaded.dtype == jnp.float32
    rounded = np.asarray(network.fc[...]).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(loaded.fc[...], rounded)
    assert load_drafter(tmp_path, deep, dtype="bfloat16").network.dtype == jnp.bfloat16
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tensor",))
    assert load_drafter(tmp_path, deep, mesh=mesh).network.fc[...].sharding.mesh == mesh
    network = Eagle3Network.random(network.config, dtype=jnp.bfloat16, d2t=offsets(WORDS))
    save_drafter(tmp_path, Eagle(network), deep)  # None: its own
    assert saved(tmp_path)[1]["fc.weight"].dtype == ml_dtypes.bfloat16


def test_settings(deep: specjax.Target, tmp_path: Path) -> None:
    """Stored ones, and others asked for: then the stored tree's companions do not apply."""
    save_drafter(tmp_path, Eagle(eagle1(deep), TREE, sample=True, block_sizes=(6,)), deep)
    assert saved(tmp_path)[0]["specjax"]["drafting"] == {
        "tree": [[0], [1], [0, 0], [0, 2], [0, 0, 0]],
        "sample": True,
        "block_sizes": [6],
    }

    def settings(**asked: Any) -> tuple[Any, ...]:
        drafter = load_drafter(tmp_path, deep, **asked)
        return drafter.tree, drafter.sample, drafter.block_sizes

    assert settings() == (TREE, True, (6,))
    assert settings(sample=False) == (TREE, False, (6,))
    assert settings(num_draft_tokens=2) == (chain_tree(2), None, None)
    assert settings(tree=GrownTree(2, 2, 4), block_sizes=(4,)) == (GrownTree(2, 2, 4), None, (4,))


def test_official_files(deep: specjax.Target, tmp_path: Path) -> None:
    """What others publish: no section of ours, "model." before names, old buffers, embeddings that are the target's or
    their own, keys that only one engine reads.
    """
    network = eagle3(deep, WORDS)
    save_drafter(tmp_path, Eagle(network), deep, embeddings=True)
    config, tensors = saved(tmp_path)
    config.pop("specjax")

    def load(config: dict[str, Any], tensors: dict[str, np.ndarray], **options: Any) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(tensors, tmp_path / "model.safetensors")
        return load_drafter(tmp_path, deep, **options)

    loaded = load(config, tensors)
    same(Eagle(network), loaded)  # its embeddings are the target's, and are shared
    renamed = {
        f"model.{name}": value for name, value in tensors.items() if name not in ("d2t", "t2d", "lm_head.weight")
    }
    renamed["midlayer.self_attn.rotary_emb.inv_freq"] = np.ones(6, np.float32)
    rest = {name: tensors[name] for name in ("d2t", "lm_head.weight")}
    same(Eagle(network), load({k: v for k, v in config.items() if k != "architectures"}, renamed | rest))
    own = tensors | {"embed_tokens.weight": tensors["embed_tokens.weight"] * 2}
    loaded = load(config, own)
    np.testing.assert_array_equal(
        loaded.network.embeddings(jnp.array([[5]]), deep.model), own["embed_tokens.weight"][[[5]]]
    )

    # 2, 4, 5 are the defaults: nested ids that are these, or one less, can only mean them
    for ids in ([2, 4, 5], [1, 3, 4]):
        nested = config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
        assert load(nested, tensors).network.config.feature_layers == (2, 4, 5)
    nested = config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}
    assert load(nested, tensors, feature_layers=(2, 4, 7)).network.config.feature_layers == (2, 4, 7)
    top = config | {"eagle_aux_hidden_state_layer_ids": [1, 3, 8]}
    assert load(top, tensors).network.config.feature_layers == (1, 3, 8)

    head = eagle1(deep, fc_bias=True)
    save_drafter(tmp_path, Eagle(head), deep, format="sglang")
    config, tensors = saved(tmp_path)
    config.pop("specjax")
    for architecture in ("LlamaForCausalLMEagle", "LlamaForCausalLM"):  # the official files say the latter
        same(Eagle(head), load(config | {"architectures": [architecture], "bias": True}, tensors))


def test_shards(deep: specjax.Target, tmp_path: Path) -> None:
    drafter = Eagle(eagle3(deep, WORDS))
    save_drafter(tmp_path, drafter, deep)
    tensors = saved(tmp_path)[1]
    parts = {"a.safetensors": sorted(tensors)[::2], "b.safetensors": sorted(tensors)[1::2]}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, tmp_path / file)
    weight_map = {name: file for file, names in parts.items() for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "model.safetensors").unlink()
    same(drafter, load_drafter(tmp_path, deep))


def test_section_and_card(deep: specjax.Target, tmp_path: Path) -> None:
    training = {
        "recipe": "ttt 7 steps",
        "data": "synthetic",
        "tokens": 1_000_000,
        "steps": 500,
        "figures": {"code": {"tokens per call": 2.345678, "acceptance": 0.5}, "story": {"tokens per call": 1.5}},
    }
    drafter = Eagle(eagle3(deep, WORDS), GrownTree(depth=4, top_k=3, total=12))
    save_drafter(tmp_path, drafter, deep, training=training, base_model="owner/model")
    section = saved(tmp_path)[0]["specjax"]
    assert section["training"] == training
    assert section["drafter"] == "eagle3"
    assert section["feature_layers"] == [2, 4, 5]
    assert section["rope"] == {"theta": 10000.0, "scaling": None}
    assert section["target"] == {
        "name": "owner/deep",
        "revision": None,
        "fingerprint": fingerprint(deep),
        "vocab_size": 64,
        "hidden_size": 32,
        "num_layers": 8,
        "vocabulary": section["target"]["vocabulary"],
        "chat_template": "tiny",
    }
    assert len(section["target"]["vocabulary"]) == 16
    card = (tmp_path / "README.md").read_text()
    settings = json.dumps({"method": "eagle3", "model": "THIS_DIRECTORY", "num_speculative_tokens": 4})
    for line in (
        f"vllm serve owner/model --speculative-config '{settings}'",
        "--model-path owner/model --speculative-algorithm EAGLE3 --speculative-draft-model-path THIS_DIRECTORY "
        "--speculative-num-steps 4 --speculative-eagle-topk 3 --speculative-num-draft-tokens 12",
        "target = specjax.load('owner/deep')",
        "| draft vocabulary | 3 of 64 tokens |",
        "| feature layers | 2, 4, 5 |",
        "| | tokens per call | acceptance |",
        "| code | 2.346 | 0.5 |",
        "| story | 1.5 |  |",
        "- recipe: ttt 7 steps",
        "- steps: 500",
    ):
        assert line in card
    cards = {}
    for name, one, format in (
        ("eagle1", Eagle(eagle1(deep)), "sglang"),
        ("speculators", drafter, "speculators"),
        ("medusa", Medusa(medusa(deep, shared_head=True), TREE), "medusa"),
        ("model", specjax.DraftModel(testing.tiny_model()), None),
    ):
        save_drafter(tmp_path / name, one, deep, format=format)
        cards[name] = (tmp_path / name / "README.md").read_text()
    assert "--speculative-algorithm EAGLE --" in cards["eagle1"]
    assert "vLLM does not serve these files: fc has a bias" in cards["eagle1"]
    assert "vllm serve THIS_DIRECTORY\n" in cards["speculators"]
    assert "Text Generation Inference and TensorRT-LLM read Medusa's official form, which" in cards["medusa"]
    assert "vLLM has dropped Medusa" in cards["medusa"]
    assert '"method": "draft_model"' in cards["model"]


def test_fingerprint(deep: specjax.Target, table: specjax.Target) -> None:
    """The same in float32 and bfloat16; another one for other weights, names or kinds of models."""
    one = fingerprint(deep)
    assert one == fingerprint(replace(deep, name="elsewhere"))
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), deep.model)
    assert one == fingerprint(replace(deep, model=rounded, dtype="bfloat16"))
    changed = jax.tree.map(lambda x: x, deep.model)
    changed.layers[5].down[...] = changed.layers[5].down[...] * 1.01
    others = [changed, testing.tiny_model(seed=1, num_layers=8, windows=(None,) * 8), table.model]
    assert len({one, *(fingerprint(replace(deep, model=other)) for other in others)}) == 4


def test_failed_save_leaves_the_old_drafter(deep: specjax.Target, tmp_path: Path, monkeypatch: Any) -> None:
    old, new = Eagle(eagle1(deep)), Eagle(eagle1(deep, own_embedding=True))
    save_drafter(tmp_path / "old", old, deep)

    def full(tensors: Any, file: Path, metadata: dict[str, str]) -> None:
        file.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    def killed(a: Path, b: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_file", full)
        for folder in (tmp_path / "old", tmp_path / "new"):
            with pytest.raises(CheckpointError, match="No space left on device"):
                save_drafter(folder, new, deep)
    assert not (tmp_path / "new").exists()
    with monkeypatch.context() as patch:  # everything is written, nothing renamed yet
        patch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            save_drafter(tmp_path / "old", new, deep)
    assert sorted(f.name for f in (tmp_path / "old").iterdir()) == ["README.md", "config.json", "model.safetensors"]
    same(old, load_drafter(tmp_path / "old", deep))
    save_drafter(tmp_path / "old", new, deep)
    same(new, load_drafter(tmp_path / "old", deep))


def test_scaled_embeddings(tmp_path: Path) -> None:
    """Gemma scales its embeddings, engines hand them out unscaled: the files have a scaled copy, which is not read."""
    target = testing.tiny_target(testing.tiny_model("gemma3"))
    config = Eagle3Config.of(target.model.config, 64, feature_layers=(0, 1, 2))
    config = replace(config, layer=replace(config.layer, activation="silu"))
    drafter = Eagle(Eagle3Network.random(config))
    save_drafter(tmp_path, drafter, target)
    table = saved(tmp_path)[1]["embed_tokens.weight"]
    np.testing.assert_array_equal(table, target.model.embeddings(jnp.arange(64)))
    same(drafter, load_drafter(tmp_path, target))
