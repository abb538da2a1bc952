"""Whether a sub-stage can compute on a device now, beside what computes there, and with which shares.

It can when the device is free; when its resident already decodes for jobs over the same base (it joins the
batch); or when there is room for one more resident and the sum of speeds grows. It cannot when a neighbour
would then miss its latency cap, where the policy keeps caps. On a device whose type has no interference table
one sub-stage computes at a time; one of which nothing is predicted (no segment) starts nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from scheduler.core.board import Board, Key
from scheduler.core.forecast import staleness
from scheduler.core.interference import Interference
from scheduler.core.memory import has_begun, overflow_bytes
from scheduler.core.rates import Slot, divided, fused, total_speed, worth_starting
from scheduler.core.state import (
    OFF_DEVICE,
    ROLLOUT,
    DeviceState,
    Kind,
    Node,
    Pipeline,
    Policy,
    RefusalCode,
    Segment,
)

#: A neighbour that is late anyway keeps others out when they would make it later by this part.
LATER = 1.02


@dataclass(frozen=True, slots=True)
class Seat:
    """``shares`` of all slots of the device once the sub-stage runs there. ``beside`` counts the
    neighbours.
    """

    device: str
    shares: tuple[tuple[Slot, float], ...]
    own: float
    beside: int
    fused: bool


@dataclass(frozen=True, slots=True)
class NoSeat:
    code: RefusalCode
    text: str


def seat(
    board: Board,
    policy: Policy,
    node: Node,
    device: str,
    favour: Mapping[int, float],
    without: Set[Key] = frozenset(),
) -> Seat | NoSeat:
    """``without``: as if these had yielded. Whoever would be late then is late after that as well."""
    blocked = barred(board, node, device)
    if blocked is not None:
        return blocked
    pipeline, segment = board.pipelines[node.pipeline], _segment(node)
    own = board.slot(node)
    slots = slots_on(board, device, without)
    if not slots:
        return Seat(device, ((own, 1.0),), 1.0, 0, False)
    table = table_of(board, device)
    if table is None:
        return NoSeat(RefusalCode.DEVICE, "how jobs slow each other down on its device is not known")
    joins = own in slots
    if joins and not (policy.fuse and pipeline.fusible and node.kind in ROLLOUT):
        return NoSeat(RefusalCode.DEVICE, "its resident on the device computes for another job")
    if not joins and len(slots) >= policy.max_computing:
        return NoSeat(RefusalCode.DEVICE, "as many jobs as can compute on its device at once")
    kinds = {member.kind for members in slots.values() for member in members}
    if not joins and not policy.corun.issuperset(kinds | {node.kind}):
        return NoSeat(RefusalCode.DEVICE, "another job's sub-stage has its device to itself")
    before = [[_segment(member) for member in members] for members in slots.values()]
    keys = list(slots) if joins else [*slots, own]
    after = [group[:] for group in before] if joins else [*(group[:] for group in before), [segment]]
    if joins:
        after[keys.index(own)].append(segment)
    weights = [_weight(slots.get(key, ()), favour) for key in keys]
    if not joins:
        weights[-1] = favour.get(pipeline.id, 1.0)
    shares, slows = divided(after, weights, table, policy.shares)
    _, slows_before = divided(before, [1.0] * len(before), table, policy.shares)
    others_left = min(board.left_now(member) for members in slots.values() for member in members)
    totals = total_speed(before, slows_before), total_speed(after, slows)
    if not worth_starting(*totals, board.left_now(node), others_left):
        return NoSeat(RefusalCode.DEVICE, "to compute beside what runs on its device would gain nothing")
    new = dict(zip(keys, zip(after, slows, strict=True), strict=True))
    if policy.capped and _made_late(board, slots, new, bool(without)):
        return NoSeat(RefusalCode.LATENCY, "a neighbour on its device would miss its latency cap")
    return Seat(device, tuple(zip(keys, shares, strict=True)), shares[keys.index(own)], len(slots), joins)


def barred(board: Board, node: Node, device: str) -> NoSeat | None:
    """What keeps the node out of the device, whoever computes there."""
    if node.segment is None:
        return NoSeat(RefusalCode.TURN, "nothing is known of its next sub-stage")
    if device not in board.devices or board.devices[device].state is DeviceState.LOST:
        return NoSeat(RefusalCode.NO_DEVICES, "its device is lost")
    if _must_move_first(board, node, device):
        return NoSeat(RefusalCode.NO_DEVICES, "its device is drained: no new step begins there")
    if node.kind not in ROLLOUT and not _room_to_train(board, board.pipelines[node.pipeline], device):
        return NoSeat(RefusalCode.MEMORY, "another job trains on its device, which has no memory for both")
    if node.kind in ROLLOUT and not _room_to_roll_out(board, node, device):
        return NoSeat(RefusalCode.MEMORY, "it trains on its device, which has no memory for rollouts besides")
    return None


def slots_on(board: Board, device: str, without: Set[Key] = frozenset()) -> dict[Slot, list[Node]]:
    """What computes on the device, by resident."""
    slots: dict[Slot, list[Node]] = {}
    for key, node in board.running[device].items():
        if key not in without:
            slots.setdefault(board.slot(node), []).append(node)
    return slots


def table_of(board: Board, device: str) -> Interference | None:
    known = board.devices.get(device)
    return board.tables.get(known.type) if known is not None else None


def begins_step(pipeline: Pipeline, node: Node) -> bool:
    """Whether it is the first part of a worker's rollouts that occurs; of training where nothing is rolled
    out.
    """
    outlook = pipeline.outlook
    chain = outlook.rollout or outlook.train
    first = next((i for i, s in enumerate(chain) if s.seconds > 0), 0)
    begins = node.kind in ROLLOUT or (
        not outlook.rollout and node.kind not in OFF_DEVICE and not node.yielded
    )
    return begins and node.part <= first


def _must_move_first(board: Board, node: Node, device: str) -> bool:
    """A drained device empties only if synchronous pipelines begin no step there; others may never pause."""
    pipeline = board.pipelines[node.pipeline]
    drained = board.devices[device].state is DeviceState.DRAINING
    return drained and not staleness(pipeline) and begins_step(pipeline, node)


def trains_now(board: Board, pipeline: Pipeline, device: str) -> bool:
    """Whether the pipeline's training has begun on the device and is not over: its states are there."""
    return any(
        node.kind not in ROLLOUT | OFF_DEVICE
        and device in board.devices_of(node)
        and has_begun(node, pipeline)
        for node in board.nodes[pipeline.id].values()
    )


