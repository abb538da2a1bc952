"""How a device is divided: by shares among slots, by rows within one, and never more than the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.pool.parts import WHOLE, Member, parts


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([], {}),
        ([Member(1, "a", 1.0, 7)], {1: WHOLE}),
        ([Member(1, "a", 0.25, 4), Member(2, "b", 0.75, 9)], {1: 250_000, 2: 750_000}),
        # One batch of 16 rows: a quarter is 4 of them.
        ([Member(1, "a", 1.0, 4), Member(2, "a", 1.0, 12)], {1: 250_000, 2: 750_000}),
        # Half the device, divided by three: rounded down.
        ([Member(n, "a", 0.5, 5) for n in (1, 2, 3)] + [Member(4, "b", 0.5, 1)],
         {1: 166_666, 2: 166_666, 3: 166_666, 4: 500_000}),
        # Nobody counts for nothing.
        ([Member(1, "a", 1.0, 0), Member(2, "a", 1.0, 3)], {1: 250_000, 2: 750_000}),
        # More than a device was given away: 3/4 and 1/4 of it.
        ([Member(1, "a", 0.9, 1), Member(2, "b", 0.3, 1)], {1: 750_000, 2: 250_000}),
    ],
)  # fmt: skip
def test_parts_worked_out_by_hand(members, expected):
    assert parts(members) == expected


members = st.lists(
    st.builds(
        Member,
        key=st.integers(1, 10**9),
        slot=st.sampled_from("abcd"),
        share=st.floats(0.001, 1.0),
        rows=st.integers(0, 500),
    ),
    max_size=12,
    unique_by=lambda member: member.key,
)


@given(members=members)
def test_all_parts_together_are_never_more_than_the_device(members):
    found = parts(members)
    assert found.keys() == {member.key for member in members}
    assert sum(found.values()) <= WHOLE
    assert min(found.values(), default=0) >= 0


@given(members=members.filter(bool), newcomer=st.integers(0, 500))
def test_who_joins_a_batch_takes_from_nobody_but_that_batch(members, newcomer):
    mates = [member for member in members if member.slot == "a"]
    before, after = (
        parts(members),
        parts([*members, Member(0, "a", max((m.share for m in mates), default=0.001), newcomer)]),
    )
    for member in members:
        if member.slot == "a":
            assert after[member.key] <= before[member.key]
        elif mates:
            assert after[member.key] == before[member.key]
