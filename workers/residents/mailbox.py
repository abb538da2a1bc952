"""What a pipeline is told of its run in a rollout engine: counts that add up until it asks, sequences once.

The engine's computing thread writes, the thread of a pipeline's call waits. A mailbox that nobody reads holds
at most the sequences that were put into the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Condition

from workers.engines.sequences import Rollout
from workers.residents.errors import RunClosed


@dataclass(frozen=True)
class News:
    """What happened to a run since the news before.

    ``running`` and ``waiting`` count its unfinished sequences now, prefilled or not yet; ``cached_tokens``
    their tokens, which would have to be computed again elsewhere. ``forwards`` are steps of the batch.
    The interval (UTC epoch seconds) goes from the first step with sequences of the run to the last, None
    where there was none.
    """

    finished: list[Rollout]
    running: int
    waiting: int
    prompt_tokens: int
    sampled_tokens: int
    forwards: int
    cached_tokens: int
    started_at: float | None
    ended_at: float | None


@dataclass(frozen=True)
class Stepped:
    """One step of the batch, as far as it concerns a run."""

    finished: Sequence[Rollout]
    prompt_tokens: int
    sampled_tokens: int
    started_at: float
    ended_at: float


class Mailbox:
    def __init__(self, run_key: str) -> None:
        self._run_key = run_key
        self._changed = Condition()
        self._under_way: dict[tuple[int, ...], Rollout] = {}
        self._running = self._waiting = 0
        self._prefilling = False
        self._prefilled = False  # and not told yet
        self._failure: Exception | None = None
        self._empty()

    def _empty(self) -> None:
        self._finished: list[Rollout] = []
        self._prompt_tokens = self._sampled_tokens = self._forwards = 0
        self._started_at: float | None = None
        self._ended_at: float | None = None

    # ------------------------------------------------------------ the computing thread's side

    @property
    def computes(self) -> bool:
        """Whether the run has unfinished sequences in the engine."""
        return bool(self._under_way)

    def put_in(self, sequences: Iterable[Rollout], running: int, waiting: int) -> None:
        with self._changed:
            self._under_way.update((sequence.request.key, sequence) for sequence in sequences)
            self._prefilling = True
            self._count(running, waiting)

    def taken_out(self, sequences: Iterable[Rollout], running: int, waiting: int) -> None:
        with self._changed:
            for sequence in sequences:
                self._under_way.pop(sequence.request.key, None)
            self._count(running, waiting)

    def stepped(self, step: Stepped, running: int, waiting: int) -> None:
        with self._changed:
            self._finished += step.finished
            for sequence in step.finished:
                self._under_way.pop(sequence.request.key, None)
            self._prompt_tokens += step.prompt_tokens
            self._sampled_tokens += step.sampled_tokens
            self._forwards += 1 if step.sampled_tokens or step.prompt_tokens else 0
            self._started_at = step.started_at if self._started_at is None else self._started_at
            self._ended_at = step.ended_at
            self._count(running, waiting)

    def fail(self, failure: Exception) -> None:
        """The run's sequences are gone; it gets to hear why until it is closed."""
        with self._changed:
            self._failure = self._failure or failure
            self._under_way.clear()
            self._finished = []
            self._count(0, 0)

    def _count(self, running: int, waiting: int) -> None:
        self._running, self._waiting = running, waiting
        if self._prefilling and not waiting:
            self._prefilling, self._prefilled = False, True
        self._changed.notify_all()

    # ------------------------------------------------------------ the pipeline's side

    def refuse_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def wait(self, floor: int, limit_s: float) -> News:
        """The news, as soon as there is something to tell or ``limit_s`` is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._due(floor), limit_s)
            self.refuse_failed()
            return self._take()

    def _due(self, floor: int) -> bool:
        return (
            self._failure is not None
            or bool(self._finished)
            or self._prefilled
            or self._running + self._waiting <= floor
        )

    def _take(self) -> News:
        news = News(
            finished=self._finished,
            running=self._running,
            waiting=self._waiting,
            prompt_tokens=self._prompt_tokens,
            sampled_tokens=self._sampled_tokens,
            forwards=self._forwards,
            cached_tokens=sum(sequence.context for sequence in self._under_way.values()),
            started_at=self._started_at,
            ended_at=self._ended_at,
        )
        self._prefilled = False
        self._empty()
        return news

    def close(self) -> None:
        """Whoever waits is told, and so is who asks later."""
        self.fail(RunClosed(self._run_key))
