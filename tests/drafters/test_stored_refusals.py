"""What is refused when drafters are loaded and saved: one line each, which says what, where, and what to do."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models

import specjax
from specjax import testing
from specjax.drafters.eagle import Eagle
from specjax.drafters.eagle_config import Eagle3Config, EagleConfig
from specjax.drafters.eagle_networks import Eagle3Network, EagleNetwork
from specjax.drafters.growing import GrownTree
from specjax.drafters.medusa import Medusa, MedusaConfig, MedusaHeads
from specjax.drafters.small_decoder import SmallDecoder
from specjax.drafters.stored import load_drafter, save_drafter
from specjax.drafters.vocabulary import offsets
from specjax.errors import CheckpointError, InputError, SpecjaxError
from specjax.trees import chain_tree, static_tree

WORDS = [3, 7, 11]
Tensors = dict[str, np.ndarray]


def deep_target(**changes: Any) -> specjax.Target:
    layers = changes.pop("num_layers", 8)
    model = testing.tiny_model(num_layers=layers, windows=(None,) * layers, **changes)
    return testing.tiny_target(model, tokenizer=testing.TinyTokenizer(), name="deep")


@pytest.fixture(scope="module")
def deep() -> specjax.Target:
    return deep_target()


@pytest.fixture(scope="module")
def stored(deep: specjax.Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One drafter of each kind, as we write it."""
    folder = tmp_path_factory.mktemp("stored")
    config = deep.model.config
    eagle3 = Eagle3Network.random(Eagle3Config.of(config, 3), d2t=offsets(WORDS))
    save_drafter(folder / "eagle1", Eagle(EagleNetwork.random(EagleConfig.of(config))), deep)
    save_drafter(folder / "eagle3", Eagle(eagle3), deep)
    save_drafter(folder / "speculators", Eagle(eagle3), deep, format="speculators")
    save_drafter(folder / "medusa", Medusa(MedusaHeads.random(MedusaConfig(32, 64, 3)), chain_tree(3)), deep)
    few = MedusaHeads.random(MedusaConfig(32, 64, 3, draft_vocab_size=3), d2t=offsets(WORDS))
    save_drafter(folder / "few-heads", Medusa(few, chain_tree(3)), deep)
    save_drafter(folder / "small", specjax.DraftModel(SmallDecoder.start(deep.model, (0, 1), WORDS)), deep)
    save_drafter(folder / "model", specjax.DraftModel(testing.tiny_model()), deep)
    return folder


@pytest.fixture
def copied(stored: Path, tmp_path: Path) -> Callable[..., Path]:
    """A drafter as others publish it: without our section, unless `ours`."""

    def copy(name: str, ours: bool = False) -> Path:
        folder = Path(shutil.copytree(stored / name, tmp_path / name))
        if not ours:
            configure(folder, specjax=None)
        return folder

    return copy


def configure(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def refused(kind: type[SpecjaxError], folder: Path, target: specjax.Target, *parts: str, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        load_drafter(folder, target, **options)
    message = str(caught.value)
    assert "\n" not in message
    for part in (str(folder), *parts):
        assert part in message, message
    return message


def test_another_target(stored: Path, deep: specjax.Target) -> None:
    """Other weights are refused unless that is wanted, other shapes in any case."""
    tuned = deep_target(seed=1)
    for kind in ("eagle1", "eagle3", "speculators", "medusa", "small", "model"):
        refused(InputError, stored / kind, tuned, "'deep'", "weights", "strict=False")
        load_drafter(stored / kind, tuned, strict=False)
    wide = deep_target(hidden_size=40)
    for kind in ("eagle1", "eagle3", "speculators", "medusa"):
        refused(InputError, stored / kind, wide, "hidden_size 32", "the target has 40", strict=False)
    refused(InputError, stored / "small", wide, "hidden_size 32", strict=False)
    long = replace(deep_target(vocab_size=70), tokenizer=None)
    for kind in ("eagle1", "eagle3", "speculators", "medusa"):
        refused(InputError, stored / kind, long, "vocab_size 64", "the target has 70", strict=False)
    with pytest.raises(InputError, match="64 tokens and the target 70"):
        load_drafter(stored / "model", long, strict=False)
    shallow = deep_target(num_layers=4)
    refused(InputError, stored / "eagle3", shallow, "feature layer 5", "of 4 layers", strict=False)
    for folder in (stored / "eagle1", stored / "medusa"):
        refused(InputError, folder, testing.tiny_target(testing.TableModel.random(64)), "TableModel", strict=False)
    with pytest.raises(InputError, match=r"expected what specjax\.load returns"):
        load_drafter(stored / "eagle1", deep.model)


class Swapped(testing.TinyTokenizer):
    """Ids 5 and 6 swapped."""

    def tokens(self) -> list[str]:
        tokens = super().tokens()
        tokens[5], tokens[6] = tokens[6], tokens[5]
        return tokens


def test_another_vocabulary(stored: Path, copied: Any, deep: specjax.Target, tmp_path: Path) -> None:
    """The same size, the same weights, other tokens: named where there is a tokenizer to compare with."""
    swapped = replace(deep, tokenizer=Swapped())
    refused(InputError, stored / "eagle1", swapped, "other tokens", strict=False)
    load_drafter(stored / "eagle1", replace(deep, tokenizer=None))
    folder = copied("eagle3")
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(testing.TinyTokenizer().tokens())}, "a"))
    backend.save(str(folder / "tokenizer.json"))
    load_drafter(folder, deep)
    refused(InputError, folder, swapped, "first at token id 5", "'b'", "'c'")


