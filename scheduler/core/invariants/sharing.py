"""What must hold of a plan of the policies that let several pipelines compute on a device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from scheduler.core.board import Board
from scheduler.core.invariants.actions import begins_step
from scheduler.core.invariants.caps import lags
from scheduler.core.invariants.computing import computing, pipeline_of, slot_of, slots_on
from scheduler.core.invariants.rows import used_bytes
from scheduler.core.rates import divided, total_speed, worth_starting
from scheduler.core.state import (
    OFF_DEVICE,
    Admit,
    DeviceState,
    Merge,
    Node,
    NodeState,
    Plan,
    Policy,
    Resize,
    Snapshot,
    Start,
    Wait,
    Yield,
)
from scheduler.core.tasks import offered


@dataclass(frozen=True, slots=True)
class Task:
    """What is answered together: the ready nodes of a gang, or of one part of a pipeline's rollouts."""

    pipeline: int
    nodes: tuple[Node, ...]
    whole: bool


def broken(before: Snapshot, after: Snapshot, plan: Plan, policy: Policy) -> list[str]:
    return [
        *_unanswered(before, plan),
        *restarted(plan),
        *idle(after, plan, policy),
        *_overtaken(before, after, plan, policy),
    ]


def tasks(snapshot: Snapshot) -> list[Task]:
    found: dict[tuple[int, str], list[Node]] = {}
    for node in snapshot.nodes:
        if node.state is NodeState.READY and node.kind not in OFF_DEVICE:
            found.setdefault((node.pipeline, node.gang or f"{node.step} {node.part}"), []).append(node)
    return [Task(nodes[0].pipeline, tuple(nodes), bool(nodes[0].gang)) for nodes in found.values()]


def _unanswered(before: Snapshot, plan: Plan) -> list[str]:
    """Every queued job gets one answer, every task too, and nobody else gets any.

    Of a task that need not start whole, what does not start is a task of its own: it may have an answer too.
    """
    jobs = Counter(a.job for a in plan.actions if isinstance(a, Admit))
    jobs.update(r.job for r in plan.refusals if r.job is not None)
    started = {(a.pipeline, a.node) for a in plan.actions if isinstance(a, Start)}
    answers = Counter(a.pipeline for a in plan.actions if isinstance(a, Wait))
    answers.update(r.pipeline for r in plan.refusals if r.pipeline is not None)
    least = Counter(t.pipeline for t in tasks(before) if not _begun(t, started))
    most = Counter(t.pipeline for t in tasks(before) if not _started(t, started))
    most.update(a.pipeline for a in plan.actions if isinstance(a, Yield))
    wrong = []
    if jobs != Counter(job.id for job in before.queue):
        wrong.append(f"answers to jobs: {dict(jobs)}")
    if not least <= answers <= most:
        wrong.append(f"pipelines {dict(least)} got no start, answers to pipelines: {dict(answers)}")
    return wrong


def _started(task: Task, started: set[tuple[int, str]]) -> bool:
    return all((node.pipeline, node.id) in started for node in task.nodes)


def _begun(task: Task, started: set[tuple[int, str]]) -> bool:
    return any((node.pipeline, node.id) in started for node in task.nodes)


def restarted(plan: Plan) -> list[str]:
    """What made room and was started again in the same plan: it should have been resized."""
    yielded = {(a.pipeline, a.node) for a in plan.actions if isinstance(a, Yield)}
    starts = [a for a in plan.actions if isinstance(a, Start) and (a.pipeline, a.node) in yielded]
    return [f"node {a.node} of pipeline {a.pipeline} yields and starts again" for a in starts]


def idle(after: Snapshot, plan: Plan, policy: Policy) -> list[str]:
    """Sub-stages that wait although nothing stands in their way.

    What needs no device runs at once. Where a READY device is idle, nobody's task could start there alone:
    it is left to a gang, to one that waits on purpose, or to a pipeline whose own gang is not complete, or
    that must move before its next step begins.
    """
    waits = {a.pipeline for a in plan.actions if isinstance(a, Wait)}
    waits |= {id for id, until in after.waits if until >= after.now}
    busy = {node.device for node in computing(after)}
    waiting = [task for task in tasks(after) if not _must_move(after, task)]
    wrong = [
        f"node {node.id} of pipeline {node.pipeline} needs no device and waits"
        for node in after.nodes
        if node.kind in OFF_DEVICE and node.state is NodeState.READY
    ]
    for device in after.devices:
        if device.state is not DeviceState.READY or device.name in busy:
            continue
        here = [task for task in waiting if any(_home(after, n) == device.name for n in task.nodes)]
        here = [task for task in here if not any(_lacks_memory(after, node) for node in task.nodes)]
        at_home = {p.id for p in after.pipelines if device.name in p.home}
        if not at_home & waits and not any(task.whole and len(task.nodes) > 1 for task in here):
            wrong += [f"pipeline {task.pipeline} waits though {device.name} is idle" for task in here]
    return wrong


