"""The loop: what a step computes, what is reported, kept and refused."""

import gc
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from toy import LENGTH, Toy, toy_network, toy_rows, toy_run

from specjax import testing
from specjax.drafters.medusa import MedusaConfig, MedusaHeads
from specjax.errors import CheckpointError, InputError, TrainingError
from specjax.training import journal
from specjax.training.batches import lay_out
from specjax.training.checkpoints import Checkpoints, load_weights
from specjax.training.features import online
from specjax.training.loop import Run
from specjax.training.mesh import parse_mesh
from specjax.training.progress import line
from specjax.training.rendering import Rendered
from specjax.training.state import make_state, take_apart
from specjax.training.step import make_step, micro_batches

CACHE = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


def same(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Most runs here have the same program; it is compiled once."""
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    for name, value in zip(CACHE, (str(tmp_path_factory.mktemp("programs")), 0.0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in zip(CACHE, before, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def target() -> Any:
    return testing.tiny_target()


@pytest.fixture(scope="module")
def trained(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of twenty steps, evaluated at every fifth; its directory and outcome."""
    directory = tmp_path_factory.mktemp("run")
    scores = iter([1.5, 2.5, 2.0, 1.0])
    outcome = toy_run(
        directory,
        target=target,
        evaluate=lambda _: {"tokens_per_call": next(scores)},
        evaluate_every=5,
        schedule="cosine",
    )
    return directory, outcome


def test_learning(trained: Any) -> None:
    directory, outcome = trained
    assert (outcome.step, outcome.stopped, outcome.empty_steps) == (20, False, 0)
    rows = [row for row in journal.read(directory) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    assert rows[-1]["accuracy.1"] > 0.8 > 0.2 > rows[0]["accuracy.1"]
    assert {row["supervised"] for row in rows} > {rows[0]["supervised"]}  # batches of unequal size
    assert rows[0]["learning_rate"] == pytest.approx(1e-2)
    assert [row["step"] for row in journal.read(directory) if "evaluation.tokens_per_call" in row] == [5, 10, 15, 20]


def test_the_best_and_the_last_are_kept(trained: Any) -> None:
    directory, outcome = trained
    assert (outcome.best, outcome.last) == (10, 20)
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["10", "20"]
    assert same(load_weights(directory, toy_network(9), "last"), outcome.network)
    best = load_weights(directory, toy_network(9))
    assert same(best, load_weights(directory, toy_network(9), "10"))
    assert not same(best, outcome.network)
    with pytest.raises(CheckpointError, match="no checkpoint 'newest'"):
        load_weights(directory, toy_network(), "newest")
    with pytest.raises(CheckpointError, match=r"no checkpoint '15'"):
        load_weights(directory, toy_network(), "15")
    with pytest.raises(
        CheckpointError, match=r"params.bias is \(2, 1, 32\) in the checkpoint and \(3, 1, 32\) in this"
    ):
        load_weights(directory, MedusaHeads.random(MedusaConfig(32, 64, num_heads=3)))
    with pytest.raises(CheckpointError, match="no checkpoints there"):
        load_weights(directory / "none", toy_network())


def test_a_finished_run_is_left_alone(trained: Any, target: Any) -> None:
    directory, outcome = trained
    before = (directory / journal.FILE).read_text()
    again = toy_run(directory, target=target, network=toy_network(5), evaluate=lambda _: {}, schedule="cosine")
    assert again.step == 20
    assert same(again.network, outcome.network)
    assert (directory / journal.FILE).read_text() == before


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"objective": Toy(noise=0.5)}, "its objective.noise is 0.0, and 0.5 is asked for"),
        ({"learning_rate": 0.02}, "its optimization.learning_rate is 0.01, and 0.02 is asked for"),
        ({"steps": 30}, "its optimization.steps is 20, and 30 is asked for"),
        ({"rows": toy_rows(30)}, "its rows is '"),
        ({"batch_size": 4}, "its batch_size is 8, and 4"),
        ({"seed": 1}, "its seed is 0, and 1"),
        ({"described": {"draft_vocabulary": "top 100"}}, "its draft_vocabulary is None, and 'top 100'"),
    ],
)
def test_another_configuration_is_refused(trained: Any, target: Any, changes: dict[str, Any], part: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(part)) as caught:
        toy_run(trained[0], **{"target": target, "schedule": "cosine", **changes})
    assert "\n" not in str(caught.value)


