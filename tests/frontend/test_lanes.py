"""Places in a lane, worked out by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from frontend.web.lanes import Piece, stack

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def piece(name: str, start: float, end: float, part: float, lane: str = "a") -> Piece:
    return Piece(lane, at(start), at(end), part, (name,), name)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def places(pieces: list[Piece]) -> list[tuple[str, float, float, float, float]]:
    """(name, start, end, bottom, height) with seconds after the start."""
    return [
        (
            part.piece.row,
            (part.start - START).total_seconds(),
            (part.end - START).total_seconds(),
            pytest.approx(part.bottom),
            pytest.approx(part.height),
        )
        for part in stack(pieces)
    ]


def test_what_runs_together_lies_above_each_other():
    assert places([piece("x", 0, 10, 0.6), piece("y", 2, 5, 0.4)]) == [
        ("x", 0, 10, 0, 0.6),
        ("y", 2, 5, 0.6, 0.4),
    ]


def test_a_piece_is_cut_where_its_place_changes_and_nowhere_else():
    found = places([piece("x", 0, 4, 0.25), piece("y", 0, 10, 0.5), piece("z", 6, 8, 0.25)])
    assert found == [
        ("x", 0, 4, 0, 0.25),
        ("y", 0, 4, 0.25, 0.5),
        ("y", 4, 10, 0, 0.5),
        ("z", 6, 8, 0.5, 0.25),
    ]


def test_a_lane_is_free_between_its_pieces():
    assert places([piece("x", 0, 1, 1.0), piece("x", 5, 6, 1.0)]) == [("x", 0, 1, 0, 1), ("x", 5, 6, 0, 1)]


def test_the_order_does_not_hang_on_who_came_first():
    assert [place[:4] for place in places([piece("b", 0, 2, 0.5), piece("a", 1, 2, 0.5)])] == [
        ("b", 0, 1, 0),
        ("a", 1, 2, 0),
        ("b", 1, 2, 0.5),
    ]


def test_parts_beyond_the_whole_shrink_alike():
    assert places([piece("x", 0, 1, 1.0), piece("y", 0, 1, 1.0)]) == [
        ("x", 0, 1, 0, 0.5),
        ("y", 0, 1, 0.5, 0.5),
    ]


def test_lanes_do_not_touch_each_other_and_moments_take_no_room():
    found = places([piece("x", 0, 1, 1.0), piece("y", 0, 1, 1.0, lane="b"), piece("z", 0.5, 0.5, 1.0)])
    assert found == [("x", 0, 1, 0, 1), ("y", 0, 1, 0, 1)]
