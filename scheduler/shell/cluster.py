"""What the daemon does to the world, behind one small interface. ``RayCluster`` is the real one.

Every call has a limit. ``PipelineGone`` says that the process is dead for good, ``ClusterSilent`` that
nothing is known: the same call may be made again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from workers import launch
from workers.protocol import Launch, Order, Report, Stop

T = TypeVar("T")

#: How long Ray may take to answer what it can answer at once.
ANSWER_LIMIT_S = 60.0
#: A pipeline answers a request for reports every ``workers.pipeline.REPORT_WAIT_S`` seconds.
REPORTS_LIMIT_S = 60.0


class PipelineGone(Exception):
    """The pipeline's process is dead or was never there."""


class ClusterSilent(Exception):
    """No answer in time, or the connection is interrupted; nothing is known."""


class PipelineLink(Protocol):
    """A pipeline as the daemon sees it. Each call may raise ``PipelineGone`` or ``ClusterSilent``."""

    async def reports(self, after: int) -> Sequence[Report]:
        """Reports above ``after``; waits for one, but not for ever."""
        ...

    async def order(self, order: Order) -> None: ...

    async def stop(self, stop: Stop) -> None: ...


class Cluster(Protocol):
    """Each call may raise ``ClusterSilent``."""

    async def nodes(self) -> list[launch.NodeSeen]: ...

    async def start(self, order: Launch) -> PipelineLink: ...

    async def find(self, attempt_id: int) -> PipelineLink | None: ...

    async def kill(self, attempt_id: int) -> None: ...

    async def residents(self) -> set[tuple[str, str]]:
        """(device, weights key) of everything loaded."""
        ...

    async def evict(self, device: str, weights_key: str) -> None: ...

    async def release(self, device: str, weights_key: str, run_key: str) -> None: ...


class RayLink:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def reports(self, after: int) -> Sequence[Report]:
        return await self._call(REPORTS_LIMIT_S, self._handle.reports, after)

    async def order(self, order: Order) -> None:
        await self._call(ANSWER_LIMIT_S, self._handle.order, order)

    async def stop(self, stop: Stop) -> None:
        await self._call(ANSWER_LIMIT_S, self._handle.stop, stop)

    async def _call(self, limit_s: float, method: Any, *args: object) -> Any:
        try:
            async with asyncio.timeout(limit_s):
                return await method.remote(*args)
        except launch.ActorUnavailableError as error:
            raise ClusterSilent("the connection to the pipeline is interrupted") from error
        except launch.RayActorError as error:
            raise PipelineGone("its process died") from error
        except TimeoutError as error:
            raise ClusterSilent(f"no answer within {limit_s:.0f} s") from error


class RayCluster:
    """Ray must be connected. Its calls block, so each runs in a thread."""

    async def nodes(self) -> list[launch.NodeSeen]:
        return await _answer(launch.nodes)

    async def start(self, order: Launch) -> PipelineLink:
        return RayLink(await _answer(launch.pipeline_start, order))

    async def find(self, attempt_id: int) -> PipelineLink | None:
        handle = await _answer(launch.pipeline_find, attempt_id)
        return RayLink(handle) if handle is not None else None

    async def kill(self, attempt_id: int) -> None:
        await _answer(launch.pipeline_kill, attempt_id)

    async def residents(self) -> set[tuple[str, str]]:
        return await _answer(launch.residents)

    async def evict(self, device: str, weights_key: str) -> None:
        await _answer(launch.residents_evict, device, weights_key)

    async def release(self, device: str, weights_key: str, run_key: str) -> None:
        await _answer(launch.run_release, device, weights_key, run_key)


async def _answer(call: Callable[..., T], *args: object) -> T:
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            return await asyncio.to_thread(call, *args)
    except (TimeoutError, launch.RayError, ConnectionError) as error:
        raise ClusterSilent(f"Ray does not answer: {type(error).__name__}") from error
