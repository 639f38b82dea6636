"""Numbers of a results row, by hand from fixed counts."""

from dataclasses import replace

import pytest
from common.drafters import Named, parse_drafter
from common.evaluation import Call, make_units
from common.exact import Fork
from common.prompts import Conversation
from common.summary import find_forks, speedup, speedup_interval, summarize

import specjax
from specjax import Generation, Stats, testing
from specjax.laws import Law
from specjax.requests import LAWS

TARGET = testing.tiny_target(testing.TableModel.random())
PLAIN, LOOKUP = (parse_drafter(text).make(TARGET) for text in ("plain", "prompt-lookup:k=3"))
CONVERSATIONS = [Conversation(i, "a" if i < 3 else "b", i, ("hello",)) for i in range(5)]

# Three rounds of one row, k = 3: proposed 3, accepted 3; proposed 3, accepted 1, the second rejected; nothing proposed.
COUNTS = Stats(
    new_tokens=7,
    target_calls=3,
    proposed=6,
    accepted=4,
    rejected=1,
    proposed_at=(2, 2, 2),
    reached_at=(2, 2, 1),
    accepted_at=(2, 1, 1),
)


def call(
    drafter: Named,
    unit: int,
    seconds: list[float],
    stats: Stats,
    ids: list[int] | None = None,
    law: Law = LAWS["greedy"],
) -> Call:
    generation = Generation(
        law=law,
        prompt_ids=[[1]],
        token_ids=[ids or list(range(stats.new_tokens))],
        texts=[""],
        finish_reasons=["length"],
        stats=stats,
        row_stats=[stats],
        logprobs=None,
        trace=None,
        prefill_seconds=0.5,
        seconds=seconds[0],
    )
    rows = (CONVERSATIONS[unit],)
    return Call("a", unit, 0, drafter, rows, generation, tuple(seconds), tuple(0.5 for _ in seconds))


def plain_stats(tokens: int) -> Stats:
    return Stats(new_tokens=tokens, target_calls=tokens)


def test_a_row_by_hand():
    calls = [
        call(PLAIN, 0, [7.0, 9.0, 6.0], plain_stats(7)),
        call(LOOKUP, 0, [4.0, 2.0, 3.0], COUNTS),
        call(PLAIN, 1, [1.0], plain_stats(3)),
        call(LOOKUP, 1, [1.0], Stats(3, 3)),
    ]
    plain, lookup = summarize(calls, "a", {}, {"plain": None, LOOKUP.label: 0.01}, 0.0)
    assert (plain["drafter"], plain["tokens_per_call"], plain["speedup"]) == ("plain", 1.0, 1.0)
    assert plain["acceptance_rate"] is None
    assert plain["tokens_per_second"] == pytest.approx(10 / 8)
    assert lookup["new_tokens"] == 10
    assert lookup["target_calls"] == 6
    assert lookup["tokens_per_call"] == pytest.approx(10 / 6)
    assert lookup["acceptance_rate"] == pytest.approx(4 / 6)
    assert lookup["alpha"] == pytest.approx(4 / 5)
    assert lookup["acceptance_by_position"]["marginal"] == pytest.approx([1.0, 0.5, 0.5])
    assert lookup["acceptance_by_position"]["conditional"] == pytest.approx([1.0, 0.5, 1.0])
    assert lookup["seconds"] == pytest.approx(3 + 1)  # the median of a prompt's repetitions
    assert lookup["prefill_seconds"] == pytest.approx(1.0)
    assert lookup["tokens_per_second"] == pytest.approx(2.5)
    assert lookup["speedup"] == pytest.approx(2.0)
    assert lookup["matches_plain"] is True
    assert (lookup["law"], lookup["num_draft_tokens"], lookup["batch_size"], lookup["draft_cost"]) == (
        "greedy",
        3,
        1,
        0.01,
    )


def test_every_promised_field_is_there():
    calls = [call(PLAIN, 0, [1.0], plain_stats(7)), call(LOOKUP, 0, [1.0], COUNTS)]
    promised = (
        "task drafter law lossless num_draft_tokens batch_size temperature new_tokens target_calls tokens_per_call "
        "acceptance_rate alpha acceptance_by_position draft_cost prefill_seconds seconds tokens_per_second speedup "
        "speedup_interval matches_plain"
    )
    for row in summarize(calls, "a", {}, {"plain": None, LOOKUP.label: None}, 0.0):
        assert set(promised.split()) <= set(row)


