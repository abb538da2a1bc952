"""Saying when work was done, on the machine that did it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Ran(Generic[T]):
    """A result with the interval of its computation (UTC epoch seconds) and the tokens it worked on."""

    value: T
    started_at: float
    ended_at: float
    tokens: int


class Stopwatch:
    """``started_at`` is wall time; the length is measured by the monotonic clock, which no one resets."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self._started = time.monotonic()

    def ran(self, value: T, tokens: int) -> Ran[T]:
        return Ran(value, self.started_at, self.started_at + time.monotonic() - self._started, tokens)
