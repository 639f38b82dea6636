"""Drafters by name on the command line."""

import pytest
from common.drafters import parse_drafter, parse_drafters

import specjax
from specjax import InputError


def test_names_and_settings():
    assert parse_drafter("plain").drafter == specjax.Plain()
    assert parse_drafter("prompt-lookup").drafter == specjax.PromptLookup()
    named = parse_drafter("prompt-lookup:k=5,max_ngram=3,min_ngram=1,window=64")
    assert named.drafter == specjax.PromptLookup(5, max_ngram=3, min_ngram=1, window=64)
    assert (named.num_draft_tokens, named.kind) == (5, "prompt-lookup")
    assert named.label == "prompt-lookup:k=5,max_ngram=3,min_ngram=1,window=64"


def test_a_draft_model_is_loaded_from_its_path(loaded: specjax.Target):
    drafter = parse_drafter("draft-model:some/where:else,k=3,sample=false").drafter
    assert isinstance(drafter, specjax.DraftModel)
    assert (drafter.num_draft_tokens, drafter.sample, drafter.model is loaded.model) == (3, False, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eagle:k=3", "unknown drafter 'eagle': expected one of plain, prompt-lookup, draft-model"),
        ("prompt-lookup:n=3", "unknown setting 'n'; prompt-lookup has k, max_ngram, min_ngram, window"),
        ("prompt-lookup:k=-1", "k is '-1'; expected a whole number of at least 1"),
        ("prompt-lookup:k=2.5", "k is '2.5'; expected a whole number"),
        ("prompt-lookup:k=", "k is ''; expected a whole number"),
        ("prompt-lookup:k=2,k=3", "k is given twice"),
        ("prompt-lookup:8", "'8' is no setting; expected key=value"),
        ("prompt-lookup:max_ngram=2,min_ngram=3", "min_ngram: expected at most"),
        ("plain:k=1", "unknown setting 'k'; plain has no settings"),
        ("draft-model", "expected draft-model:PATH"),
        ("draft-model:k=3", "expected draft-model:PATH"),
        ("draft-model:a,b", "expected draft-model:PATH with one path"),
        ("draft-model:a,sample=maybe", "sample is 'maybe'; expected true or false"),
    ],
)
def test_what_cannot_be_read_is_named_in_one_line(text: str, message: str):
    with pytest.raises(InputError) as error:
        parse_drafter(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_plain_decoding_comes_first_asked_for_or_not():
    assert [d.label for d in parse_drafters(["prompt-lookup:k=2"])] == ["plain", "prompt-lookup:k=2"]
    assert [d.label for d in parse_drafters(["prompt-lookup:k=2", "plain"])] == ["plain", "prompt-lookup:k=2"]
    with pytest.raises(InputError, match="given twice"):
        parse_drafters(["prompt-lookup", "prompt-lookup"])