def test_another_chat_template(stored: Path, deep: specjax.Target) -> None:
    class Other(testing.TinyTokenizer):
        @property
        def template_hash(self) -> str:
            return "other"

    with pytest.warns(UserWarning, match="chat template tiny, and that of 'deep' is other"):
        load_drafter(stored / "eagle3", replace(deep, tokenizer=Other()))


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "speculators", "medusa", "small"])
def test_damaged_tensors(kind: str, copied: Any, deep: specjax.Target) -> None:
    folder = copied(kind, ours=kind == "small")
    (file,) = folder.glob("*.safetensors")
    data, tensors = file.read_bytes(), load_file(file)
    name = next(n for n in tensors if n.endswith(("down_proj.weight", "1.0.linear.weight")))
    edit(folder, lambda t: t.pop(name))
    refused(CheckpointError, folder, deep, "1 missing tensor(s)", name)
    edit(folder, lambda t: t.update({name: tensors[name][:-1]}))
    height, width = tensors[name].shape
    refused(
        CheckpointError,
        folder,
        deep,
        "of the wrong shape",
        f"{name} is [{height - 1}, {width}]",
        f"[{height}, {width}]",
    )
    edit(folder, lambda t: t.update({name: tensors[name].astype(np.int8)}))
    refused(CheckpointError, folder, deep, f"{name} is I8", "F32")
    edit(folder, lambda t: t.update({name: tensors[name], "mask_hidden": np.zeros((1, 1, 96), np.float32)}))
    refused(CheckpointError, folder, deep, "1 unexpected tensor(s): mask_hidden")
    for keep in (0, 5, 200, len(data) - 1):
        file.write_bytes(data[:keep])
        refused(CheckpointError, folder, deep, file.name, "truncated")


def test_two_names_of_one_tensor(copied: Any, deep: specjax.Target) -> None:
    folder = copied("eagle3")
    edit(folder, lambda t: t.update({"layers.0.hidden_norm.weight": t["midlayer.hidden_norm.weight"]}))
    refused(
        CheckpointError, folder, deep, "layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight", "one parameter"
    )


@pytest.mark.parametrize("kind", ["eagle3", "speculators", "small", "few-heads"])
def test_draft_vocabulary(kind: str, copied: Any, deep: specjax.Target) -> None:
    """A missing mapping is an error, and so are absolute ids in the place of offsets."""
    folder = copied(kind, ours=kind in ("small", "few-heads"))
    (file,) = folder.glob("*.safetensors")
    both = load_file(file)
    edit(folder, lambda t: t.pop("d2t"))
    refused(CheckpointError, folder, deep, "tensor d2t is missing", "3 of 64")
    edit(folder, lambda t: t.update(d2t=np.array([3, 7, 11])))  # as offsets: 3, 8 and 13
    refused(
        CheckpointError, folder, deep, "tensor d2t", "those that t2d says", "looks like the target's ids themselves"
    )
    edit(folder, lambda t: t.update(d2t=np.array([3, 6, 10])))
    assert "looks like" not in refused(CheckpointError, folder, deep, "tensor d2t", "those that t2d says")
    edit(folder, lambda t: t.pop("t2d"))
    load_drafter(folder, deep)
    for wrong in ([-1, 0, 0], [3, 2, 9], [0, 0, 62]):
        edit(folder, lambda t, wrong=wrong: t.update(d2t=np.array(wrong)))
        refused(CheckpointError, folder, deep, "tensor d2t must send", "different ids below 64")
    edit(folder, lambda t: t.update(d2t=np.array([40, 50, 63])))
    refused(CheckpointError, folder, deep, "looks like the target's ids themselves")
    edit(folder, lambda t: t.update(d2t=both["d2t"], t2d=both["t2d"].astype(np.int8)))
    refused(CheckpointError, folder, deep, "t2d is I8", "BOOL")
    edit(folder, lambda t: t.update(t2d=both["t2d"][1:]))
    refused(CheckpointError, folder, deep, "t2d is [63]")


