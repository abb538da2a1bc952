"""What the daemon does to the world, behind one small interface. ``RayCluster`` is the real one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from workers import launch
from workers.protocol import Grant, Launch, Report, Stop


class PipelineGone(Exception):
    """The pipeline's process is dead or was never there."""


class PipelineLink(Protocol):
    """A pipeline as the daemon sees it."""

    async def reports(self, after: int) -> Sequence[Report]:
        """Reports above ``after``; waits for one, but not for ever. Raises ``PipelineGone``."""
        ...

    async def grant(self, grant: Grant) -> None: ...

    async def stop(self, stop: Stop) -> None: ...


class Cluster(Protocol):
    def nodes(self) -> list[launch.NodeSeen]: ...

    def start(self, order: Launch) -> PipelineLink: ...

    def find(self, attempt_id: int) -> PipelineLink | None: ...

    def kill(self, attempt_id: int) -> None: ...

    def evict(self, device: str, weights_key: str) -> None: ...

    def release(self, device: str, weights_key: str, run_key: str) -> None: ...


class RayLink:
    def __init__(self, handle: object) -> None:
        self._handle = handle

    async def reports(self, after: int) -> Sequence[Report]:
        return await self._call("reports", after)

    async def grant(self, grant: Grant) -> None:
        await self._call("grant", grant)

    async def stop(self, stop: Stop) -> None:
        await self._call("stop", stop)

    async def _call(self, method: str, *args: object) -> Sequence[Report]:
        try:
            return await getattr(self._handle, method).remote(*args)
        except launch.RayActorError as error:
            raise PipelineGone(str(error).splitlines()[0]) from error


class RayCluster:
    """Ray must be connected."""

    def nodes(self) -> list[launch.NodeSeen]:
        return launch.nodes()

    def start(self, order: Launch) -> PipelineLink:
        return RayLink(launch.pipeline_start(order))

    def find(self, attempt_id: int) -> PipelineLink | None:
        handle = launch.pipeline_find(attempt_id)
        return RayLink(handle) if handle is not None else None

    def kill(self, attempt_id: int) -> None:
        launch.pipeline_kill(attempt_id)

    def evict(self, device: str, weights_key: str) -> None:
        launch.residents_evict(device, weights_key)

    def release(self, device: str, weights_key: str, run_key: str) -> None:
        launch.run_release(device, weights_key, run_key)
