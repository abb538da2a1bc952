"""Pass ``homes``: new devices for the workers of pipelines that live where no new step may begin.

A device that is drained finishes what goes on there and then empties: a pipeline leaves it between two steps,
when nothing of it runs on a device and all that it offers is the first part of a step's rollouts. Each worker
keeps its home where that is READY; for the others there must be READY devices with memory, those first where
nobody would miss a latency cap. All of them move, or none.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

from scheduler.core import texts
from scheduler.core.board import Board
from scheduler.core.crowd import Crowd
from scheduler.core.draft import Draft, ready_devices
from scheduler.core.forecast import staleness
from scheduler.core.memory import Memory, Shelves
from scheduler.core.order import rank
from scheduler.core.seats import begins_step
from scheduler.core.state import (
    DeviceState,
    Evict,
    NodeState,
    Pipeline,
    Refusal,
    RefusalCode,
    Rehome,
)


def leaving(board: Board) -> list[Pipeline]:
    """Pipelines between two steps that live on a device that is not READY.

    Asked are those that offer something new; all when a device or a job came or went, since there may be
    room.
    """
    asked = board.pipelines if board.admission else board.offering
    away = [
        board.pipelines[id]
        for id in asked
        if id in board.pipelines and not all(_ready(board, name) for name in board.pipelines[id].home)
    ]
    return sorted((pipeline for pipeline in away if _between_steps(board, pipeline.id)), key=rank)


def homes(draft: Draft, pipelines: Iterable[Pipeline]) -> Draft:
    """Move the pipelines in this order. Refused are those whose steps must not begin where they live."""
    snapshot = draft.snapshot
    ready = ready_devices(snapshot)
    memory = Memory(snapshot, draft.policy.max_pipelines_per_device)
    shelves = Shelves(memory, ready)
    crowd = Crowd(snapshot, draft.policy) if draft.policy.capped else None
    actions: list[Rehome | Evict] = []
    refusals: list[Refusal] = []
    for pipeline in pipelines:
        lost = [worker for worker, name in enumerate(pipeline.home) if name not in ready]
        fitting = [name for name in shelves.candidates(pipeline) if name not in pipeline.home]
        welcome = [name for name in fitting if crowd is None or _welcome(crowd, name, pipeline, lost)]
        chosen = list(islice(dict.fromkeys(chain(welcome, fitting)), len(lost)))
        if len(chosen) < len(lost):
            if not staleness(pipeline):
                text = texts.no_new_home(len(lost), len(chosen))
                refusals.append(Refusal(RefusalCode.NO_DEVICES, text, pipeline=pipeline.id))
            continue
        home = list(pipeline.home)
        for worker, name in zip(lost, chosen, strict=True):
            home[worker] = name
            memory.add(name, pipeline)
            if crowd is not None:
                crowd.add(name, pipeline, worker)
            for resident in memory.evict(name):
                reason = f"idle since {resident.last_used:g}; room for pipeline {pipeline.id}"
                actions.append(Evict(name, resident.weights_key, reason))
            shelves.put(name)
        moved = texts.count(len(lost), "worker")
        actions.append(Rehome(pipeline.id, tuple(home), f"{moved} moved: no step begins on their devices"))
    return draft.with_actions(actions).with_refusals(refusals)


def _ready(board: Board, name: str) -> bool:
    return name in board.devices and board.devices[name].state is DeviceState.READY


def _between_steps(board: Board, id: int) -> bool:
    nodes = board.nodes[id].values()
    pipeline = board.pipelines[id]
    return bool(nodes) and all(
        node.state is NodeState.READY and begins_step(pipeline, node) for node in nodes
    )


def _welcome(crowd: Crowd, name: str, pipeline: Pipeline, workers: list[int]) -> bool:
    return all(crowd.excess(name, pipeline, worker) <= 0 for worker in workers)
