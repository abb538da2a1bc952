"""What a rollout worker really does in a step, cut where the planner's sub-stages are.

The graph has a node for each part of the outlook. A *piece* is what such a node really does; parts that do
not occur have none. After a merge the target's batch may be back in an earlier band: then its node goes on
with a piece of that band. And it may have more turns to go than the outlook has: then its last node goes on
with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from scheduler.core.interference import TAIL_BOUNDS
from scheduler.core.state import Kind, Segment
from scheduler.sim.truth import Rollout, Turn

DECODES = frozenset({Kind.DECODE, Kind.TAIL})


@dataclass(frozen=True, slots=True)
class Part:
    """``below``: it is over when fewer sequences run; 0 for parts that do not decode."""

    kind: Kind
    below: int = 0


def parts_of(rollout: Sequence[Segment], saturation: int) -> tuple[Part, ...]:
    """A decode lasts until the one that follows it begins; the last of a turn until nothing runs."""
    parts: list[Part] = []
    tails = 0  # of the same turn, behind this part
    for segment in reversed(rollout):
        if segment.kind is Kind.TAIL:
            tails += 1
            below = TAIL_BOUNDS[-tails]
        else:
            below = (saturation if tails else 1) if segment.kind is Kind.DECODE else 0
            tails = 0
        parts.append(Part(segment.kind, below))
    return tuple(reversed(parts))


@dataclass(frozen=True, slots=True)
class Piece:
    """``seconds`` alone on the device, of which the first ``prefill`` bring moved sequences back into the
    cache; then come ``steps`` forwards. ``forward_seconds`` are their mean, ``tokens`` lie in the cache.
    """

    part: int
    segment: Segment
    seconds: float
    prefill: float = 0.0
    steps: int = 0
    tokens: int = 0
    forward_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What can be said of a part afterwards, as if nothing had been merged."""

    part: int
    seconds: float
    batch: int = 0
    forward_seconds: float = 0.0