def one_step(
    target: Any, batch: Any, accumulation: int, dtype: str = "float32", features: Any = None, objective: Any = None
) -> Any:
    """The figures and the gradients of one step."""
    skeleton, params, buffers = take_apart(toy_network())
    optimizer = optax.identity()
    state = make_state(params, buffers, optimizer, 0)
    step = make_step(objective or Toy(), skeleton, target.model, optimizer, lambda _: 1.0, dtype, state)
    after, figures = step(state, *micro_batches((batch, features), accumulation))
    assert {x.dtype for x in after.params.values()} == {jnp.dtype("float32")}
    return jax.device_get(figures), jax.tree.map(lambda a, b: np.asarray(a - b), params, after.params)


def close(a: Any, b: Any, rtol: float = 1e-4) -> bool:
    """Whether gradients are the same, by the greatest of each array."""
    for name, value in b.items():
        np.testing.assert_allclose(a[name], value, rtol=0, atol=rtol * np.abs(value).max(), err_msg=name)
    return True


def test_the_gradient_is_that_of_the_mean_over_all_supervised_tokens(target: Any) -> None:
    """Whatever the accumulation, though micro-batches have different numbers of supervised tokens."""
    batch = toy_rows(8, buckets=[]).batch(range(8))
    assert len(set(batch.mask.sum(1).tolist())) > 3
    skeleton, params, buffers = take_apart(toy_network())

    @jax.jit
    @jax.value_and_grad
    def mean(params: Any, features: Any) -> Any:
        losses = Toy().losses(skeleton.network(params, buffers), target.model, batch, features, None)
        return losses.total / losses.count

    features = jax.device_get(jax.jit(lambda model: online(model, batch, ("hidden",)))(target.model))
    loss, wanted = mean(params, features)
    for accumulation in (1, 8):
        figures, found = one_step(target, batch, accumulation, features=features)
        assert float(figures["loss"]) == pytest.approx(float(loss), rel=1e-5)
        assert float(figures["gradient_norm"]) == pytest.approx(float(optax.tree.norm(wanted)), rel=1e-4)
        assert close(found, wanted)
    # parameters may have learning rates of their own, and a loss in bfloat16 is about the same one

    class Slower(Toy):
        rates: ClassVar[dict[str, float]] = {"head": 0.5, "lin": 0.0}

        def losses(self, network: Any, *rest: Any) -> Any:
            assert {x.dtype for x in take_apart(network)[1].values()} == {jnp.dtype("bfloat16")}
            return super().losses(network, *rest)

    half, found = one_step(target, batch, 2, "bfloat16", features, Slower())
    assert not found["linear"].any()
    found |= {"head": 2 * found["head"], "linear": wanted["linear"]}
    assert float(half["loss"]) == pytest.approx(float(loss), rel=1e-2)
    assert close(found, wanted, 0.05)


def test_micro_batches_do_not_depend_on_processes() -> None:
    whole = np.arange(24).reshape(12, 2)
    parts = [micro_batches(whole[start : start + 6], 3) for start in (0, 6)]
    assert np.array_equal(np.concatenate(parts, axis=1), micro_batches(whole, 3))
    assert micro_batches(whole, 3).shape == (3, 4, 2)


def test_stored_features(target: Any, tmp_path: Path) -> None:
    rows, asked = toy_rows(), []
    program = jax.jit(lambda model, batch: online(model, batch, ("hidden", "layer.1")))

    def read(numbers: np.ndarray) -> dict[str, np.ndarray]:
        asked.append(numbers)
        return jax.device_get(program(target.model, rows.batch(numbers.tolist())))

    changes = {"target": target, "steps": 3, "rows": rows}
    stored, computed = toy_run(tmp_path / "a", features_of=read, **changes), toy_run(tmp_path / "b", **changes)
    assert [numbers.shape for numbers in asked] == [(8,)] * 3
    assert close(take_apart(stored.network)[1], take_apart(computed.network)[1], 1e-3)
    with pytest.raises(InputError, match=r"the stored features have no 'hidden', which the objective reads: layer\.1"):
        toy_run(tmp_path / "c", features_of=lambda numbers: {"layer.1": read(numbers)["hidden"]}, **changes)
    with pytest.raises(InputError, match=r"stored feature 'hidden' is \(8, 9\) for rows of \(8, 16\)"):
        toy_run(tmp_path / "d", features_of=lambda numbers: {"hidden": np.zeros((8, 9, 32))}, **changes)


