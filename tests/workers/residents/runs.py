"""Runs of a rollout resident, and a watch over its engine's steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from workers.engines.sequences import Request, Rollout
from workers.residents.rollout import RolloutResident

WAIT_S = 30
SEEDS = {"a": 1, "b": 2, "c": 3}


def request(run_key: str, sample: int = 0, tokens: int = 10, **more: Any) -> Request:
    return Request(run_key, (sample,), (7, 8, 9), tokens, (0, 0, sample), **more)


def sequences(run_key: str, count: int = 2, tokens: int = 10) -> list[Rollout]:
    """The first is the shortest: they end one after the other."""
    return [Rollout(request(run_key, sample, tokens + sample)) for sample in range(count)]


def made(resident: RolloutResident, run_key: str) -> list[Rollout]:
    """All that the run is given, in order of key."""
    found: list[Rollout] = []
    news = resident.news(run_key, -1)
    while news.running + news.waiting or news.finished:
        found += news.finished
        news = resident.news(run_key, 0)
    return sorted(found, key=lambda rollout: rollout.request.key)


def tokens(rollouts: list[Rollout]) -> list[list[int]]:
    return [rollout.tokens for rollout in rollouts]


class Steps:
    """Watches the engine's steps, and does things between two of them: ``steps.after(2, call, ...)``.

    The third step does not return before the call stands in the resident's queue.
    """

    def __init__(self, resident: RolloutResident, callers: ThreadPoolExecutor) -> None:
        self.keys: list[tuple[str, ...]] = []
        self.threads: list[int] = []
        self.before: Callable[[tuple[str, ...]], None] = lambda keys: None
        self._resident, self._callers = resident, callers
        self._calls: dict[int, tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = {}
        self._decode = resident._loaded.decode
        resident._loaded.decode = self._watched  # type: ignore[method-assign]

    def after(self, step: int, call: Callable[..., Any], *args: Any) -> Future[Any]:
        self._calls[step] = (Future(), call, args)
        return self._calls[step][0]

    def _watched(self, keys: list[str], **named: Any) -> Any:
        self.before(tuple(keys))
        step = len(self.keys)
        self.keys.append(tuple(keys))
        self.threads.append(torch.get_num_threads())
        progress = self._decode(keys, **named)
        if step in self._calls:
            self._queue(*self._calls.pop(step))
        return progress

    def _queue(self, done: Future[Any], call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        queue = self._resident._thread._work_queue
        before = queue.qsize()
        asked = self._callers.submit(call, *args)
        asked.add_done_callback(lambda asked: done.set_result(asked))
        while queue.qsize() == before and not asked.done():
            pass


def result(done: Future[Any]) -> Any:
    return done.result(WAIT_S).result(WAIT_S)
