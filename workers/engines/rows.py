"""What the engine knows of a run and of each of its sequences."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from workers.engines.cache import Kept, Seat
from workers.engines.decoder import Adapters
from workers.engines.sampling import stream_state
from workers.engines.sequences import Rollout
from workers.models.chat import ChatTokenizer, StopText

Key = tuple[int, ...]


@dataclass(eq=False)
class Row:
    sequence: Rollout
    stream: int
    stop: StopText | None
    seat: Seat | None = None  # while it runs
    cached: int = 0  # tokens of its context whose keys and values the seat's row holds

    @classmethod
    def of(cls, sequence: Rollout, tokenizer: ChatTokenizer | None) -> Row:
        request = sequence.request
        stop = StopText(tokenizer, request.stop) if request.stop and tokenizer else None
        return cls(sequence, stream_state(request.stream), stop)

    @property
    def key(self) -> Key:
        return self.sequence.request.key

    @property
    def missing(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 while a turn is decoded."""
        return self.sequence.context - self.cached

    def go_on(self, kept: Kept) -> None:
        """From a kept cache, in the seat it has been given."""
        self.held.put(kept)
        self.cached = len(kept.tokens)

    def keep(self) -> Kept:
        context = (*self.sequence.request.prompt, *self.sequence.tokens)
        return self.held.take(context[: self.cached])

    def stand(self) -> None:
        """Leave the seat."""
        self.held.leave()
        self.seat = None
        self.cached = 0

    @property
    def held(self) -> Seat:
        if self.seat is None:
            raise RuntimeError(f"sequence {self.key} does not run")
        return self.seat

    def token(self, place: int) -> int:
        prompt = self.sequence.request.prompt
        return prompt[place] if place < len(prompt) else self.sequence.tokens[place - len(prompt)]

    def ending(self) -> Literal["stop", "length"] | None:
        """Why the turn is over after its newest token, if it is."""
        sequence, request = self.sequence, self.sequence.request
        turn = len(sequence.tokens) - sequence.turn_start
        if sequence.tokens[-1] in request.stop_ids:
            return "stop"
        # What was said before the turn cannot end it.
        if self.stop is not None and self.stop.found(sequence.tokens[sequence.turn_start :]) is not None:
            return "stop"
        return "length" if not sequence.left or turn == request.turn_tokens else None


@dataclass
class Run:
    key: str
    version: int
    adapter: Adapters | None
    waiting: deque[Row] = field(default_factory=deque)
    running: list[Row] = field(default_factory=list)
    finished: list[Rollout] = field(default_factory=list)  # not handed out yet
    kept: dict[Key, Kept] = field(default_factory=dict)  # of turns that ended, until they go on

    def rows(self) -> list[Row]:
        return [*self.running, *self.waiting]

    def forget_unless_of(self, sequence: Rollout) -> None:
        """Drop what is kept under the sequence's key unless the sequence goes on from it."""
        kept = self.kept.get(sequence.request.key)
        if kept is not None:
            context = (*sequence.request.prompt, *sequence.tokens)
            if len(kept.tokens) >= len(context) or context[: len(kept.tokens)] != kept.tokens:
                del self.kept[sequence.request.key]

    def leave(self, rows: Collection[Row]) -> None:
        """Take running rows out."""
        for row in rows:
            row.stand()
        self.running = [row for row in self.running if row.seat is not None]