def test_tied_head(copied: Any, deep: specjax.Target) -> None:
    """Copied from the target's configuration while the vocabulary is reduced."""
    folder = copied("eagle3")
    configure(folder, tie_word_embeddings=True)
    refused(CheckpointError, folder, deep, "config.json", "tie_word_embeddings is true", "3 of 64 tokens")


def test_feature_layers(copied: Any, deep: specjax.Target) -> None:
    folder = copied("eagle3")
    configure(folder, eagle_aux_hidden_state_layer_ids=[2, 4, 4])
    refused(InputError, folder, deep, "2, 4, 4 collide")
    configure(folder, eagle_aux_hidden_state_layer_ids=[2, 4, 9])
    refused(InputError, folder, deep, "feature layer 9", "of 8 layers")
    configure(folder, eagle_aux_hidden_state_layer_ids="2,4,5")
    refused(CheckpointError, folder, deep, "eagle_aux_hidden_state_layer_ids")
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
    configure(folder, eagle_aux_hidden_state_layer_ids=None, eagle_config=nested)
    refused(InputError, folder, deep, "feature_layers=(1, 3, 6)", "vLLM", "(2, 4, 7) if for SGLang")
    configure(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, -3]})
    refused(CheckpointError, folder, deep, "eagle_config.eagle_aux_hidden_state_layer_ids")
    configure(folder, eagle_config=None)
    with pytest.raises(InputError, match="of 6 layers: they collide"):
        load_drafter(folder, deep_target(num_layers=6))
    refused(InputError, copied("eagle1"), deep, "only EAGLE-3", feature_layers=(1, 2, 3))
    refused(CheckpointError, folder, deep, "fc.weight is [32, 96]", "[32, 128]", feature_layers=(1, 2, 3, 4))


@pytest.mark.parametrize(
    ("kind", "changes", "parts"),
    [
        ("eagle3", {"num_hidden_layers": 2}, ["num_hidden_layers is 2"]),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, ["use_aux_hidden_state false"]),
        ("eagle3", {"logit_scale": 0.5}, ["logit_scale 0.5"]),
        ("eagle3", {"parallel_drafting": True}, ["parallel_drafting True", "several tokens in one pass"]),
        ("eagle3", {"model_type": "mamba"}, ["'mamba'", "supported"]),
        ("eagle3", {"norm_before_residual": "yes"}, ["'norm_before_residual' is 'yes'", "true or false"]),
        ("eagle3", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["'dynamic'"]),
        ("eagle3", {"model_type": "mistral", "sliding_window": 8}, ["sliding window of 8"]),
        ("eagle3", {"model_type": "gemma3_text"}, ["'gemma3'", "llama, mistral, qwen2, qwen3"]),
        ("eagle3", {"norm_before_fc": True, "fc_norm": True}, []),
        (
            "eagle3",
            {"architectures": ["DFlashDraftModel"]},
            ["'DFlashDraftModel' is not supported", "EAGLE-1, EAGLE-3"],
        ),
        ("eagle3", {"architectures": ["DeepseekV3ForCausalLMNextN"]}, ["'DeepseekV3ForCausalLMNextN'"]),
        ("eagle1", {"add_para_norm": True}, ["add_para_norm"]),
        ("speculators", {"speculators_model_type": "peagle"}, ["speculators model type 'peagle'", "EAGLE-3"]),
        ("speculators", {"transformer_layer_config": None}, ["transformer_layer_config", "'num_hidden_layers'"]),
        ("speculators", {"mask_token_id": 5}, ["mask_token_id 5"]),
        ("medusa", {"medusa_num_layers": 0}, ["'medusa_num_layers' is 0"]),
        ("medusa", {"medusa_num_heads": 4}, ["missing tensor", "3.0.linear.weight"]),
        ("model", {"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel"]),
    ],
)
def test_unsupported(kind: str, changes: dict[str, Any], parts: list[str], copied: Any, deep: specjax.Target) -> None:
    folder = copied(kind)
    configure(folder, **changes)
    if not parts:
        with pytest.raises(InputError, match="norm_before_fc and fc_norm exclude each other"):
            load_drafter(folder, deep)
        return
    refused(CheckpointError, folder, deep, "config.json" if "missing" not in parts[0] else "", *parts)


