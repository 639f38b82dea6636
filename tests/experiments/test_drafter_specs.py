"""Drafters by name on the command line."""

from pathlib import Path

import pytest
from common.drafters import parse_drafter, parse_drafters

import specjax
from specjax import InputError, testing
from specjax.drafters.eagle import Eagle
from specjax.drafters.eagle_config import EagleConfig
from specjax.drafters.eagle_networks import EagleNetwork
from specjax.drafters.growing import GrownTree
from specjax.drafters.mtp import Mtp, MtpConfig, MtpNetwork
from specjax.ladder import ladder
from specjax.trees import chain_tree


def test_names_and_settings():
    target = testing.tiny_target(testing.TableModel.random())
    assert parse_drafter("plain").make(target).drafter == specjax.Plain()
    assert parse_drafter("prompt-lookup").make(target).drafter == specjax.PromptLookup()
    assert parse_drafter("recycling:k=9,fresh=2").make(target).drafter == specjax.TokenRecycling(9, fresh=2)
    lookahead = parse_drafter("lookahead:W=4,N=3,G=2,seed_prompt=false").make(target).drafter
    assert lookahead == specjax.LookaheadDecoding(4, ngram=3, guesses=2, seed_prompt=False)
    suffix = parse_drafter("suffix:k=5,factor=1.5,min_probability=0.2,min_match=1,max_match=8").make(target)
    expected = specjax.SuffixDecoding(5, factor=1.5, min_probability=0.2, min_match=1, max_match=8)
    assert (suffix.drafter, suffix.num_draft_tokens) == (expected, 5)
    named = parse_drafter("prompt-lookup:k=5,max_ngram=3,min_ngram=1,window=64").make(target)
    assert named.drafter == specjax.PromptLookup(5, max_ngram=3, min_ngram=1, window=64)
    assert (named.num_draft_tokens, named.kind) == (5, "prompt-lookup")
    sure = parse_drafter("early-exit:layers=1,k=3,min_confidence=0.4").make(target).drafter
    assert sure == specjax.EarlyExit(1, 3, min_confidence=0.4)
    assert named.label == "prompt-lookup:k=5,max_ngram=3,min_ngram=1,window=64"


def test_combinations():
    """Drafters as they would be asked for alone, in this order, and settings of the combination anywhere."""
    target = testing.tiny_target(testing.tiny_model(vocab_size=12))
    made = parse_drafter("combined:prompt-lookup:k=5;total=7;early-exit:layers=1,k=3,sample=false").make(target)
    parts = (specjax.PromptLookup(5), specjax.EarlyExit(1, 3, sample=False))
    assert (made.kind, made.num_draft_tokens) == ("combined", 7)
    assert made.drafter == specjax.Combined(parts, total=7)
    assert parse_drafter("combined:plain;suffix").make(target).drafter.parts == (
        specjax.Plain(),
        specjax.SuffixDecoding(),
    )


def test_drafters_that_adapt(monkeypatch: pytest.MonkeyPatch):
    """Made with the costs at their batch size; settings of the adapting stand before the drafter."""
    target, asked = testing.tiny_target(testing.tiny_model(vocab_size=12, max_positions=100)), []

    def costs(target: specjax.Target, drafter: specjax.Drafter, batch_size: int, context: int) -> specjax.Costs:
        asked.append((drafter, batch_size, context))
        return specjax.Costs.of(drafter, range(1, 1 + len(ladder(drafter))))

    monkeypatch.setattr(specjax, "measure_costs", costs)
    made = parse_drafter("adaptive:prompt-lookup:k=8,max_ngram=3").make(target, batch_size=4)
    assert asked == [(specjax.PromptLookup(8, max_ngram=3), 4, 50)]
    assert (made.kind, made.num_draft_tokens, made.drafter.drafter) == ("adaptive", 8, asked[0][0])
    set_up = parse_drafter("adaptive:prior=0.8;patience=3;combined:total=6;prompt-lookup:k=4;suffix:k=4").make(target)
    assert asked[1][1:] == (1, 50)
    assert set_up.drafter.drafter == specjax.Combined((specjax.PromptLookup(4), specjax.SuffixDecoding(4)), total=6)
    assert (set_up.drafter.prior, set_up.drafter.patience) == (0.8, 3)


