"""What an engine's and a trainer's resident have in common: weights, open runs, shares."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import torch

from workers.engines.precision import choose_dtype
from workers.engines.weights import Weights, load_weights
from workers.protocol import DeviceRef
from workers.residents.errors import ModelLoad, RunClosed
from workers.residents.shares import limit_of
from workers.timing import Ran, Stopwatch

T = TypeVar("T")

#: On a CPU device the computing shares its cores with the scheduler and the web, which answer first.
CPU_NICENESS = 5
#: Closed runs that are remembered, so that a call which was overtaken by ``close`` does not open one again.
CLOSED_KEPT = 10_000


class Resident:
    """Weights on a device, loaded on first use, and the set of runs that are open on them."""

    def __init__(self, device: DeviceRef, model_path: str, precision: str) -> None:
        self._device = device
        self._path = Path(model_path)
        self._precision = precision
        self._open: set[str] = set()
        self._closed: dict[str, None] = {}
        self._door = Lock()
        if device.kind == "cpu":
            os.nice(CPU_NICENESS)
        self._limit = limit_of(device)

    def _weights(self) -> Weights:
        where = (
            torch.device("cuda", self._device.index) if self._device.kind == "gpu" else torch.device("cpu")
        )
        try:
            return load_weights(self._path, choose_dtype(self._precision, where), where)
        except OSError as error:
            raise ModelLoad(f"{self._path.name}: {error.strerror}") from error
        except (ValueError, KeyError) as error:
            raise ModelLoad(f"{self._path.name}: {error}") from error

    def _enter(self, run_key: str) -> None:
        with self._door:
            if run_key in self._closed:
                raise RunClosed(run_key)
            self._open.add(run_key)

    def _leave(self, run_key: str, returns: bool) -> None:
        with self._door:
            self._open.discard(run_key)
            if returns:
                return
            self._closed[run_key] = None
            if len(self._closed) > CLOSED_KEPT:
                del self._closed[next(iter(self._closed))]

    def _refuse_closed(self, run_key: str) -> None:
        if run_key not in self._open:
            raise RunClosed(run_key)


def timed(work: Callable[[], T], tokens: int = 0) -> Ran[T]:
    watch = Stopwatch()
    return watch.ran(work(), tokens)


def joined(value: T, pieces: Sequence[Ran[Any]]) -> Ran[T]:
    """What was made piece by piece, from the first one's beginning to the last one's end."""
    if not pieces:
        return Stopwatch().ran(value, 0)
    return Ran(value, pieces[0].started_at, pieces[-1].ended_at, sum(piece.tokens for piece in pieces))