def test_a_step_without_supervision_changes_nothing(target: Any, tmp_path: Path) -> None:
    """The second token of a conversation is supervised, but heads predict from the third on."""
    rows = lay_out([Rendered(np.array([n, n + 1], np.int32), np.array([False, True]), "") for n in range(40)], LENGTH)
    outcome = toy_run(tmp_path, rows=rows, target=target, steps=3, weight_decay=0.1)
    assert outcome.empty_steps == outcome.step == 3
    assert same(outcome.network, toy_network())
    lines = journal.read(tmp_path)
    assert [(row["supervised"], row["loss"], row["gradient_norm"]) for row in lines] == [(0, 0, 0)] * 3


@dataclass(frozen=True)
class Breaking(Toy):
    """Not a number where a conversation begins with a certain token: in the loss, or in its gradient alone."""

    token: int = 63
    gradient_only: bool = False

    def losses(self, network: Any, target: Any, batch: Any, features: Any, key: Any) -> Any:
        losses = super().losses(network, target, batch, features, key)
        bad = ((batch.tokens == self.token) & (batch.positions == 0) & (batch.segments > 0)).any()
        x = network.bias[...].sum() * 0.0
        fault = x + jnp.where(bad, jnp.sqrt(x * x) if self.gradient_only else jnp.nan, 0.0)
        return type(losses)(losses.total + fault, losses.count, losses.figures)


@pytest.mark.parametrize("gradient_only", [False, True], ids=["loss", "gradient"])
def test_a_loss_that_is_no_number(gradient_only: bool, target: Any, tmp_path: Path) -> None:
    """The run ends there, says where, and what was good stays as it is."""
    made = [
        Rendered(np.full(LENGTH, n, np.int32), np.arange(LENGTH) > 1, f"data.jsonl, line {n}") for n in range(1, 41)
    ]
    rows = lay_out(made, LENGTH)
    objective = Breaking(token=7, gradient_only=gradient_only)
    with pytest.raises(TrainingError) as caught:
        toy_run(tmp_path, rows=rows, target=target, objective=objective, save_every=1)
    found = re.match(r"step (\d+): the (.*) is nan; .*: (data.jsonl, line .*)$", str(caught.value))
    assert found, caught.value
    assert found[2] == ("gradient norm" if gradient_only else "loss")
    step, conversations = int(found[1]), found[3].split("; ")
    assert "data.jsonl, line 7" in conversations
    assert len(conversations) == 8
    last = journal.read(tmp_path)[-1]
    assert (last["step"], last["conversations"]) == (step, conversations)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.last == (step - 1 or None)
    if step > 1:
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(load_weights(tmp_path, toy_network())))


def test_intervals_count_optimizer_steps(target: Any, tmp_path: Path) -> None:
    """Whatever the accumulation; and the compiled step is traced no more often in many steps than in one."""
    evaluated, traced = [], []

    @dataclass(frozen=True)
    class Counting(Toy):
        def losses(self, *args: Any) -> Any:
            traced.append(len(evaluated))
            return super().losses(*args)

    def evaluate(network: Any) -> dict[str, float]:
        evaluated.append(network.head[...].dtype)
        return {"tokens_per_call": 1.0, "loss": 2.0}

    toy_run(
        tmp_path,
        target=target,
        objective=Counting(),
        accumulation=4,
        steps=10,
        evaluate_every=4,
        log_every=3,
        evaluate=evaluate,
        compute_dtype="bfloat16",
    )
    steps = [(row["step"], "loss" in row) for row in journal.read(tmp_path)]
    assert steps == [(3, True), (4, False), (6, True), (8, False), (9, True), (10, False)]
    assert evaluated == [jnp.float32] * 3
    assert set(traced) == {0}