def test_sampled_texts_are_not_compared():
    calls = [call(PLAIN, 0, [1.0], plain_stats(7)), call(LOOKUP, 0, [1.0], COUNTS)]
    rows = summarize(calls, "a", {}, {"plain": None, LOOKUP.label: None}, 0.8)
    assert [row["matches_plain"] for row in rows] == [None, None]


def test_forks_are_counted_as_near_ties_or_faults():
    calls = [
        call(PLAIN, 0, [1.0], plain_stats(3), [4, 5, 6]),
        call(LOOKUP, 0, [1.0], COUNTS, [4, 5, 7]),
        call(PLAIN, 1, [1.0], plain_stats(3), [4, 5, 6]),
        call(LOOKUP, 1, [1.0], COUNTS, [9, 5, 6]),
        call(PLAIN, 2, [1.0], plain_stats(3), [4, 5, 6]),
        call(LOOKUP, 2, [1.0], COUNTS, [4, 5, 6]),
    ]

    def examine(prompt: list[int], plain: list[int], other: list[int]) -> Fork | None:
        gap = 1e-6 if other[0] == 4 else 1.0
        return None if plain == other else Fork(0, plain[0], other[0], gap, gap, 1e-4)

    forks = find_forks(calls, examine)
    _, row = summarize(calls, "a", forks, {"plain": None, LOOKUP.label: None}, 0.0)
    assert (row["matches_plain"], row["near_ties"], row["faults"], row["other_texts"]) == (False, 1, 1, 0)
    laws = {PLAIN.label: LAWS["greedy"], LOOKUP.label: specjax.Typical()}
    calls = [replace(c, generation=replace(c.generation, law=laws[c.drafter.label])) for c in calls]
    plain, row = summarize(calls, "a", forks, {"plain": None, LOOKUP.label: None}, 0.0)
    assert (row["matches_plain"], row["near_ties"], row["faults"], row["other_texts"]) == (False, 1, 0, 1)
    assert (plain["law"], plain["lossless"], plain["law_settings"]) == ("greedy", True, {})
    assert (row["law"], row["lossless"]) == ("typical", False)
    assert row["law_settings"] == {"epsilon": 0.09, "alpha": 0.3}


def test_the_interval_holds_the_ratio_and_is_narrow_where_all_agree():
    plain = [call(PLAIN, i, [2.0], plain_stats(7)) for i in range(5)]
    same = [call(LOOKUP, i, [1.0], COUNTS) for i in range(5)]
    assert speedup(same, plain) == pytest.approx(2.0)
    assert speedup_interval(same, plain) == pytest.approx([2.0, 2.0])
    mixed = [call(LOOKUP, i, [0.5 + 0.25 * i], COUNTS) for i in range(5)]
    low, high = speedup_interval(mixed, plain) or (0, 0)
    assert speedup(mixed, plain) == pytest.approx(2.0)
    assert low < 2 < high
    assert low >= 10 / 7.5
    assert high <= 4


def test_one_prompt_has_an_interval_only_if_it_was_repeated():
    plain = [call(PLAIN, 0, [2.0, 2.2, 2.1], plain_stats(7))]
    assert speedup_interval([call(LOOKUP, 0, [1.0], COUNTS)], [call(PLAIN, 0, [2.0], plain_stats(7))]) is None
    low, high = speedup_interval([call(LOOKUP, 0, [1.0, 1.1, 0.9], COUNTS)], plain) or (0, 0)
    assert 2.0 / 1.1 <= low < high <= 2.2 / 0.9


def test_units_are_batches_within_a_task():
    units = make_units(CONVERSATIONS, 2)
    assert [(u.task, [c.index for c in u.members]) for u in units] == [("a", [0, 1]), ("a", [2]), ("b", [3, 4])]


def test_totals_add_up():
    assert Stats.total([COUNTS, specjax.Stats(3, 3)]).tokens_per_call == pytest.approx(10 / 6)
