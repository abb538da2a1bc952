"""A pipeline with its residents in one process: the real classes, called as Ray would call them.

``run`` plays the scheduler: it grants whatever is offered. What a test wants to happen at a certain moment it
does from ``seen``, which gets every report, and it holds computations back until then: engines between two
tokens (``Cluster.may_step``), trainers before a micro-batch (``Cluster.before_micro``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file

from workers import fleet, pipeline
from workers.chain import rollout_part
from workers.graders.pool import GraderPool
from workers.pipeline import Pipeline
from workers.protocol import (
    CheckpointSaved,
    Crossed,
    DeviceRef,
    Ended,
    Finished,
    Grant,
    Launch,
    Offer,
    Report,
    StepDone,
    Stop,
    SubStageKind,
)
from workers.residents.rollout import RolloutResident
from workers.residents.trainer import TrainerResident
from workers.spec import JobSpec

T = TypeVar("T")

GRADER = {
    "type": "python",
    "name": "letters",
    "source": "def grade(sample, item):\n    return len(set(sample['output_text'])) / 16\n",
}
RL = {
    "steps": 2,
    "prompts_per_step": 3,
    "group_size": 3,
    "sampling": {"max_tokens": 8},
    "precision": "fp32",
    "checkpoint_every": 1,
}


def device(name: str = "local/cpu0", saturation: int = 4) -> DeviceRef:
    return DeviceRef(
        name=name,
        kind="cpu",
        index=0,
        ray_node_id="f" * 56,
        threads=1,
        memory_bytes=1 << 30,
        saturation_batch=saturation,
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
    """Residents by (role, device, weights), made when first asked for.

    ``may_step(device, unfinished)`` is asked before every token of an engine. ``before_micro(device)`` is
    called before each micro-batch, by the trainer's computing thread.
    """

    may_step: Callable[[str, int], bool] = staticmethod(lambda device, unfinished: True)
    before_micro: Callable[[str], None] = staticmethod(lambda device: None)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.residents: dict[tuple[str, str, str], Handle] = {}
        self.graders = Handle(GraderPool())
        monkeypatch.setattr(fleet, "rollout_resident", self._finder("rollout", self.engine))
        monkeypatch.setattr(fleet, "trainer_resident", self._finder("trainer", self.trainer))
        monkeypatch.setattr(pipeline, "grader_pool", lambda node: self.graders)
        monkeypatch.setattr(pipeline, "own_node", lambda: "f" * 56)
        monkeypatch.setattr("os.nice", lambda by: 0)

    def engine(self, where: DeviceRef, model_path: str, precision: str) -> RolloutResident:
        cluster = self

        class Held(RolloutResident):
            """One that waits between two tokens, and goes on doing what is asked of it meanwhile."""

            def _advance(self, keys: Sequence[str]) -> None:
                left = sum(sum(self._loaded.counts(key)) for key in keys)
                if cluster.may_step(where.name, left):
                    super()._advance(keys)
                else:
                    IDLE.wait(0.001)

        return Held(where, model_path, precision)

    def trainer(self, where: DeviceRef, model_path: str, precision: str) -> TrainerResident:
        made = TrainerResident(where, model_path, precision)
        piece = made._piece

        def held(run_key: str, work: Callable[[], Any], tokens: int = 0) -> Any:
            if tokens:
                self.before_micro(where.name)
            return piece(run_key, work, tokens)

        made._piece = held
        return made

    def _finder(self, role: str, actor: Callable[..., Any]) -> Callable[..., Handle]:
        def find(where: DeviceRef, weights_key: str, model_path: str, precision: str) -> Handle:
            key = (role, where.name, weights_key)
            if key not in self.residents:
                self.residents[key] = Handle(actor(where, model_path, precision))
            return self.residents[key]

        return find

    def find(self, role: str, where: DeviceRef) -> Any:
        """The actor itself, of the runs that share the base model."""
        return self.residents[role, where.name, "tiny"].actor

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
        spec=JobSpec.model_validate(content),
        model_path=str(model),
        dataset_path=str(rows),
        checkpoint_dir=str(folder),
    )


def attempt(model: Path, rows: Path, folder: Path, rl: dict[str, Any] | None = None, **more: Any) -> Pipeline:
    spec = {"grader": GRADER, **more.pop("spec", {}), "rl": {**RL, **(rl or {})}}
    return Pipeline(launch(model, rows, folder, **spec).model_copy(update=more))


async def run(
    made: Pipeline,
    place: Callable[[Offer], DeviceRef | None] = lambda offer: device(),
    seen: Callable[[Report], Any] = lambda report: None,
) -> list[Report]:
    """Grant what is offered, at once, or when ``place`` has a device for it; all reports up to the end."""
    reports: list[Report] = []
    waiting: list[Offer] = []
    while not (reports and isinstance(reports[-1].body, Ended)):
        for report in await made.reports(len(reports)):
            reports.append(report)
            await asyncio.sleep(0)
            wanted = seen(report)
            if asyncio.iscoroutine(wanted):
                await wanted
            if isinstance(report.body, Offer) and report.body.kind.needs_device:
                waiting.append(report.body)
            waiting = [offer for offer in waiting if not await granted(made, offer, place(offer))]
    return reports


def running(made: Pipeline, kind: SubStageKind) -> list[str]:
    """The nodes of that kind that are on a device now."""
    return [lease.node for lease in made._desk._open() if lease.offer.kind is kind and lease.on_device]


def part_by_part(made: Pipeline, saturation: int = 4) -> Callable[[str, int], bool]:
    """For ``Cluster.may_step``: no token before the pipeline has heard that its batch is in another part."""

    def may_step(name: str, left: int) -> bool:
        rolling = [lease.offer for lease in made._desk._open() if lease.on_device]
        return all(
            offer.part >= rollout_part(left, saturation) for offer in rolling if left < offer.sequences
        )

    return may_step


def the_node(made: Pipeline, kind: SubStageKind, worker: int = 0) -> str:
    return next(node for node in running(made, kind) if f".w{worker}." in node)


class Orders:
    """Gives orders in the middle of a computation, from its own thread, and counts its beginnings."""

    def __init__(self, cluster: Cluster, made: Pipeline) -> None:
        self.cluster, self.made = cluster, made
        self.loop: asyncio.AbstractEventLoop | None = None
        self.micros = 0

    def run(self, **hooks) -> list[Report]:
        async def main():
            self.loop = asyncio.get_running_loop()
            return await run(self.made, **hooks)

        return asyncio.run(main())

    def give(self, order) -> None:
        asyncio.run_coroutine_threadsafe(self.made.order(order), self.loop).result(20)

    def at_micro(self, number: int, order: Callable[[], object]) -> None:
        """Give the order when the micro-batch of that number, from 1, begins on any device."""

        def count(name: str) -> None:
            self.micros += 1
            if self.micros == number:
                self.give(order())

        self.cluster.before_micro = count


async def granted(made: Pipeline, offer: Offer, where: DeviceRef | None) -> bool:
    if where is not None:
        await made.order(grant(offer, where))
    return where is not None


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


def texts(reports: Iterable[Report]) -> list[list[str]]:
    """The completions of each step; a character is a token of the tiny model."""
    return [[sample.completion for sample in done.samples] for done in of_kind(reports, StepDone)]


def weights(reports: Iterable[Report]) -> dict[str, torch.Tensor]:
    """The adapter of the last checkpoint."""
    return load_file(Path(of_kind(reports, CheckpointSaved)[-1].path) / "adapter_model.safetensors")


def same_weights(one: Iterable[Report], other: Iterable[Report], tolerance: float = 0.0) -> bool:
    first, second = weights(one), weights(other)
    return all(torch.allclose(first[name], second[name], rtol=0, atol=tolerance) for name in first)


#: Never set: what waits for it lets others compute.
IDLE = Event()


def of_worker(offer: Offer) -> DeviceRef:
    """A device of its own for each worker."""
    return device(f"local/cpu{offer.worker}")


STOP = Stop(action_id="stop", reason="test")