@pytest.mark.parametrize(
    ("kind", "file"), [("eagle3", "pytorch_model.bin"), ("eagle1", "model.pt"), ("medusa", "medusa_lm_head.pt")]
)
def test_pickles(kind: str, file: str, copied: Any, deep: specjax.Target) -> None:
    """Refused with the command that converts them; an EAGLE-1 head may not even say what it is."""
    folder = copied(kind)
    (weights,) = folder.glob("*.safetensors")
    weights.rename(folder / file)
    message = refused(CheckpointError, folder, deep, file, "can run code", "python -c", "weights_only=True")
    assert str(weights) in message


@pytest.mark.torch
def test_the_command_converts(copied: Any, deep: specjax.Target, monkeypatch: Any) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    folder = copied("eagle3")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({name: torch.from_numpy(value) for name, value in tensors.items()}, folder / "pytorch_model.bin")
    message = refused(CheckpointError, folder, deep)
    exec(message.split('python -c "')[1].removesuffix('"'), {})
    np.testing.assert_array_equal(load_drafter(folder, deep).network.target_ids, WORDS)


def test_no_drafter(copied: Any, deep: specjax.Target, tmp_path: Path) -> None:
    refused(CheckpointError, tmp_path / "nowhere", deep, "no such directory")
    (tmp_path / "empty").mkdir()
    refused(CheckpointError, tmp_path / "empty", deep, "config.json")
    folder = copied("eagle1")
    (folder / "model.safetensors").unlink()
    refused(CheckpointError, folder, deep, "no model.safetensors")
    (folder / "config.json").write_text("{")
    refused(CheckpointError, folder, deep, "not valid JSON")


def test_section(copied: Any, deep: specjax.Target) -> None:
    folder = copied("eagle1", ours=True)
    section = json.loads((folder / "config.json").read_text())["specjax"]
    configure(folder, specjax=section | {"drafter": "hydra"})
    refused(CheckpointError, folder, deep, "'hydra'", "eagle1, eagle3, medusa")
    configure(folder, specjax="eagle1")
    refused(CheckpointError, folder, deep, "'specjax' is 'eagle1'")
    for wrong in (
        {"tree": [[0, 1]]},
        {"tree": {"height": 3}},
        {"num_draft_tokens": -1},
        {"colour": 1},
        {"block_sizes": 3},
    ):
        configure(folder, specjax=section | {"drafting": wrong})
        refused(CheckpointError, folder, deep, "'drafting'", "cannot be read")
    configure(folder, specjax=section | {"own_embedding": True})
    edit(folder, lambda t: t.pop("embed_tokens.weight"))
    refused(CheckpointError, folder, deep, "missing tensor(s): embed_tokens.weight")


def test_settings(stored: Path, deep: specjax.Target) -> None:
    for kind, settings, message in (
        ("eagle1", {"k": 3}, "a stored Eagle has no setting 'k'"),
        ("medusa", {"sample": True}, "a stored Medusa has no setting 'sample'"),
        ("model", {"tree": chain_tree(2)}, "a stored DraftModel has no setting 'tree'"),
        ("eagle3", {"tree": chain_tree(2), "num_draft_tokens": 3}, "not both"),
        ("eagle3", {"tree": [(0,)]}, "tree: expected what specjax.trees.static_tree makes"),
        ("medusa", {"tree": GrownTree()}, "tree: expected"),
        ("medusa", {"num_draft_tokens": 4}, "the tree is 4 deep, but there are 3 heads"),
        ("eagle1", {"num_draft_tokens": -1}, "num_draft_tokens"),
        ("eagle1", {"block_sizes": [3]}, "block_sizes"),
        ("eagle1", {"dtype": "int8"}, "dtype 'int8'"),
    ):
        with pytest.raises(InputError, match=message.replace("(", r"\(")):
            load_drafter(stored / kind, deep, **settings)