def _must_move(snapshot: Snapshot, task: Task) -> bool:
    """Whether a step would begin of a synchronous pipeline that does not live on READY devices alone."""
    pipeline = pipeline_of(snapshot, task.pipeline)
    ready = {device.name for device in snapshot.devices if device.state is DeviceState.READY}
    own = [node for node in snapshot.nodes if node.pipeline == task.pipeline]
    between = all(node.state is NodeState.READY and begins_step(pipeline, node) for node in own)
    return between and not lags(pipeline) and not ready.issuperset(pipeline.home)


def _home(snapshot: Snapshot, node: Node) -> str | None:
    home = pipeline_of(snapshot, node.pipeline).home
    return home[node.worker] if node.worker < len(home) else None


def _overtaken(before: Snapshot, after: Snapshot, plan: Plan, policy: Policy) -> list[str]:
    """Nobody started on a device in a way that keeps the first in line out of it.

    The first in line for a device is the first task that must start whole, or waits on purpose, and got no
    start. One that lacks a device, or memory, or must move first, waits for what no free device would
    cure: it keeps nobody out. Nor does one that just made room.
    """
    board, rest = _served(before, plan, policy)
    world = board.snapshot()
    line = {(task.pipeline, task.nodes[0].id): place for place, task in enumerate(_in_line(world, policy))}
    started = {(a.pipeline, a.node) for a in plan.actions if isinstance(a, Start)}
    waits = {a.pipeline for a in plan.actions if isinstance(a, Wait)}
    made_room = {(a.pipeline, a.node) for a in plan.actions if isinstance(a, Yield)}
    alive = {device.name for device in world.devices if device.state is not DeviceState.LOST}
    first: dict[str, tuple[int, Node]] = {}
    place_of: dict[tuple[int, str], int] = {}
    everything = tasks(world)
    for task in everything:
        place = min(line.get((n.pipeline, n.id), len(line)) for n in task.nodes)
        place_of.update({(n.pipeline, n.id): place for n in task.nodes})
        others = sum(t.pipeline == task.pipeline and not _begun(t, started) for t in everything)
        waited = task.pipeline in waits and others == 1
        complete = all(_home(world, node) in alive for node in task.nodes) and not _must_move(world, task)
        complete = complete and not any(
            _lacks_memory(later, n) for later in (world, after) for n in task.nodes
        )
        yielded = any((node.pipeline, node.id) in made_room for node in task.nodes)
        if _begun(task, started) or yielded or not complete or not (task.whole or waited):
            continue
        for node in task.nodes:
            device = _home(world, node) or ""
            if device not in first or place < first[device][0]:
                first[device] = place, node
    wrong = []
    for action in rest.actions:
        if isinstance(action, Start) and action.device in first:
            place, waiting = first[action.device]
            # What made room in this plan and goes on is in no line.
            own = place_of.get((action.pipeline, action.node), place)
            behind = place < own and action.pipeline != waiting.pipeline
            if behind and not _room(world, action, waiting, policy):
                wrong.append(f"pipeline {action.pipeline} overtook {waiting.pipeline} on {action.device}")
        board.apply(action)
        world = board.snapshot()
    return wrong


def _lacks_memory(snapshot: Snapshot, node: Node) -> bool:
    """Whether its device has no memory for it beside those that train there."""
    device = _home(snapshot, node) or ""
    begun = replace(node, state=NodeState.RUNNING, device=device)
    nodes = tuple(begun if (n.pipeline, n.id) == (node.pipeline, node.id) else n for n in snapshot.nodes)
    memory = next((d.memory_bytes for d in snapshot.devices if d.name == device), 0)
    return used_bytes(replace(snapshot, nodes=nodes), device) > memory


def _served(before: Snapshot, plan: Plan, policy: Policy) -> tuple[Board, Plan]:
    """The world when tasks are put in line for the last time, and what is left of the plan: after a merge all
    are asked again.
    """
    board = Board.of(before, policy.shares)
    merged = max((i for i, action in enumerate(plan.actions) if isinstance(action, Merge)), default=-1)
    for position, action in enumerate(plan.actions):
        starts = isinstance(action, Wait | Resize) or (
            isinstance(action, Start) and action.device is not None
        )
        if starts and position > merged:
            return board, Plan(plan.actions[position:])
        board.apply(action)
    return board, Plan()


def _in_line(world: Snapshot, policy: Policy) -> list[Task]:
    board = Board.of(world, policy.shares)
    board.touch_all()
    return [Task(task.pipeline, task.nodes, task.whole) for task in offered(board)]


def _room(world: Snapshot, action: Start, waiting: Node, policy: Policy) -> bool:
    """Whether the one who waits could still compute beside the one who starts."""
    node = next(n for n in world.nodes if (n.pipeline, n.id) == (action.pipeline, action.node))
    slots = {*slots_on(world, action.device or ""), slot_of(world, node), slot_of(world, waiting)}
    if len(slots) > policy.max_computing or not {node.kind, waiting.kind} <= policy.corun:
        return False
    types = {device.name: device.type for device in world.devices}
    table = dict(world.tables).get(types[action.device or ""])
    if table is None or node.segment is None or waiting.segment is None:
        return False
    pair = [[node.segment], [waiting.segment]]
    _, slows = divided(pair, (1.0, 1.0), table, policy.shares)
    lefts = (one.left or one.segment.seconds for one in (node, waiting) if one.segment is not None)
    return worth_starting(1.0, total_speed(pair, slows), *lefts)