def test_a_drafter_is_loaded_from_its_path(tmp_path: Path):
    """A path may have colons; the name says what is expected there, settings replace the stored ones."""
    target = testing.tiny_target(testing.tiny_model(vocab_size=12))
    path = tmp_path / "some:where"
    network = EagleNetwork.random(EagleConfig.of(target.model.config))
    specjax.save_drafter(path, Eagle(network, chain_tree(2)), target)
    named = parse_drafter(f"eagle:{path}").make(target)
    assert (named.kind, named.drafter.name, named.num_draft_tokens) == ("eagle", "eagle1", 2)
    assert parse_drafter(f"eagle:{path},k=3,sample=false").make(target).drafter.sample is False
    grown = parse_drafter(f"eagle:{path},depth=3,top_k=4,total=9").make(target)
    assert (grown.drafter.tree, grown.num_draft_tokens) == (GrownTree(3, 4, 9), 8)
    with pytest.raises(InputError, match=r"medusa:.* that is another kind of drafter, eagle1"):
        parse_drafter(f"medusa:{path}").make(target)
    modules = MtpNetwork.random(MtpConfig.of(target.model.config, 2))
    specjax.save_drafter(tmp_path / "mtp", Mtp(modules, chain_tree(2)), target)
    named = parse_drafter(f"mtp:{tmp_path / 'mtp'},k=3").make(target)
    assert (named.kind, named.drafter.name, named.num_draft_tokens) == ("mtp", "mtp", 3)
    with pytest.raises(InputError, match=r"eagle:.* that is another kind of drafter, mtp"):
        parse_drafter(f"eagle:{tmp_path / 'mtp'}").make(target)
    with pytest.raises(InputError, match="k is a chain's length; depth are a grown tree's"):
        parse_drafter(f"eagle:{path},k=3,depth=2").make(target)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("egale:k=3", "unknown drafter 'egale': expected one of plain, prompt-lookup, draft-model, medusa, eagle"),
        ("prompt-lookup:n=3", "unknown setting 'n'; prompt-lookup has k, max_ngram, min_ngram, window"),
        ("recycling:matrix=nowhere.npy", "matrix is 'nowhere.npy'; expected a .npy file"),
        ("suffix:factor=x", "factor is 'x'; expected a number"),
        ("prompt-lookup:k=-1", "k is '-1'; expected a whole number of at least 1"),
        ("prompt-lookup:k=2.5", "k is '2.5'; expected a whole number"),
        ("prompt-lookup:k=", "k is ''; expected a whole number"),
        ("prompt-lookup:k=2,k=3", "k is given twice"),
        ("prompt-lookup:8", "'8' is no setting; expected key=value"),
        ("prompt-lookup:max_ngram=2,min_ngram=3", "min_ngram: expected at most"),
        ("plain:k=1", "unknown setting 'k'; plain has no settings"),
        ("draft-model", "expected draft-model:PATH"),
        ("eagle:k=3", "expected eagle:PATH"),
        ("draft-model:a,b", "expected draft-model:PATH with one path"),
        ("early-exit", "layers: expected a whole number of at least 1, got None"),
        ("combined", "combined: expected two drafters or more, such as combined:prompt-lookup:k=4;suffix"),
        ("combined:suffix", "expected two drafters or more"),
        ("combined:suffix;combined:plain", "combined:plain: expected two drafters or more"),
        ("combined:suffix;lookup", "unknown drafter 'lookup'"),
        ("combined:k=2;suffix;plain", "unknown setting 'k'; combined has total"),
        ("combined:suffix;prompt-lookup:total=3", "unknown setting 'total'; prompt-lookup has k"),
        ("combined:total=0;suffix;plain", "total is '0'; expected a whole number of at least 1"),
        ("combined:suffix;adaptive:prompt-lookup", "parts do not adapt by themselves; expected adaptive:combined:…"),
        ("adaptive", "expected a drafter, such as adaptive:prompt-lookup:k=8"),
        ("adaptive:prior=0.5", "expected a drafter, such as"),
        ("adaptive:k=8;prompt-lookup", "unknown setting 'k'; adaptive has prior"),
        ("adaptive:prompt-lookup,k=8", "expected a drafter, such as adaptive:prompt-lookup:k=8"),
        ("adaptive:prompt-lookup;suffix", "unknown drafter 'prompt-lookup;suffix'"),
        ("adaptive:plain", "there is nothing to adapt in plain"),
        ("adaptive:patience=0;suffix", "patience is '0'; expected a whole number of at least 1"),
        ("early-exit:layers=1,min_confidence=2", "min_confidence: expected a probability"),
        ("draft-model:a,sample=maybe", "sample is 'maybe'; expected true or false"),
    ],
)
def test_what_cannot_be_read_is_named_in_one_line(text: str, message: str):
    with pytest.raises(InputError) as error:
        parse_drafter(text).make(testing.tiny_target(testing.TableModel.random()))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_plain_decoding_comes_first_asked_for_or_not():
    assert [d.label for d in parse_drafters(["prompt-lookup:k=2"])] == ["plain", "prompt-lookup:k=2"]
    assert [d.label for d in parse_drafters(["prompt-lookup:k=2", "plain"])] == ["plain", "prompt-lookup:k=2"]
    with pytest.raises(InputError, match="given twice"):
        parse_drafters(["prompt-lookup", "prompt-lookup"])
