"""What a user passes: everything unusable is one InputError that says what was given, before anything is computed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import InputError, Sampling, testing
from specjax.requests import row_keys
from specjax.text import certain_text, final_text


@pytest.fixture(scope="module")
def target() -> specjax.Target:
    return testing.tiny_target(testing.TableModel.random(vocab_size=8), tokenizer=testing.TinyTokenizer())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "prompts: expected at least one"),
        ({"prompts": "text"}, "write .prompt. for one"),
        ({"prompts": [[]]}, "prompt 0: expected text"),
        ({"prompts": [""]}, "prompt 0: expected text"),
        ({"prompts": [[1], [9]]}, "prompt 1: token id 9 is outside the vocabulary of 8"),
        ({"prompts": [[-1]]}, "token id -1 is outside"),
        ({"prompts": [[1.5]]}, "expected token ids, got 1.5"),
        ({"prompts": [[1] * 4096]}, "prompt 0 has 4096 tokens, but the context of 4096"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected a whole number of at least 1, got 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"law": "gready"}, "unknown law 'gready'"),
        ({"law": 5}, "unknown law 5"),
        ({"law": specjax.Greedy}, "unknown law"),
        ({"law": "greedy", "sampling": Sampling(temperature=1.0)}, "greedy law needs temperature 0"),
        ({"sampling": 0.8}, "sampling: expected specjax.Sampling"),
        ({"sampling": Sampling(temperature=-1)}, "temperature is -1; expected 0"),
        ({"sampling": Sampling(top_p=0)}, "top_p is 0; expected above 0 and at most 1"),
        ({"sampling": Sampling(top_p=1.5)}, "top_p is 1.5"),
        ({"sampling": Sampling(temperature=[1.0, 1.0])}, "expected one number, or 1"),
        ({"sampling": Sampling(repetition_penalty=0)}, "repetition_penalty is 0"),
        ({"sampling": Sampling(processors=max)}, "processors must be a tuple"),
        (
            {"sampling": Sampling(processors=(lambda logits, tokens, length: logits[:3],))},
            "returned .3,.; expected .8,.",
        ),
        ({"stop": 5}, "stop: expected a non-empty string"),
        ({"stop": ["a", ""]}, "stop: expected a non-empty string"),
        ({"stop": "\ud800"}, "not text that can be encoded"),
        ({"stop": "a" * 20_000_000}, "need a table of"),
        ({"seed": -1}, "seed: expected whole numbers from 0"),
        ({"seed": 2**32}, "seed: expected whole numbers from 0"),
        ({"seed": 1.5}, "seed: expected a whole number"),
        ({"seed": [1, 2]}, "one for each of 1 prompts"),
        ({"seed": "ab"}, "seed: expected a whole number"),
        ({"drafter": 3}, "drafter: expected an object with init"),
        ({"drafter": specjax.PromptLookup}, "drafter: expected an object with init"),
    ],
)
def test_bad_requests(target: specjax.Target, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        specjax.generate(target, **{"prompts": [[1, 2]], "max_new_tokens": 4} | options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: specjax.PromptLookup(-1),
        lambda: specjax.PromptLookup("8"),
        lambda: specjax.PromptLookup(2.5),
        lambda: specjax.PromptLookup(min_ngram=3, max_ngram=2),
        lambda: specjax.PromptLookup(window=0),
        lambda: specjax.PromptLookup(block_sizes=4),
        lambda: specjax.DraftModel(None),
        lambda: specjax.DraftModel("path"),
        lambda: specjax.DraftModel(testing.TableModel.random(4), num_draft_tokens=-2),
    ],
)
def test_bad_drafters(make: Any) -> None:
    with pytest.raises(InputError):
        make()


def test_a_target_is_what_load_returns(target: specjax.Target) -> None:
    with pytest.raises(InputError, match=r"expected what specjax\.load returns"):
        specjax.generate(target.model, [[1]])


def test_a_draft_model_must_share_the_vocabulary_also_inside_a_wrapper(target: specjax.Target) -> None:
    other = specjax.DraftModel(testing.TableModel.random(vocab_size=4))
    for drafter in (other, testing.Idle(other)):
        with pytest.raises(InputError, match="has 4 tokens and the target 8"):
            specjax.generate(target, [[1]], drafter)


def test_prompts_may_be_arrays(target: specjax.Target) -> None:
    expected = specjax.generate(target, [[1, 2, 3]], max_new_tokens=4).token_ids
    for prompt in (np.array([1, 2, 3]), jnp.array([1, 2, 3]), (1, 2, 3)):
        assert specjax.generate(target, [prompt], max_new_tokens=4).token_ids == expected


def test_a_cap_beyond_the_context_costs_nothing() -> None:
    """The trace has room for what fits into the context, not for what was allowed."""
    target = testing.tiny_target(testing.TableModel.random(vocab_size=8))
    job = specjax.prepare(target, [[1, 2]], max_new_tokens=10**10, trace=True)
    assert job.arguments["trace_rounds"] == target.model.max_positions - 2


def test_different_seeds_are_different_keys() -> None:
    def data(seed: Any, batch: int) -> list[list[int]]:
        return jax.random.key_data(row_keys(seed, batch)).tolist()

    assert len({str(data(seed, 1)) for seed in (0, 1, 2**31, 2**32 - 1)}) == 4
    # a seed per prompt: the row's place does not matter; one seed: it does
    assert data([7, 7], 2) == data(7, 1) * 2
    assert data(7, 2)[0] != data(7, 2)[1]


class Spelled:
    """A tokenizer that takes one space from the beginning of a text, as SentencePiece decoders do."""

    def __init__(self, *pieces: bytes):
        self.pieces = list(pieces)

    def token_bytes(self) -> list[bytes]:
        return self.pieces

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace").removeprefix(" ")


def test_text_ends_before_a_stop_string_that_begins_with_the_stripped_space() -> None:
    tokenizer: Any = Spelled(b" foo", b" bar")
    assert final_text(tokenizer, [0, 1]) == "foo bar"
    assert final_text(tokenizer, [0], [" foo"]) == ""
    assert certain_text(tokenizer, [0, 1], [" bars"]) == "foo"


def test_a_stream_never_takes_text_back() -> None:
    """Halves of characters wait for their rest; invalid bytes are shown as such once that is certain."""
    tokenizer: Any = Spelled(b"\xc3", b"\xa9", b"\x80", b"a")
    ids, shown = [3, 0, 1, 2, 3, 0], ""
    for n in range(1, len(ids) + 1):
        text = certain_text(tokenizer, ids[:n])
        assert text.startswith(shown)
        shown = text
    assert shown == "a\u00e9\ufffda"
    assert final_text(tokenizer, ids).startswith(shown)
