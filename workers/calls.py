"""Waiting for actors and for each other, always within a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

#: Longest time one call to a resident may take, or go without a token; past it the attempt fails and says so.
CALL_LIMIT_S = 3600.0


class Stuck(Exception):
    """Something took longer than it ever may."""


async def call(method: Any, *args: Any, **named: Any) -> Any:
    """Await an actor's method, within the limit."""
    try:
        return await asyncio.wait_for(_await(method.remote(*args, **named)), CALL_LIMIT_S)
    except TimeoutError:
        raise Stuck(f"one sub-stage ran for more than {CALL_LIMIT_S / 60:.0f} minutes") from None


async def _await(reference: Any) -> Any:
    return await reference


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Await all; when one fails, or the caller is cancelled, the others are cancelled and waited for."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class Bell:
    """Rung whenever something of the run has changed; whoever waits looks again."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        rung, self._rung = self._rung, asyncio.Event()
        rung.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._rung.wait()
