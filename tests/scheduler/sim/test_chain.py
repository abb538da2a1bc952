"""A rollout worker's chain with several turns: what is left out, what a merge moves, what is reported."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from scheduler.core.state import Kind, Segment
from scheduler.sim.chain import Chain, Part, Piece, parts_of
from scheduler.sim.truth import Turn
from tests.scheduler.sim.tiny import turn

SATURATION = 4
#: Two turns with a tool call between them.
KINDS = (Kind.PREFILL, Kind.DECODE, Kind.TAIL, Kind.TOOL, Kind.PREFILL, Kind.DECODE, Kind.TAIL)


def chain(*turns: Turn, kinds: Sequence[Kind] = KINDS) -> Chain:
    parts = parts_of([Segment(kind, 1.0) for kind in kinds], SATURATION)
    return Chain(parts, list(turns), peak=1e30, saturation=SATURATION)


def play(own: Chain) -> list[tuple[int, Kind, float]]:
    """To its end, as its nodes come."""
    done = []
    for part in range(len(own.parts)):
        while (piece := own.proceed(part)) is not None:
            done.append((piece.part, piece.segment.kind, pytest.approx(piece.seconds)))
            own.finish(piece.seconds)
    return done


def at(own: Chain, part: int) -> Piece:
    """Play until the piece of that part runs."""
    for node in range(len(own.parts)):
        while (piece := own.proceed(node)) is not None:
            if piece.part == part:
                return piece
            own.finish(piece.seconds)
    raise AssertionError(f"part {part} does not occur")


def test_a_decode_lasts_until_the_next_band_begins() -> None:
    kinds = (Kind.PREFILL, Kind.DECODE, Kind.TAIL, Kind.TAIL, Kind.TAIL, Kind.TOOL)
    own = [Segment(kind, 1.0) for kind in kinds]
    assert [part.below for part in parts_of(own, 128)] == [0, 128, 32, 8, 1, 0]
    assert parts_of(own[:2], 128)[1] == Part(Kind.DECODE, 1)
    # Workers whose batch never is as large leave the first tails out.
    assert [part.below for part in parts_of([own[0], own[2], own[2]], 128)] == [0, 8, 1]


def test_turns_follow_each_other_with_the_tool_between() -> None:
    own = chain(turn((1, 2, 3, 4, 5), tool=2.5), turn((3, 3), prefill=0.5))

    assert play(own) == [
        (0, Kind.PREFILL, 1.0),
        (1, Kind.DECODE, 2.0),
        (2, Kind.TAIL, 3.0),
        (3, Kind.TOOL, 2.5),
        (4, Kind.PREFILL, 0.5),
        (6, Kind.TAIL, 3.0),
    ]
    assert own.sampled == 15 + 6
    assert [(seen.part, seen.seconds) for seen in own.report()] == [
        (0, 1.0), (1, 2.0), (2, 3.0), (3, 2.5), (4, 0.5), (5, 0.0), (6, 3.0),
    ]  # fmt: skip


def test_turns_that_nobody_has_do_not_occur() -> None:
    own = chain(turn((2,)))

    assert play(own) == [(0, Kind.PREFILL, 1.0), (2, Kind.TAIL, 2.0)]
    assert {seen.part for seen in own.report() if seen.seconds == 0} == {1, 3, 4, 5, 6}


def test_a_merge_takes_the_later_turns_along() -> None:
    """Both in the tail of their first turn: 3 of 7 s done of the target's, 2 of 5 of the source's. Five then
    run: 3 forwards until fewer than 4 do. In the second turn three run, and both prefills are done."""
    target = chain(turn((7, 7), tool=2.0), turn((4,), prefill=0.5))
    source = chain(turn((5, 5, 5), tool=3.0), turn((2, 6), prefill=0.25))
    at(target, 2), at(source, 2)

    piece = target.absorb([(source, 2.0)], done=3.0)

    # The source's sequences have 6 + 2 tokens each in the cache: 2.4 s to prefill.
    assert (piece.part, piece.segment.kind, piece.segment.batch) == (1, Kind.DECODE, 5)
    assert piece.seconds == pytest.approx(2.4 + 3)
    assert source.gone and source.proceed(6) is None
    target.finish(piece.seconds)
    rest = play(target)
    assert rest == [
        (2, Kind.TAIL, 1.0),
        (3, Kind.TOOL, 3.0),
        (4, Kind.PREFILL, 0.75),
        (6, Kind.TAIL, 6.0),
    ]
    assert target.sampled + source.sampled == 14 + 4 + 15 + 8


def test_a_forward_that_is_not_over_is_begun_again() -> None:
    target, source = chain(turn((7, 7))), chain(turn((5,)))
    at(target, 2), at(source, 2)

    piece = target.absorb([(source, 1.0)], done=3.7)

    assert target.sampled == 2 * 3
    assert piece.seconds == pytest.approx(0.7 + 4)  # 6 + 1 tokens to prefill; 4 of 7 forwards to go


def test_a_second_merge_keeps_what_was_not_prefilled_yet() -> None:
    target, first, second = chain(turn((9,))), chain(turn((9,))), chain(turn((9,)))
    at(target, 2), at(first, 2), at(second, 2)
    target.absorb([(first, 0.0)], done=0.0)  # 0.6 s of prefill, then 9 forwards

    piece = target.absorb([(second, 0.2)], done=0.2)

    assert piece.prefill == pytest.approx(0.4 + 0.6)
    assert piece.steps == 9 and target.sampled == 0


def test_a_target_does_the_turns_that_only_the_source_has() -> None:
    """The source is a turn behind: its second turn comes after the target's last."""
    target = chain(turn((2,), tool=1.0), turn((4,)))
    source = chain(turn((3,), tool=1.5), turn((5,), prefill=0.5))
    at(target, 6), at(source, 2)

    piece = target.absorb([(source, 0.0)], done=0.0)
    target.finish(piece.seconds)

    assert play(target) == [(3, Kind.TOOL, 1.5), (4, Kind.PREFILL, 0.5), (6, Kind.TAIL, 5.0)]
    assert target.sampled + source.sampled == 2 + 4 + 3 + 5


def test_what_is_reported_is_as_if_nothing_had_been_merged() -> None:
    target = chain(turn((7, 7), tool=2.0), turn((4,), prefill=0.5))
    source = chain(turn((5, 5, 5), tool=3.0), turn((2, 6), prefill=0.25))
    for own in (target, source):
        at(own, 2)
        own.report()

    piece = target.absorb([(source, 2.0)], done=3.0)
    assert target.report() == [] and source.report() == []
    target.finish(piece.seconds)
    play(target)

    seconds = [(seen.part, round(seen.seconds, 6)) for seen in target.report()]
    own = [(2, 7.0), (3, 2.0), (4, 0.5), (5, 0.0), (6, 4.0)]
    moved = [(2, 5.0), (3, 3.0), (4, 0.25), (5, 0.0), (6, 6.0)]
    assert sorted(seconds) == sorted(own + moved)