def test_buffers_are_the_checkpoint_s(target: Any, tmp_path: Path) -> None:
    """A draft vocabulary is not made anew when a run is continued."""

    def network(d2t: Any) -> MedusaHeads:
        config = MedusaConfig(32, 64, num_heads=2, draft_vocab_size=48)
        plain = MedusaHeads(config, lambda name, shape, axes: jnp.zeros(shape), np.asarray(d2t))
        return plain

    first, second = np.full(48, 5), np.full(48, 16)
    toy_run(tmp_path, target=target, network=network(first), steps=2, objective=Small())
    outcome = toy_run(tmp_path, target=target, network=network(second), steps=4, objective=Small())
    assert np.array_equal(outcome.network.d2t[...], first)
    assert np.array_equal(load_weights(tmp_path, network(second)).d2t[...], first)
    assert [row["step"] for row in journal.read(tmp_path)] == [1, 2, 3, 4]


@dataclass(frozen=True)
class Small(Toy):
    """Does not mind a draft vocabulary: its labels are draft ids."""

    def losses(self, network: Any, target: Any, batch: Any, features: Any, key: Any) -> Any:
        return super().losses(network, target, type(batch)(batch.tokens % 48, *_rest(batch)), features, key)


def _rest(batch: Any) -> tuple[Any, ...]:
    return batch.mask, batch.segments, batch.positions, batch.rows


def test_an_evaluation_without_its_number(target: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="step 2: the evaluation gave tokens_per_call None; expected a number"):
        toy_run(tmp_path, target=target, steps=2, evaluate=lambda _: {"loss": 1.0})


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"steps": 0}, "steps: expected a whole number of at least 1, got 0"),
        ({"accumulation": 0}, "accumulation"),
        ({"save_every": -1}, "save_every"),
        ({"seed": -1}, "seed"),
        ({"compute_dtype": "float16"}, "compute_dtype is 'float16'; expected one of float32, bfloat16"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError, match=part):
        Run(**{"directory": Path("x"), "steps": 1, "batch_size": 1, **settings})


def test_rows_that_cannot_be_dealt_out(target: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="batch size 8: expected a multiple of 3, accumulation 3"):
        toy_run(tmp_path, target=target, accumulation=3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "data", "data=0", "data=2,data=2", "rows=2", "data=-1", "data=²"])
def test_meshes_that_cannot_be(text: str) -> None:
    with pytest.raises(InputError, match=f"^mesh '{text}': "):
        parse_mesh(text)


def test_a_mesh_of_more_devices_than_there_are() -> None:
    number = 2 * len(jax.devices())
    with pytest.raises(InputError, match=f"mesh 'data={number}': {number} devices; there are {number // 2}"):
        parse_mesh(f"data={number}")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # tensorstore's, of what it gave up
def test_a_damaged_checkpoint(target: Any, tmp_path: Path) -> None:
    toy_run(tmp_path, target=target, steps=1)
    for file in (tmp_path / "checkpoints" / "1" / "weights").rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"checkpoints/1: this checkpoint cannot be read \(") as caught:
        toy_run(tmp_path, target=target, steps=1)
    assert "\n" not in str(caught.value)
    del caught
    gc.collect()


def test_a_directory_that_cannot_be_made(target: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/checkpoints: Not a directory"):
        toy_run(tmp_path / "file", target=target)


def test_what_the_bar_says() -> None:
    figures = {"loss": 1.23456, "accuracy.10": 0.1, "accuracy.2": 0.5, "accuracy.1": 0.756, "loss.feature": 3.0}
    assert line(figures) == "loss 1.2346 · accuracy 76/50/10%"
    assert line({"loss": 2.0}) == "loss 2.0000"


def test_one_process_at_a_time(target: Any, tmp_path: Path) -> None:
    with (
        Checkpoints(tmp_path),
        pytest.raises(CheckpointError, match="another process is training there"),
    ):
        toy_run(tmp_path, target=target)
    with Checkpoints(tmp_path) as free:
        assert free.steps == []