@dataclass(slots=True)
class Chain:
    """``seen`` are parts to be reported: when the chain is over and not before, if sequences were merged.
    ``gone``: its sequences went to another worker.
    """

    parts: tuple[Part, ...]
    turns: list[Turn]
    peak: float
    saturation: int
    turn: int = -1
    at: int = 0
    sampled: int = 0
    gone: bool = False
    merged: bool = False
    piece: Piece | None = None
    seen: list[Seen] = field(default_factory=list)

    @property
    def rollout(self) -> Rollout:
        return self.turns[self.turn].rollout

    def proceed(self, node_part: int) -> Piece | None:
        """The next piece of the node that stands for ``node_part``; None when it is over."""
        while not self.gone and (self.at <= node_part or self._goes_back(node_part)):
            piece = self._enter(self.at)
            if piece is not None:
                self.piece = piece
                return piece
            self._note(Seen(self.at, 0.0))
            self.at += 1
        return None

    def finish(self, seconds: float) -> None:
        """The piece is over; it was seen to take so long alone."""
        piece = self._open
        self._note(Seen(piece.part, seconds, piece.segment.batch, piece.forward_seconds))
        self._decode(piece.steps)
        self.at, self.piece = piece.part + 1, None

    def absorb(self, sources: Sequence[tuple[Chain, float]], done: float) -> Piece:
        """Take over all sequences of the sources, now and in later turns.

        ``done``: solo seconds done of the own piece, and of each source's. The sources are over.
        """
        prefill = self._stop(done)
        for source, source_done in sources:
            source._stop(source_done)
            prefill += self.rollout.cost.prefill_seconds(source.rollout.tokens)
            for place, turn in enumerate(source.turns[source.turn :], start=self.turn):
                self._join(place, turn)
            self.seen += source.seen
            source.seen = []
            source.gone, source.piece = True, None
        self.at = self._band()
        self.piece = self._decode_piece(self.at, prefill)
        return self.piece

    # ------------------------------------------------------------ pieces

    @property
    def _open(self) -> Piece:
        if self.piece is None:
            raise ValueError("nothing runs")
        return self.piece

    def _enter(self, part: int) -> Piece | None:
        kind = self.parts[part].kind
        if kind is Kind.PREFILL:
            self.turn += 1
        if self.turn >= len(self.turns):
            return None
        turn = self.turns[self.turn]
        if kind in DECODES:
            return self._decode_piece(part, 0.0) if turn.rollout.steps_until(self.parts[part].below) else None
        seconds = turn.prefill_seconds if kind is Kind.PREFILL else turn.tool_seconds
        if seconds <= 0:
            return None
        return Piece(
            part, Segment(kind, seconds, batch=turn.rollout.running), seconds, tokens=turn.rollout.tokens
        )

    def _decode_piece(self, part: int, prefill: float) -> Piece:
        """Its true character is that of the batch that runs; its forwards count by their mean."""
        rollout, running = self.rollout, self.rollout.running
        steps = rollout.steps_until(self.parts[part].below)
        seconds = rollout.seconds(steps)
        segment = Segment(
            kind=Kind.DECODE if running >= self.saturation else Kind.TAIL,
            seconds=seconds,
            batch=running,
            forward_seconds=seconds / steps,
            floor_seconds=rollout.floor_seconds,
            bandwidth=rollout.bandwidth(self.peak),
        )
        return Piece(part, segment, prefill + seconds, prefill, steps, rollout.tokens, seconds / steps)

    def _goes_back(self, node_part: int) -> bool:
        """Turns that the outlook does not have are done by the last node: again from its last tool call or
        prefill.
        """
        if node_part < len(self.parts) - 1 or self.turn + 1 >= len(self.turns):
            return False
        kinds = [part.kind for part in self.parts]
        again = Kind.TOOL if Kind.TOOL in kinds else Kind.PREFILL
        self.at = len(kinds) - 1 - kinds[::-1].index(again)
        return True

    def _decode(self, steps: int) -> None:
        if steps:
            self.sampled += self.rollout.advance(steps)

    # ------------------------------------------------------------ merging

    def _stop(self, done: float) -> float:
        """Interrupt the piece after ``done`` seconds; returns what is left of its prefill.

        A forward that is not over is begun again.
        """
        piece = self._open
        if not self.merged:
            self._note_the_rest()
        self._decode(min(piece.steps, self.rollout.steps_in(max(0.0, done - piece.prefill))))
        return max(0.0, piece.prefill - done)

    def _join(self, place: int, turn: Turn) -> None:
        """Both workers' tool calls of a turn were one batched call, so its answers come together."""
        if place == len(self.turns):
            self.turns.append(turn)
            return
        own = self.turns[place]
        own.rollout.join(turn.rollout)
        self.turns[place] = replace(
            own,
            prefill_seconds=own.prefill_seconds + turn.prefill_seconds,
            tool_seconds=max(own.tool_seconds, turn.tool_seconds),
            prefill_tokens=own.prefill_tokens + turn.prefill_tokens,
        )

    def _band(self) -> int:
        """The first decode of the turn that still has something to do with the batch as it is now."""
        start = self.at
        while start > 0 and self.parts[start - 1].kind in DECODES:
            start -= 1
        part = start
        while not self.rollout.steps_until(self.parts[part].below):
            part += 1
        return part

    # ------------------------------------------------------------ what is seen

    def _note(self, seen: Seen) -> None:
        if not self.merged:
            self.seen.append(seen)

    def _note_the_rest(self) -> None:
        """Once all lengths are known, it is known what the chain would have been without the merge."""
        alone = Chain(
            self.parts,
            [replace(turn, rollout=turn.rollout.copy()) for turn in self.turns],
            self.peak,
            self.saturation,
            self.turn,
            self.at,
            piece=self.piece,
        )
        piece: Piece | None = self._open
        while piece is not None:
            alone.finish(piece.seconds)
            piece = alone.proceed(len(self.parts) - 1)
        self.seen += alone.seen
        self.merged = True

    def report(self) -> list[Seen]:
        """What may be told now."""
        if self.merged and (self.gone or self.at < len(self.parts)):
            return []
        seen, self.seen = self.seen, []
        return seen
