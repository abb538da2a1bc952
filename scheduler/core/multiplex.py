"""The passes of the policies that let several pipelines compute on a device.

    admit ─► homes ─► hosts ─► start ─► merge ─► start (again, after a merge) ─► stretch

Each looks only at what was touched since the last decision, applies its actions to the board, and leaves a
reason with every action and every refusal.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from scheduler.core.admit import admit
from scheduler.core.board import Board, Key
from scheduler.core.draft import Draft
from scheduler.core.homes import homes, leaving
from scheduler.core.lookahead import (
    PER_CHOICE,
    PER_DECISION,
    PER_MERGER,
    choose,
    until,
    worth_merging,
)
from scheduler.core.mergers import keeps_caps, mergers, pays
from scheduler.core.rates import Slot, divided, total_speed, worth_starting
from scheduler.core.seats import NoSeat, Seat, barred, rolls_out_now, seat, slots_on, stretched, table_of
from scheduler.core.state import (
    OFF_DEVICE,
    ROLLOUT,
    Action,
    Node,
    NodeState,
    Plan,
    Policy,
    Refusal,
    RefusalCode,
    Resize,
    Start,
    Wait,
    Yield,
)
from scheduler.core.tasks import Task, offered, overdue

_SAME = 1e-9
#: To keep devices free would not help: one comes back, or those who train there go on and end.
CURED_BY_OTHERS = frozenset({RefusalCode.NO_DEVICES, RefusalCode.MEMORY})


class Multiplex:
    """One decision. ``board`` is changed by it."""

    def __init__(self, board: Board, policy: Policy) -> None:
        self._board = board
        self._policy = policy
        self._actions: list[Action] = []
        self._refusals: list[Refusal] = []
        self._favour: dict[str, Mapping[int, float]] = {}
        #: The first in line for each device, of gangs and those overdue: what starts there leaves it room.
        self._reserved: dict[str, Node] = {}
        self._served: set[Key] = set()
        #: Who made room: to start again what just stopped would only have been a smaller share.
        self._yielded: set[Key] = set()
        #: Pipelines that cannot begin their next step where they live.
        self._unhoused: dict[int, Refusal] = {}
        #: Whether each pipeline that was served had waited on purpose before this decision.
        self._waited: dict[int, bool] = {}
        self._forecasts_left = PER_DECISION

    def decide(self) -> Plan:
        if self._board.admission:
            self._admit()
        self._homes()
        self._hosts()
        self._start_offered()
        if self._policy.merge and self._merge():
            self._ask_again()
            self._start_offered()
        for device in sorted(self._board.touched):
            self._divide(device, stretched(self._board, self._policy, device, self._favour.get(device, {})))
        self._board.untouch()
        return Plan(tuple(self._actions), tuple(self._refusals))

    def _do(self, action: Action) -> None:
        self._board.apply(action)
        self._actions.append(action)

    # ------------------------------------------------------------ passes

    def _admit(self) -> None:
        if not self._board.queue:
            return
        draft = admit(Draft(self._board.snapshot(), self._policy))
        for action in draft.actions:
            self._do(action)
        self._refusals += draft.refusals

    def _homes(self) -> None:
        pipelines = leaving(self._board)
        if not pipelines:
            return
        draft = homes(Draft(self._board.snapshot(), self._policy), pipelines)
        for action in draft.actions:
            self._do(action)
        self._unhoused = {r.pipeline: r for r in draft.refusals if r.pipeline is not None}

    def _hosts(self) -> None:
        """What needs no device starts at once."""
        for id in self._board.offering:
            for node in list(self._board.nodes.get(id, {}).values()):
                if node.state is NodeState.READY and node.kind in OFF_DEVICE:
                    self._do(Start(node.id, id, None, 1.0, "needs no device"))

    def _afford(self, forecasts: int) -> bool:
        self._forecasts_left -= forecasts
        return self._forecasts_left >= 0

    def _start_offered(self) -> None:
        while tasks := offered(self._board, self._served | self._yielded):
            for task in tasks:  # a start touches devices: who lives there is asked in the next round
                self._served.add(task.key)
                self._serve(task)

    def _ask_again(self) -> None:
        """Whoever was refused may find what a merge made free; who waits on purpose goes on waiting."""
        waiting = {action.pipeline for action in self._actions if isinstance(action, Wait)}
        self._served = {key for key in self._served if key[0] in waiting}
        self._refusals = [r for r in self._refusals if r.pipeline is None or r.pipeline in waiting]
        held = self._board.waits
        self._reserved = {name: node for name, node in self._reserved.items() if node.pipeline in held}

    def _merge(self) -> bool:
        """Gather tails where that pays; whether any were. After the starts: tails just begun count too."""
        merged = False
        board, policy = self._board, self._policy
        ids = dict.fromkeys(id for name in sorted(board.touched) for id in board.at_home[name])
        for id in ids:
            home = board.pipelines[id].home
            if not any(len(board.at_home[name]) > 1 for name in home) or not self._known(home):
                continue
            options = [o for o in mergers(board, id) if not policy.capped or keeps_caps(board, o)]
            if not options:
                continue
            if policy.lookahead:
                if not self._afford(PER_MERGER):
                    break
                best = worth_merging(board, policy, id, options)
            else:
                best = next((option for option in options if pays(board, option)), None)
            if best is not None:
                for target, sources in best.moves:
                    board.touched.update(node.device for node in (target, *sources) if node.device)
                for action in best.actions("its last sequences fit on fewer devices, others use the rest"):
                    self._do(action)
                merged = True
        return merged

    def _serve(self, task: Task) -> None:
        """Start the task, or say why it waits."""
        board, policy = self._board, self._policy
        if (refusal := self._unhoused.get(task.pipeline)) is not None:
            self._refusals.append(refusal)
            return
        if self._still_waits(task):
            self._reserve(task)
            return
        waited = self._has_waited(task.pipeline)
        seats = self._seats(task, {})
        made_room = task.whole and self._make_room(task, seats)
        if made_room:
            seats = self._seats(task, {})
        if task.whole and not all(isinstance(found, Seat) for found in seats):
            self._refuse(task, seats)
            return
        beside = any(isinstance(found, Seat) and found.beside for found in seats)
        if policy.lookahead and beside and self._known(task.devices) and self._afford(PER_CHOICE):
            may_wait = policy.wait and not made_room and not waited
            question = choose(board, policy, task, may_wait)
            if question.holds_back is not None:
                self._hold_back(task)
                return
            favour = dict(question.favour)
            for device in task.devices:
                self._favour[device] = favour
            favoured = self._seats(task, favour)
            if task.whole and not all(isinstance(found, Seat) for found in favoured):
                favoured = seats
            seats = favoured
        for node, found in zip(task.nodes, seats, strict=True):
            if isinstance(found, Seat):
                self._start(node, found)
        if not any(isinstance(found, Seat) for found in seats):
            self._refuse(task, seats)

    def _still_waits(self, task: Task) -> bool:
        """Whether it waits on purpose and nothing happened where it lives: it is asked only because others
        want its devices.
        """
        board = self._board
        if board.waits.get(task.pipeline, board.now) <= board.now:
            return False
        return task.pipeline not in board.offering and board.touched.isdisjoint(
            board.pipelines[task.pipeline].home
        )

    def _has_waited(self, pipeline: int) -> bool:
        """Whether it waited before this decision; a wait that this decision chose is left alone."""
        if pipeline not in self._waited:
            self._waited[pipeline] = self._board.waits.pop(pipeline, None) is not None
        return self._waited[pipeline]

    def _known(self, devices: tuple[str, ...]) -> bool:
        """Whether it is known how sub-stages slow each other down there: forecasts ask that."""
        return all(table_of(self._board, name) is not None for name in devices)

    def _make_room(self, task: Task, seats: list[Seat | NoSeat]) -> bool:
        """Let training yield that nobody waits for: its step's last sequences still roll out.

        Only if the task starts then, only for a task that others wait for, and once for each sub-stage, so
        that two can never put each other off for ever.
        """
        board = self._board
        if not board.pipelines[task.pipeline].outlook.seconds or in_no_hurry(board, task.nodes[0]):
            return False
        gangs: dict[tuple[int, str], None] = {}
        for device, found in zip(task.devices, seats, strict=True):
            if isinstance(found, Seat):
                continue
            if found.code is not RefusalCode.DEVICE:
                return False
            here = [node for node in board.running[device].values() if node.kind not in ROLLOUT]
            new = {(a.pipeline, a.node) for a in self._actions if isinstance(a, Start)}
            if not here or any(node.yielded or (node.pipeline, node.id) in new for node in here):
                return False
            if not all(in_no_hurry(board, node) for node in here):
                return False
            gangs |= {key: None for node in here for key in board.gang((node.pipeline, node.id))}
        if not gangs or any(isinstance(found, NoSeat) for found in self._seats(task, {}, gangs.keys())):
            return False
        self._yielded |= gangs.keys()
        for pipeline, id in gangs:
            board.touched.update(board.devices_of(board.nodes[pipeline][id]))
            self._do(Yield(id, pipeline, "its step still rolls out, another job's waits for the device"))
        return True

    def _seats(
        self, task: Task, favour: Mapping[int, float], without: Set[Key] = frozenset()
    ) -> list[Seat | NoSeat]:
        found: list[Seat | NoSeat] = []
        for node, device in zip(task.nodes, task.devices, strict=True):
            if device in self._reserved and not self._leaves_room(node, device):
                first = NoSeat(RefusalCode.TURN, "another job is first in line for its device")
                found.append(barred(self._board, node, device) or first)
            else:
                found.append(seat(self._board, self._policy, node, device, favour, without))
        return found

    def _leaves_room(self, node: Node, device: str) -> bool:
        """Whether who is first in line could still start beside the node; one overdue is not put off."""
        first = self._reserved[device]
        if overdue(self._board, first):
            return False
        if first.pipeline == node.pipeline:
            return True
        slots = {*slots_on(self._board, device), self._board.slot(node), self._board.slot(first)}
        kinds = {first.kind, node.kind}
        if len(slots) > self._policy.max_computing or not self._policy.corun.issuperset(kinds):
            return False
        return gains(self._board, self._policy, device, node, first)

    def _start(self, node: Node, found: Seat) -> None:
        self._divide(found.device, found.shares)
        if found.fused:
            reason = "joins the batch that its base model decodes there"
        elif found.beside:
            reason = f"computes beside {found.beside} other on a part of {found.own:.0%}"
        else:
            reason = "its device is free"
        self._do(Start(node.id, node.pipeline, found.device, found.own, reason))
        self._board.touched.add(found.device)

    def _divide(self, device: str, shares: tuple[tuple[Slot, float], ...]) -> None:
        """Change the shares of those who compute there: first those who give, then those who get."""
        wanted = dict(shares)
        changes = []
        for slot, members in slots_on(self._board, device).items():
            for node in members:
                change = wanted.get(slot, node.share) - node.share
                if abs(change) > _SAME:
                    changes.append((change, node.pipeline, node.id, wanted[slot]))
        for change, pipeline, id, share in sorted(changes):
            reason = "gets what others left" if change > 0 else "makes room for others"
            self._do(Resize(id, pipeline, share, reason))

    def _hold_back(self, task: Task) -> None:
        later = until(self._board, task)
        reason = f"a better moment is expected in {later - self._board.now:.1f} s"
        self._do(Wait(task.pipeline, later, reason))
        self._reserve(task)

    def _refuse(self, task: Task, seats: list[Seat | NoSeat]) -> None:
        why = next(found for found in seats if isinstance(found, NoSeat))
        self._refusals.append(Refusal(why.code, why.text, pipeline=task.pipeline))
        codes = {found.code for found in seats if isinstance(found, NoSeat)}
        if (task.whole or overdue(self._board, task.nodes[0])) and not codes & CURED_BY_OTHERS:
            self._reserve(task)

    def _reserve(self, task: Task) -> None:
        for node, device in zip(task.nodes, task.devices, strict=True):
            self._reserved.setdefault(device, node)


def in_no_hurry(board: Board, node: Node) -> bool:
    """Whether it trains on finished groups while others of its step still roll out."""
    early = node.segment is not None and node.segment.early
    return early and rolls_out_now(board, node.pipeline)


def gains(board: Board, policy: Policy, device: str, one: Node, other: Node) -> bool:
    """Whether ``other`` could still start beside ``one``, or would not wait long for it."""
    if one.segment is None or other.segment is None:
        return False
    table = table_of(board, device)
    if table is None:
        return False
    groups = [[one.segment], [other.segment]]
    _, slows = divided(groups, (1.0, 1.0), table, policy.shares)
    return worth_starting(1.0, total_speed(groups, slows), board.left_now(one), board.left_now(other))
