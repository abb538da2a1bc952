"""Who lies where in a device's lane: pieces of work stacked by their part of the device, at every instant.

The pieces that run at an instant lie upon each other from the bottom of the lane, in a fixed order, so the
height of the pile is the part of the device that is in use and what is above it is idle. A piece whose place
changes while it runs (one below it ends, or gets another share) is cut there into several slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

EPSILON = 1e-9


@dataclass(frozen=True)
class Piece:
    """``part`` of the lane from ``start`` to ``end``; ``order`` says who lies below whom."""

    lane: str
    start: datetime
    end: datetime
    part: float
    order: tuple[Any, ...]
    row: Any


@dataclass
class Slice:
    """A piece, or a time of it, in its place: ``bottom`` and ``height`` are parts of the lane."""

    piece: Piece
    start: datetime
    end: datetime
    bottom: float
    height: float


def stack(pieces: Iterable[Piece]) -> list[Slice]:
    """The slices of all pieces, by lane and start. Where parts add up to more than a lane, all shrink."""
    lanes: dict[str, list[Piece]] = {}
    for piece in pieces:
        if piece.end > piece.start:
            lanes.setdefault(piece.lane, []).append(piece)
    return [part for lane in sorted(lanes) for part in _stack_lane(lanes[lane])]


def _stack_lane(pieces: Sequence[Piece]) -> list[Slice]:
    slices: list[Slice] = []
    last: dict[int, Slice] = {}
    for start, end, running in _instants(pieces):
        scale = min(1.0, 1 / sum(piece.part for piece in running))
        bottom = 0.0
        for piece in running:
            height = piece.part * scale
            before = last.get(id(piece))
            if before and abs(before.bottom - bottom) + abs(before.height - height) < EPSILON:
                before.end = end
            else:
                last[id(piece)] = Slice(piece, start, end, bottom, height)
                slices.append(last[id(piece)])
            bottom += height
    return slices


def _instants(pieces: Sequence[Piece]) -> Iterator[tuple[datetime, datetime, list[Piece]]]:
    """Times in which the same pieces run, with those pieces in order; times with none are left out."""
    begins: dict[datetime, list[Piece]] = {}
    for piece in pieces:
        begins.setdefault(piece.start, []).append(piece)
    running: list[Piece] = []
    for start, end in pairwise(sorted({moment for piece in pieces for moment in (piece.start, piece.end)})):
        running = [piece for piece in running if piece.end > start] + begins.get(start, [])
        running.sort(key=lambda piece: piece.order)
        if running:
            yield start, end, running
