"""The arithmetic of the bill, against numbers worked out by hand, and its promises on random histories."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.metering.division import (
    MICRO_USD,
    Occupant,
    Part,
    device_price,
    divide,
    fitting,
    from_us,
    occupant_price,
    peak_ppm,
    to_us,
)
from backend.pool.parts import WHOLE, share_ppm

S = 1_000_000
MS = 1_000
TWO_A_SECOND = 7200
SEVEN_NINTHS = 7 * MICRO_USD // 9


def occupant(key: int, start_us: int, end_us: int, share_ppm: int, payer: int | None = None) -> Occupant:
    """An occupant that pays for itself, if no payer is named."""
    return Occupant(key, start_us, end_us, share_ppm, key if payer is None else payer)


def amounts(parts: list[Part]) -> dict[int | None, int]:
    sums: dict[int | None, int] = {}
    for part in parts:
        sums[part.key] = sums.get(part.key, 0) + part.micro_usd
    return sums


def test_an_empty_window_is_idle_and_no_window_is_nothing():
    assert divide(TWO_A_SECOND, 0, 5 * S, 8 * S, [], {}) == [Part(None, 5 * S, 8 * S, 3 * S, 6)]
    assert divide(TWO_A_SECOND, 0, 5 * S, 5 * S, [], {}) == []


def test_two_occupants_that_overlap_in_part():
    # A: 0.6 x 40 s x 2 = 48. B: 0.4 x 50 s x 2 = 40. The device from 10 to 80 s: 140, so 52 stay.
    first, second = occupant(1, 10 * S, 50 * S, 600_000), occupant(2, 30 * S, 80 * S, 400_000)
    assert divide(TWO_A_SECOND, 0, 0, 100 * S, [second, first], {}) == [
        Part(None, 0, 10 * S, 10 * S, 20),
        Part(1, 10 * S, 50 * S, 24 * S, 48),
        Part(2, 30 * S, 80 * S, 20 * S, 40),
        Part(None, 10 * S, 80 * S, 26 * S, 52),
        Part(None, 80 * S, 100 * S, 20 * S, 40),
    ]


def test_idle_before_between_and_after():
    occupants = [occupant(1, 1 * S, 2 * S, WHOLE), occupant(2, 4 * S, 6 * S, WHOLE)]
    assert divide(TWO_A_SECOND, 0, 0, 7 * S, occupants, {}) == [
        Part(None, 0, 1 * S, 1 * S, 2),
        Part(1, 1 * S, 2 * S, 1 * S, 2),
        Part(None, 2 * S, 4 * S, 2 * S, 4),
        Part(2, 4 * S, 6 * S, 2 * S, 4),
        Part(None, 6 * S, 7 * S, 1 * S, 2),
    ]


def test_roundings_are_the_operators():
    # 1,000,000 an hour is 277.77... a second: C(1), C(2), C(3) = 277, 555, 833; each occupant pays 277.
    occupants = [occupant(1, 1 * S, 2 * S, WHOLE), occupant(2, 2 * S, 3 * S, WHOLE)]
    assert divide(1_000_000, 0, 1 * S, 3 * S, occupants, {}) == [
        Part(1, 1 * S, 2 * S, 1 * S, 277, SEVEN_NINTHS),
        Part(None, 1 * S, 2 * S, 0, 1),
        Part(2, 2 * S, 3 * S, 1 * S, 277, SEVEN_NINTHS),
        Part(None, 2 * S, 3 * S, 0, 1),
    ]


def test_a_reading_that_cuts_occupants_in_two_changes_no_bill():
    # 0.2 a millisecond: by 9 ms the device cost 1 and each half 0.9; by 10 ms it cost 2 and each half 1.
    halves = [occupant(1, 0, 10 * MS, 500_000), occupant(2, 0, 10 * MS, 500_000)]
    assert amounts(divide(720_000, 0, 0, 10 * MS, halves, {})) == {1: 1, 2: 1}
    carried: dict[int, int] = {}
    assert amounts(divide(720_000, 0, 0, 9 * MS, halves, carried)) == {1: 0, 2: 0, None: 1}
    assert carried == {1: 9 * MICRO_USD // 10, 2: 9 * MICRO_USD // 10}
    assert amounts(divide(720_000, 0, 9 * MS, 10 * MS, halves, carried)) == {1: 1, 2: 1, None: -1}
    assert carried == {1: 0, 2: 0}


def test_what_is_below_a_micro_dollar_is_carried_to_the_payers_next_occupant():
    # 1,000,000 an hour: 277.77... a second. One payer: 277, then 555.55... - 277 = 278, then 833.33... - 555.
    turns = [occupant(key, key * S, (key + 1) * S, WHOLE, payer=7) for key in (1, 2, 3)]
    carried: dict[int, int] = {}
    assert amounts(divide(1_000_000, 0, 1 * S, 4 * S, turns, carried)) == {1: 277, 2: 278, 3: 278, None: 1}
    assert carried == {7: MICRO_USD // 3}


def test_a_rest_is_carried_to_another_device_at_its_price():
    # 20 ms at 50,000 an hour are 0.277...; 0.277... + 13 ms at 200,000 an hour (0.722...) is 1.
    carried: dict[int, int] = {}
    assert amounts(divide(50_000, 0, 0, 20 * MS, [occupant(1, 0, 20 * MS, WHOLE, 7)], carried)) == {1: 0}
    assert amounts(divide(200_000, 0, 0, 13 * MS, [occupant(2, 0, 13 * MS, WHOLE, 7)], carried)) == {
        2: 1,
        None: -1,
    }
    assert carried == {7: 0}


def test_a_rest_below_nothing_is_worked_off_and_not_paid_out():
    carried = {7: -MICRO_USD // 2}
    assert amounts(divide(50_000, 0, 0, 20 * MS, [occupant(1, 0, 20 * MS, WHOLE, 7)], carried)) == {1: 0}
    assert carried == {7: 5 * MICRO_USD // 18 - MICRO_USD // 2}


def test_an_occupant_whose_share_changes_has_one_part_as_long_as_it_stays():
    # 2 a second: 10 s whole, 20 s of a quarter; a pause of 10 s; 10 s of a half.
    spans = [(0, 10, WHOLE), (10, 30, WHOLE // 4), (40, 50, WHOLE // 2)]
    changing = [occupant(1, start * S, end * S, share) for start, end, share in spans]
    assert divide(TWO_A_SECOND, 0, 0, 50 * S, changing, {}) == [
        Part(1, 0, 30 * S, 15 * S, 30),
        Part(None, 0, 30 * S, 15 * S, 30),
        Part(None, 30 * S, 40 * S, 10 * S, 20),
        Part(1, 40 * S, 50 * S, 5 * S, 10),
        Part(None, 40 * S, 50 * S, 5 * S, 10),
    ]


def test_those_who_change_beside_each_other_are_one_part_each():
    first = [occupant(1, 0, 10 * S, WHOLE), occupant(1, 10 * S, 20 * S, WHOLE // 2)]
    second = [occupant(2, 10 * S, 20 * S, WHOLE // 2), occupant(2, 20 * S, 30 * S, WHOLE)]
    assert divide(TWO_A_SECOND, 0, 0, 30 * S, [*first, *second], {}) == [
        Part(1, 0, 20 * S, 15 * S, 30),
        Part(2, 10 * S, 30 * S, 15 * S, 30),
    ]


def test_occupants_outside_the_window_and_empty_ones_have_no_part():
    outside = [
        occupant(1, 0, 5 * S, WHOLE),
        occupant(2, 9 * S, 12 * S, WHOLE),
        occupant(3, 7 * S, 7 * S, WHOLE),
    ]
    assert divide(TWO_A_SECOND, 0, 5 * S, 9 * S, outside, {}) == [Part(None, 5 * S, 9 * S, 4 * S, 8)]


def test_more_than_the_whole_device_is_refused():
    crowd = [occupant(1, 0, 2 * S, 600_000), occupant(2, 1 * S, 3 * S, 400_001)]
    with pytest.raises(ValueError, match="1000001 ppm"):
        divide(TWO_A_SECOND, 0, 0, 3 * S, crowd, {})
    assert fitting(crowd) == ([crowd[0]], [crowd[1]])


def test_one_who_leaves_makes_room_for_one_who_comes():
    assert peak_ppm([occupant(1, 0, 5, WHOLE), occupant(2, 5, 9, WHOLE)]) == WHOLE


@pytest.mark.parametrize(
    ("start", "end", "share", "message"),
    [(5, 4, 1, "before its start"), (0, 1, 0, "not in"), (0, 1, WHOLE + 1, "not in")],
)
def test_impossible_occupants_are_refused(start, end, share, message):
    with pytest.raises(ValueError, match=f"occupant 7: .*{message}"):
        occupant(7, start, end, share)


@pytest.mark.parametrize(("in_service", "start", "end"), [(5, 4, 9), (0, 9, 4)])
def test_impossible_windows_are_refused(in_service, start, end):
    with pytest.raises(ValueError, match="not in order"):
        divide(1, in_service, start, end, [], {})


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((0.6, 0.4), WHOLE),
        ((0.7, 0.3), WHOLE),
        ((0.9, 0.1), WHOLE),
        ((1 / 3, 1 / 3, 1 / 3), 999_999),
        ((1.0,), WHOLE),
    ],
)
def test_shares_that_fill_a_device_fit_on_it(shares, expected):
    assert sum(share_ppm(share) for share in shares) == expected


def test_instants_survive_the_way_to_microseconds_and_back():
    assert to_us(from_us(1_767_225_600_123_457)) == 1_767_225_600_123_457


# ---------------------------------------------------------------- promises on random histories

END = 4_000_000_000
prices = st.integers(1, 90_000_000)
instants = st.integers(0, END)
occupants = st.lists(
    st.tuples(instants, instants, st.integers(1, WHOLE)).map(lambda t: (min(t[:2]), max(t[:2]), t[2])),
    max_size=12,
).map(lambda rows: fitting(occupant(key, *row) for key, row in enumerate(rows))[0])


@given(price=prices, in_service=st.integers(0, 10), present=occupants, cuts=st.lists(instants, max_size=8))
def test_tenants_and_idle_are_the_capacity_however_often_the_meter_is_read(price, in_service, present, cuts):
    present = [o for o in present if o.start_us >= in_service]
    marks = sorted({in_service, END, *(cut for cut in cuts if cut > in_service)})
    carried: dict[int, int] = {}
    billed: dict[int | None, int] = {}
    time: dict[int | None, int] = {}
    for start, end in itertools.pairwise(marks):
        parts = divide(price, in_service, start, end, present, carried)
        assert sum(p.micro_usd for p in parts) == device_price(price, end - in_service) - device_price(
            price, start - in_service
        )
        assert sum(p.device_microseconds for p in parts) == end - start
        assert len([p for p in parts if p.key is not None]) == len({p.key for p in parts} - {None})
        for part in parts:
            assert start <= part.start_us < part.end_us <= end
            billed[part.key] = billed.get(part.key, 0) + part.micro_usd
            time[part.key] = time.get(part.key, 0) + part.device_microseconds
        assert billed.get(None, 0) >= 0
    for o in present:
        assert billed.get(o.key, 0) == occupant_price(price, o.share_ppm, o.end_us - o.start_us) // MICRO_USD
        assert time.get(o.key, 0) == o.share_ppm * (o.end_us - o.start_us) // WHOLE


@dataclass(frozen=True)
class Pool:
    """Two devices in service from 0 to END, who was on them, and (device, instant) of their readings."""

    prices: tuple[int, int]
    present: tuple[list[Occupant], list[Occupant]]
    readings: list[tuple[int, int]]


pools = st.builds(
    Pool,
    st.tuples(prices, prices),
    st.tuples(occupants, occupants).map(
        lambda sides: tuple([replace(o, payer=o.key % 3) for o in side] for side in sides)
    ),
    st.lists(st.tuples(st.integers(0, 1), instants), max_size=12),
)


def bills(pool: Pool, readings: list[tuple[int, int]]) -> dict[int | None, int]:
    """Payer (None: idle) -> micro-dollars, when the meters are read like that and then up to END."""
    payers = [{o.key: o.payer for o in side} for side in pool.present]
    read_until = [0, 0]
    carried: dict[int, int] = {}
    totals: dict[int | None, int] = {}
    for device, until in [*readings, (0, END), (1, END)]:
        start = read_until[device]
        read_until[device] = max(start, until)
        price, present = pool.prices[device], pool.present[device]
        for part in divide(price, 0, start, read_until[device], present, carried):
            payer = None if part.key is None else payers[device][part.key]
            assert part.micro_usd >= (-3 if payer is None else 0)
            totals[payer] = totals.get(payer, 0) + part.micro_usd
        assert all(0 <= rest < MICRO_USD for rest in carried.values())
    return totals


def exact(pool: Pool, payer: int) -> Fraction:
    """Dollars an hour x share x hours, summed over both devices, in micro-dollars."""
    sides = zip(pool.prices, pool.present, strict=True)
    return sum(
        (
            Fraction(price * o.share_ppm * (o.end_us - o.start_us), 1_000_000 * 3_600_000_000)
            for price, present in sides
            for o in present
            if o.payer == payer
        ),
        Fraction(0),
    )


@given(pool=pools)
def test_all_of_a_payer_costs_the_floor_of_its_exact_price_however_the_meters_are_read(pool):
    totals = bills(pool, pool.readings)
    for payer in range(3):
        assert totals.get(payer, 0) == math.floor(exact(pool, payer))
    assert sum(totals.values()) == sum(device_price(price, END) for price in pool.prices)
    assert totals.get(None, 0) > -2


@given(pool=pools, payer=st.integers(0, 2))
def test_a_neighbour_changes_nobodys_bill(pool, payer):
    first, second = ([o for o in side if o.payer == payer] for side in pool.present)
    alone = replace(pool, present=(first, second))
    assert bills(pool, pool.readings).get(payer, 0) == bills(alone, []).get(payer, 0)


@given(price=prices, present=occupants)
def test_read_once_no_part_has_less_than_no_time(price, present):
    parts = divide(price, 0, 0, END, present, {})
    assert all(part.device_microseconds >= 0 for part in parts)
    assert all(part.micro_usd >= 0 for part in parts if part.key is not None)
