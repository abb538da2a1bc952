"""Whether a sub-stage can compute on a device now, beside what computes there, and with which shares.

It can when the device is free; when its resident already decodes for jobs over the same base (it joins the
batch); or when there is room for one more resident and the sum of speeds grows. It cannot when a neighbour
would then miss its latency cap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.core.board import Board, Key
from scheduler.core.forecast import staleness
from scheduler.core.interference import Interference
from scheduler.core.memory import overflow_bytes
from scheduler.core.rates import Slot, divided, fused, total_speed, worth_starting
from scheduler.core.state import (
    OFF_DEVICE,
    ROLLOUT,
    DeviceState,
    Kind,
    Node,
    NodeState,
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


def seat(board: Board, policy: Policy, node: Node, device: str, favour: Mapping[int, float]) -> Seat | NoSeat:
    pipeline = board.pipelines[node.pipeline]
    segment = node.segment
    if segment is None:
        return NoSeat(RefusalCode.TURN, "nothing is known of its next sub-stage")
    if device not in board.devices or board.devices[device].state is DeviceState.LOST:
        return NoSeat(RefusalCode.NO_DEVICES, "its device is lost")
    own = board.slot(node)
    slots = slots_on(board, device)
    if node.kind not in ROLLOUT and not _room_to_train(board, pipeline, device):
        return NoSeat(RefusalCode.MEMORY, "another job trains on its device, which has no memory for both")
    if not slots:
        return Seat(device, ((own, 1.0),), 1.0, 0, False)
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
    shares, slows = divided(after, weights, _table(board, device), policy.shares)
    _, slows_before = divided(before, [1.0] * len(before), _table(board, device), policy.shares)
    others_left = min(board.left_now(member) for members in slots.values() for member in members)
    totals = total_speed(before, slows_before), total_speed(after, slows)
    if not worth_starting(*totals, board.left_now(node), others_left):
        return NoSeat(RefusalCode.DEVICE, "to compute beside what runs on its device would gain nothing")
    late = _made_late(board, slots, dict(zip(keys, zip(after, slows, strict=True), strict=True)))
    if late:
        return NoSeat(RefusalCode.LATENCY, "a neighbour on its device would miss its latency cap")
    return Seat(device, tuple(zip(keys, shares, strict=True)), shares[keys.index(own)], len(slots), joins)


def slots_on(board: Board, device: str) -> dict[Slot, list[Node]]:
    """What computes on the device, by resident."""
    slots: dict[Slot, list[Node]] = {}
    for node in board.running[device].values():
        slots.setdefault(board.slot(node), []).append(node)
    return slots


def trains_now(board: Board, pipeline: Pipeline, device: str) -> bool:
    """Whether the pipeline's training has begun on the device and is not over: its states are there."""
    first = next((i for i, s in enumerate(pipeline.outlook.train) if s.kind not in OFF_DEVICE), 0)
    return any(
        node.kind not in ROLLOUT | OFF_DEVICE
        and (node.state is NodeState.RUNNING or node.part > first)
        and device in board.devices_of(node)
        for node in board.nodes[pipeline.id].values()
    )


def rolls_out_now(board: Board, pipeline: int) -> bool:
    """Whether some of its rollouts are open."""
    return any(node.kind in ROLLOUT or node.kind is Kind.TOOL for node in board.nodes[pipeline].values())


def free_bytes(board: Board, device: str, training: int | None = None) -> int:
    """Memory that nobody at home on the device uses now, if the pipeline ``training`` trains as well."""
    weights: dict[str, int] = {}
    used = 0
    for id in board.at_home[device]:
        other = board.pipelines[id]
        weights[other.weights_key] = max(other.weights_bytes, weights.get(other.weights_key, 0))
        used += other.run_bytes
        if id == training or trains_now(board, other, device):
            used += other.peak_bytes + other.overlap_bytes * rolls_out_now(board, id)
    for node in board.running[device].values():
        if node.kind is Kind.TAIL:
            used += overflow_bytes(node, board.pipelines[node.pipeline])
    return board.devices[device].memory_bytes - used - sum(weights.values())


def _room_to_train(board: Board, pipeline: Pipeline, device: str) -> bool:
    """Whether the device's memory has room for what the pipeline's training needs beside what is there."""
    if not pipeline.peak_bytes or trains_now(board, pipeline, device):
        return True
    return free_bytes(board, device, pipeline.id) >= 0


def stretched(
    board: Board, policy: Policy, device: str, favour: Mapping[int, float]
) -> tuple[tuple[Slot, float], ...]:
    """The shares of those who compute there now, with nobody new: the best, or where one would miss its
    latency cap with these, as they are.
    """
    slots = slots_on(board, device)
    if not slots:
        return ()
    groups = [[_segment(member) for member in members] for members in slots.values()]
    weights = [_weight(members, favour) for members in slots.values()]
    shares, slows = divided(groups, weights, _table(board, device), policy.shares)
    if _made_late(board, slots, dict(zip(slots, zip(groups, slows, strict=True), strict=True))):
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


def _made_late(
    board: Board,
    slots: Mapping[Slot, list[Node]],
    after: Mapping[Slot, tuple[list[Segment], float]],
) -> bool:
    """Whether one who computes there now would miss its cap, and not already without the newcomer."""
    for slot, members in slots.items():
        group, slow = after[slot]
        for member in members:
            pipeline = board.pipelines[member.pipeline]
            if staleness(pipeline) or not pipeline.outlook.seconds:
                continue
            key: Key = (member.pipeline, member.id)
            own = 1 / (slow * fused(_segment(member), group))
            # A newcomer may come to all of a gang's workers at once: none of them is faster than this one.
            then = projected(board, member, min(own, board.with_gang(key, own)))
            now = projected(board, member, board.speed.get(key, 1.0))
            if not within_cap(pipeline, then) and then > LATER * now:
                return True
    return False


def _weight(members: list[Node] | tuple[Node, ...], favour: Mapping[int, float]) -> float:
    return max((favour.get(member.pipeline, 1.0) for member in members), default=1.0)


def _segment(node: Node) -> Segment:
    if node.segment is None:
        raise ValueError(f"nothing is predicted of node {node.id} of pipeline {node.pipeline}")
    return node.segment


def _table(board: Board, device: str) -> Interference:
    return board.tables[board.devices[device].type]
