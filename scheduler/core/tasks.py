"""What is offered and waits for a device, and in which order it is served.

A task is what starts together: a gang, or the rollouts that a pipeline offers for the same part of its
chain (each of them may start without the others).

Order: tenants by virtual time, in buckets of one turn, the longest they have, so that those who received less
come first whatever they offer; inside a bucket by priority, then those who waited longer than a step of
theirs, then the shortest remaining path to the end of the step. To let the one go first who is nearly done
takes pipelines out of phase, so that one rolls out while the other trains; the longest path first, which is
best for a single job's graph, would keep alike ones side by side, all training at once.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from scheduler.core.board import Board
from scheduler.core.seats import rest
from scheduler.core.state import OFF_DEVICE, Node, NodeState


@dataclass(frozen=True, slots=True)
class Task:
    """``devices[i]`` is where ``nodes[i]`` would run. ``whole``: all start, or none."""

    pipeline: int
    nodes: tuple[Node, ...]
    devices: tuple[str, ...]
    whole: bool

    @property
    def key(self) -> tuple[int, str]:
        return self.pipeline, self.nodes[0].id


def offered(board: Board, served: Set[tuple[int, str]] = frozenset()) -> list[Task]:
    """Tasks in the order in which they are served, without those ``served``: of pipelines at home on a
    touched device, and those that want a device which one of these wants, since they may be first in line.
    """
    ids: dict[int, None] = dict(board.offering)
    for name in board.touched:
        ids |= board.at_home.get(name, {})
    tasks = [task for id in ids if id in board.pipelines for task in _of_pipeline(board, id)]
    tasks = [task for task in tasks if task.key not in served]
    wanted = {name for task in tasks for name in task.devices} - board.touched
    rivals = {id for name in wanted for id in board.at_home[name] if id not in ids}
    for task in (task for id in rivals for task in _of_pipeline(board, id)):
        if task.key not in served and not wanted.isdisjoint(task.devices):
            tasks.append(task)
    turns = _longest_turns(board)
    return sorted(tasks, key=lambda task: _rank(board, task, turns[board.pipelines[task.pipeline].tenant]))


def _of_pipeline(board: Board, id: int) -> list[Task]:
    groups: dict[str, list[Node]] = {}
    for node in board.nodes[id].values():
        if node.state is NodeState.READY and node.kind not in OFF_DEVICE and board.devices_of(node):
            groups.setdefault(node.gang or f"s{node.step} {node.part}", []).append(node)
    tasks = []
    for nodes in groups.values():
        nodes.sort(key=lambda node: node.worker)
        devices = tuple(board.devices_of(node)[0] for node in nodes)
        tasks.append(Task(id, tuple(nodes), devices, bool(nodes[0].gang)))
    return tasks


def overdue(board: Board, node: Node) -> bool:
    """Whether it has waited longer than a step of its pipeline takes."""
    return board.now - node.since > board.pipelines[node.pipeline].outlook.seconds


def _longest_turns(board: Board) -> dict[int, float]:
    """Virtual seconds that one more step costs a tenant at the most: the same for all that it offers, so that
    the order of its own hangs on nothing else.
    """
    turns: dict[int, float] = {}
    for pipeline in board.pipelines.values():
        turn = pipeline.outlook.seconds * pipeline.devices / board.tenants[pipeline.tenant].weight
        turns[pipeline.tenant] = max(turn, turns.get(pipeline.tenant, 1e-9))
    return turns


def _rank(board: Board, task: Task, turn: float) -> tuple[float, int, float, float, int, str]:
    pipeline = board.pipelines[task.pipeline]
    tenant = board.tenants[pipeline.tenant]
    first = task.nodes[0]
    path = board.left_now(first) + rest(pipeline, first)
    return (
        tenant.service // turn * turn,
        -pipeline.priority,
        first.since if overdue(board, first) else float("inf"),
        path,
        task.pipeline,
        first.id,
    )