def test_saving(deep: specjax.Target, stored: Path, tmp_path: Path) -> None:
    """What an engine would read as something else is not written unless that is wanted."""
    config = deep.model.config

    def one(**changes: Any) -> Eagle:
        return Eagle(EagleNetwork.random(EagleConfig.of(config, **changes)))

    def three(**changes: Any) -> Eagle:
        return Eagle(Eagle3Network.random(Eagle3Config.of(config, 3, **changes), d2t=offsets(WORDS)))

    gelu = EagleConfig(replace(EagleConfig.of(config).layer, activation="gelu_tanh"))
    for drafter, format, message in (
        (one(), "speculators", "format 'speculators': a drafter of kind 'eagle1' has vllm, sglang"),
        (one(fc_bias=True), "vllm", "vLLM would not draft .* fc has a bias"),
        (Eagle(EagleNetwork.random(gelu)), "vllm", "activation gelu_tanh"),
        (one(own_embedding=True), "sglang", "embeddings are others than the target's"),
        (three(norm_before_residual=True), "sglang", "SGLang would not draft .* the normed feature"),
        (three(feature_layers=(0, 3, 5)), "sglang", "layer 0"),
        (three(feature_layers=(1, 2, 3, 4)), "vllm", "the features of 4 layers"),
    ):
        with pytest.raises(InputError, match=message):
            save_drafter(tmp_path, drafter, deep, format=format)
    assert not list(tmp_path.iterdir())
    save_drafter(tmp_path / "forced", three(feature_layers=(1, 2, 3, 4)), deep, force=True)
    assert load_drafter(tmp_path / "forced", deep).network.config.feature_layers == (1, 2, 3, 4)

    small = specjax.DraftModel(SmallDecoder.start(deep.model, (0, 1), WORDS))
    few_heads = Medusa(MedusaHeads.random(MedusaConfig(32, 64, draft_vocab_size=3), d2t=offsets(WORDS)), chain_tree(2))
    wide = deep_target(hidden_size=40)
    for drafter, target, options, message in (
        (small, deep, {"format": "huggingface"}, "a whole model scores every token, and this one knows 3"),
        (few_heads, deep, {"format": "medusa"}, "score every token, and these know 3"),
        (small, wide, {}, "hidden_size 32, and the target has 40"),
        (one(), wide, {}, "hidden_size 32, and the target has 40"),
        (three(), deep_target(num_layers=4), {}, "feature layer 5 does not exist"),
        (one(), testing.tiny_target(testing.TableModel.random(64)), {}, "decoder, got a TableModel"),
        (one(), deep.model, {}, "expected what specjax.load returns"),
        (specjax.PromptLookup(), deep, {}, "expected an Eagle, Mtp, Medusa or DraftModel"),
        (one(own_embedding=True), deep, {"embeddings": False}, "embeddings of its own"),
        (small, deep, {"embeddings": True}, "only EAGLE's files"),
        (one(), deep, {"training": {"loss": float("nan")}}, "training: expected what JSON can hold"),
        (one(), deep, {"training": {"when": object()}}, "training: expected what JSON can hold"),
        (one(), deep, {"dtype": "int8"}, "dtype 'int8'"),
    ):
        with pytest.raises(InputError, match=message):
            save_drafter(tmp_path / "out", drafter, target, **options)
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match=r"another model's medusa_lm_head.safetensors; choose another directory"):
        save_drafter(stored / "medusa", one(), deep)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        save_drafter(tmp_path / "file", one(), deep)
    table = testing.TableModel.random(64)
    with pytest.raises(InputError, match="decoder, got a TableModel"):
        save_drafter(tmp_path / "out", specjax.DraftModel(table), testing.tiny_target(table))


def test_trees_that_do_not_fit(stored: Path, deep: specjax.Target) -> None:
    with pytest.raises(InputError, match="sample"):
        load_drafter(stored / "eagle1", deep, tree=GrownTree(), sample=True)
    assert load_drafter(stored / "medusa", deep, tree=static_tree([(0,), (4,)])).tree.num_nodes == 2
