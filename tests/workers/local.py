"""A pipeline with its residents in one process: the real classes, called as Ray would call them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from workers import fleet, pipeline
from workers.graders.pool import GraderPool
from workers.pipeline import Pipeline
from workers.protocol import Crossed, DeviceRef, Ended, Finished, Grant, Launch, Offer, Report, Stop
from workers.residents import RolloutResident, TrainerResident
from workers.spec import JobSpec

T = TypeVar("T")


def device(name: str = "local/cpu0") -> DeviceRef:
    return DeviceRef(
        name=name,
        kind="cpu",
        index=0,
        ray_node_id="f" * 56,
        threads=1,
        memory_bytes=1 << 30,
        saturation_batch=4,
    )


class Method:
    """``method.remote(...)`` starts at once, in a thread, once awaitables among its arguments are done."""

    def __init__(self, function: Callable[..., Any], returns: int = 1) -> None:
        self._function, self._returns = function, returns

    def options(self, num_returns: int) -> Method:
        return Method(self._function, num_returns)

    def remote(self, *args: Any, **named: Any) -> Any:
        task = asyncio.ensure_future(self._run(args, named))
        if self._returns == 1:
            return task
        return [asyncio.ensure_future(self._part(task, index)) for index in range(self._returns)]

    async def _run(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = [await arg if asyncio.isfuture(arg) else arg for arg in args]
        return await asyncio.to_thread(self._function, *given, **named)

    @staticmethod
    async def _part(task: asyncio.Future[Any], index: int) -> Any:
        return (await task)[index]


class Handle:
    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Method:
        return Method(getattr(self.actor, name))


class Cluster:
    """Residents by (role, device, weights), made when first asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.residents: dict[tuple[str, str, str], Handle] = {}
        self.graders = Handle(GraderPool())
        monkeypatch.setattr(fleet, "rollout_resident", self._finder("rollout", RolloutResident))
        monkeypatch.setattr(fleet, "trainer_resident", self._finder("trainer", TrainerResident))
        monkeypatch.setattr(pipeline, "grader_pool", lambda node: self.graders)
        monkeypatch.setattr(pipeline, "own_node", lambda: "f" * 56)
        monkeypatch.setattr("os.nice", lambda by: 0)

    def _finder(self, role: str, actor: type) -> Callable[..., Handle]:
        def find(where: DeviceRef, weights_key: str, model_path: str, precision: str) -> Handle:
            key = (role, where.name, weights_key)
            if key not in self.residents:
                self.residents[key] = Handle(actor(where, model_path, precision))
            return self.residents[key]

        return find

    def evict(self, name: str) -> None:
        """The device's residents are gone; whoever still has a handle has a dead one."""
        for key in [key for key in self.residents if key[1] == name]:
            del self.residents[key]

    def runs(self) -> list[str]:
        """Whatever is still open anywhere."""
        return sorted(run for handle in self.residents.values() for run in handle.actor._open)


def launch(model: Path, rows: Path, folder: Path, **spec: Any) -> Launch:
    content = {"model": "tiny", "training_file": "rows", "seed": 3, **spec}
    return Launch(
        attempt_id=1,
        attempt=1,
        job_id="ftjob-x",
        run_key=f"{folder.name}.1",
        weights_key="tiny",
        spec=JobSpec.model_validate(content).resolved(),
        model_path=str(model),
        dataset_path=str(rows),
        checkpoint_dir=str(folder),
    )


async def run(
    made: Pipeline,
    place: Callable[[Offer], DeviceRef] = lambda offer: device(),
    seen: Callable[[Report], Any] = lambda report: None,
) -> list[Report]:
    """Grant whatever is offered, at once; all reports up to the end."""
    reports: list[Report] = []
    while not (reports and isinstance(reports[-1].body, Ended)):
        for report in await made.reports(len(reports)):
            reports.append(report)
            await asyncio.sleep(0)
            wanted = seen(report)
            if asyncio.iscoroutine(wanted):
                await wanted
            if isinstance(report.body, Offer) and report.body.kind.needs_device:
                await made.order(grant(report.body, place(report.body)))
    return reports


def grant(offer: Offer, where: DeviceRef) -> Grant:
    return Grant(action_id=offer.node, node=offer.node, device=where, share=1.0)


def of_kind(reports: Iterable[Report], kind: type[T]) -> list[T]:
    return [report.body for report in reports if isinstance(report.body, kind)]


def offers(reports: Iterable[Report]) -> list[Offer]:
    """Every sub-stage that there was: offered, begun, or crossed into."""
    bodies = (report.body for report in reports)
    return [
        body.offer if isinstance(body, Crossed) else body
        for body in bodies
        if isinstance(body, Offer | Crossed)
    ]


def ends(reports: Iterable[Report]) -> list[Finished]:
    bodies = (report.body for report in reports)
    return [
        body.finished if isinstance(body, Crossed) else body
        for body in bodies
        if isinstance(body, Finished | Crossed)
    ]


STOP = Stop(action_id="stop", reason="test")