def rolls_out_now(board: Board, pipeline: int) -> bool:
    """Whether some of its rollouts are open."""
    return any(node.kind in ROLLOUT or node.kind is Kind.TOOL for node in board.nodes[pipeline].values())


def caches_now(board: Board, pipeline: Pipeline, device: str) -> bool:
    """Whether rollouts of the pipeline have begun on the device and are not over: their cache is there."""
    return any(
        (node.kind in ROLLOUT or node.kind is Kind.TOOL)
        and pipeline.home[node.worker : node.worker + 1] == (device,)
        and has_begun(node, pipeline)
        for node in board.nodes[pipeline.id].values()
    )


def free_bytes(board: Board, device: str, training: int | None = None, rolling: int | None = None) -> int:
    """Memory that nobody uses on the device now, if the pipeline ``training`` trains, and ``rolling`` rolls
    out there, as well.
    """
    weights: dict[str, int] = {}
    used = 0
    for id in board.at_home[device]:
        other = board.pipelines[id]
        weights[other.weights_key] = max(other.weights_bytes, weights.get(other.weights_key, 0))
        used += other.run_bytes
        if id == training or trains_now(board, other, device):
            both = id == rolling or (other.overlap_bytes > 0 and caches_now(board, other, device))
            used += other.peak_bytes + other.overlap_bytes * both
    for (name, key), resident in board.residents.items():
        if name == device and key not in weights:
            used += resident.bytes
    for node in board.running[device].values():
        if node.kind is Kind.TAIL:
            used += overflow_bytes(node, board.pipelines[node.pipeline])
    return board.devices[device].memory_bytes - used - sum(weights.values())


