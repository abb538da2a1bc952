"""What the world looks like after an action: one function for the plan itself, the simulator and tests.

It trusts that the action is legal (``invariants.illegal`` says so) and raises ``ValueError`` only where there
is nothing to apply it to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from scheduler.core.state import (
    Action,
    Admit,
    Evict,
    Node,
    NodeState,
    Pipeline,
    Place,
    QueuedJob,
    Resident,
    Snapshot,
    Start,
)


def apply(snapshot: Snapshot, action: Action) -> Snapshot:
    return apply_all(snapshot, (action,))


def apply_all(snapshot: Snapshot, actions: Iterable[Action]) -> Snapshot:
    """Apply one after another, in time linear in snapshot and actions together."""
    tables = _Tables(snapshot)
    for action in actions:
        match action:
            case Admit():
                tables.admit(action)
            case Place():
                tables.place(action)
            case Start():
                tables.start(action)
            case Evict():
                tables.evict(action)
    return tables.snapshot()


class _Tables:
    """A snapshot's rows by key, while actions change them."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._base = snapshot
        self._queue: dict[str, QueuedJob] = {job.id: job for job in snapshot.queue}
        self._pipelines: dict[int, Pipeline] = {p.id: p for p in snapshot.pipelines}
        self._nodes: dict[tuple[int, str], Node] = {(n.pipeline, n.id): n for n in snapshot.nodes}
        self._residents: dict[tuple[str, str], Resident] = {
            (resident.device, resident.weights_key): resident for resident in snapshot.residents
        }
        self._next_id = max(self._pipelines, default=0) + 1

    def snapshot(self) -> Snapshot:
        return replace(
            self._base,
            queue=tuple(self._queue.values()),
            pipelines=tuple(self._pipelines.values()),
            nodes=tuple(self._nodes.values()),
            residents=tuple(self._residents.values()),
        )

    def admit(self, action: Admit) -> None:
        """The job becomes a pipeline. Its id is the next free one; the real one is the attempt's."""
        job = self._queue.pop(action.job, None)
        if job is None:
            raise ValueError(f"admit: job {action.job} is not in the queue")
        self._pipelines[self._next_id] = Pipeline(
            id=self._next_id,
            job=job.id,
            tenant=job.tenant,
            submitted=job.submitted,
            devices=job.devices,
            weights_key=job.weights_key,
            weights_bytes=job.weights_bytes,
            run_bytes=job.run_bytes,
            home=action.home,
            priority=job.priority,
        )
        self._next_id += 1

    def place(self, action: Place) -> None:
        """The pipeline holds the devices, which become its homes, and its weights get loaded there."""
        pipeline = self._pipelines.get(action.pipeline)
        if pipeline is None:
            raise ValueError(f"place: pipeline {action.pipeline} is not running")
        self._pipelines[pipeline.id] = replace(pipeline, home=action.devices, holds=action.devices)
        for device in action.devices:
            self._residents[device, pipeline.weights_key] = Resident(
                device, pipeline.weights_key, pipeline.weights_bytes, last_used=self._base.now
            )

    def start(self, action: Start) -> None:
        key = action.pipeline, action.node
        if key not in self._nodes:
            raise ValueError(f"start: pipeline {action.pipeline} offers no node {action.node}")
        self._nodes[key] = replace(
            self._nodes[key], state=NodeState.RUNNING, device=action.device, share=action.share
        )

    def evict(self, action: Evict) -> None:
        if self._residents.pop((action.device, action.weights_key), None) is None:
            raise ValueError(f"evict: {action.weights_key} is not on {action.device}")
