"""A round trace as text."""

from common.trace import rounds_as_data, rounds_as_text

from specjax import Round

CHAIN = Round(proposed=[5, 6, 7], parents=[-1, 0, 1], accepted=[0, 1], committed=[5, 6, 9], block_tokens=4)
NOTHING = Round(proposed=[], parents=[], accepted=[], committed=[8], block_tokens=1)
TREE = Round(proposed=[5, 6, 7], parents=[-1, -1, 1], accepted=[1, 2], committed=[6, 7, 9], block_tokens=4)
CUT = Round(proposed=[5, 6], parents=[-1, 0], accepted=[0, 1], committed=[5, 6], block_tokens=4)


def decode(ids: list[int]) -> str:
    return "".join(f" t{i}" for i in ids)


def test_text():
    lines = list(rounds_as_text([CHAIN, NOTHING, TREE, CUT], decode))
    assert lines == [
        "   1  block  4  accepted  2 of  3  ' t5' ' t6' [' t7']  → ' t9'",
        "   2  block  1  accepted  0 of  0  –  → ' t8'",
        "   3  block  4  accepted  2 of  3  [' t5'] <0 ' t6' ' t7'  → ' t9'",
        "   4  block  4  accepted  2 of  2  ' t5' ' t6'  → (stop)",
    ]


def test_data_gives_parents_where_the_draft_is_no_chain():
    chain, tree = rounds_as_data([CHAIN, TREE])
    assert chain == {"proposed": [5, 6, 7], "accepted": [0, 1], "committed": [5, 6, 9], "block_tokens": 4}
    assert tree["parents"] == [-1, -1, 1]