def _room_to_train(board: Board, pipeline: Pipeline, device: str) -> bool:
    """Whether the device's memory has room for what the pipeline's training needs beside what is there."""
    if not (pipeline.peak_bytes or pipeline.overlap_bytes) or trains_now(board, pipeline, device):
        return True
    return free_bytes(board, device, training=pipeline.id) >= 0


def _room_to_roll_out(board: Board, node: Node, device: str) -> bool:
    """Whether the device's memory has room for a step's rollouts beside the pipeline's own training."""
    pipeline = board.pipelines[node.pipeline]
    if not pipeline.overlap_bytes or node.part > 0 or not trains_now(board, pipeline, device):
        return True
    return free_bytes(board, device, rolling=pipeline.id) >= 0


def stretched(
    board: Board, policy: Policy, device: str, favour: Mapping[int, float]
) -> tuple[tuple[Slot, float], ...]:
    """The shares of those who compute there now, with nobody new: the best, or where one would miss its
    latency cap with these, as they are.
    """
    slots = slots_on(board, device)
    if len(slots) == 1:
        return ((next(iter(slots)), 1.0),)
    table = table_of(board, device)
    if not slots or table is None:
        return ()
    groups = [[_segment(member) for member in members] for members in slots.values()]
    weights = [_weight(members, favour) for members in slots.values()]
    shares, slows = divided(groups, weights, table, policy.shares)
    new = dict(zip(slots, zip(groups, slows, strict=True), strict=True))
    if policy.capped and _made_late(board, slots, new):
        used = sum(members[0].share for members in slots.values())
        shares = tuple(members[0].share / used for members in slots.values())
    return tuple(zip(slots, shares, strict=True))


def projected(board: Board, node: Node, speed: float) -> float:
    """Seconds that the pipeline's step will have taken if ``node`` goes on at ``speed``, the rest alone."""
    pipeline = board.pipelines[node.pipeline]
    return board.now - pipeline.step_began + board.left_now(node) / speed + rest(pipeline, node)


def rest(pipeline: Pipeline, node: Node) -> float:
    """Solo seconds of the step after the node."""
    outlook = pipeline.outlook
    if node.kind in ROLLOUT:
        return sum(s.seconds for s in (*outlook.rollout[node.part + 1 :], *outlook.train))
    return sum(s.seconds for s in outlook.train[node.part + 1 :])


def within_cap(pipeline: Pipeline, seconds: float) -> bool:
    return seconds <= pipeline.latency_cap * pipeline.outlook.seconds


def made_late(pipeline: Pipeline, then: float, now: float) -> bool:
    """Whether its step, which would have taken ``now`` seconds, misses its cap if it takes ``then``. One that
    is late anyway may become a little later; steps that overlap have no length of their own.
    """
    if staleness(pipeline) or not pipeline.outlook.seconds:
        return False
    return not within_cap(pipeline, then) and then > LATER * now


def _made_late(
    board: Board,
    slots: Mapping[Slot, list[Node]],
    after: Mapping[Slot, tuple[list[Segment], float]],
    strict: bool = False,
) -> bool:
    """Whether one who computes there now would miss its cap, and (not ``strict``) not already without the
    newcomer.
    """
    for slot, members in slots.items():
        group, slow = after[slot]
        for member in members:
            key: Key = (member.pipeline, member.id)
            own = 1 / (slow * fused(_segment(member), group))
            # A newcomer may come to all of a gang's workers at once: none of them is faster than this one.
            then = projected(board, member, min(own, board.with_gang(key, own)))
            now = 0.0 if strict else projected(board, member, board.speed.get(key, 1.0))
            if made_late(board.pipelines[member.pipeline], then, now):
                return True
    return False


def _weight(members: list[Node] | tuple[Node, ...], favour: Mapping[int, float]) -> float:
    return max((favour.get(member.pipeline, 1.0) for member in members), default=1.0)


def _segment(node: Node) -> Segment:
    if node.segment is None:
        raise ValueError(f"nothing is predicted of node {node.id} of pipeline {node.pipeline}")
    return node.segment
