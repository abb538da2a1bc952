"""Pass ``turns``: which pipelines get their devices for the next step, and which ones.

A pipeline that wants a turn gets all its devices or none. The order is fair between tenants by virtual time
(service received, plus the expected cost of turns under way and of those given earlier in this very plan, so
that one tenant's ten pipelines do not take everything before another's one), then priority, age, id.

In that order, each worker takes its home when it is free. A worker whose home is busy or gone moves, at the
cost of moving its state, to another free READY device with memory, with this restraint: a device that
pipelines at home there wait for is left to them while the mover's tenant is less than one of their turns
behind. So state moves only when a device would idle or when staying would be unfair, and yet tenants that
crowd one device are not held below their share. A pipeline that lost a home is not so restrained.
After everybody was asked once, what the waiting pipelines at home left over is open to all.

A gang that comes first among gangs and cannot be placed whole reserves the free devices it would use; nobody
behind it gets them in this plan. Bound: once its tenant is first in order, a gang whose homes are READY waits
for at most one step of each current holder of its homes, all of which run at the same time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice
from math import inf

from scheduler.core import texts
from scheduler.core.draft import Draft, occupied_devices, ready_devices, wanting_turn
from scheduler.core.memory import Memory, Shelves
from scheduler.core.order import Clock, ahead_of, fair_order, later, rank, turn_clocks, turn_cost
from scheduler.core.state import Evict, Pipeline, Place, Refusal, RefusalCode, Tenant


def turns(draft: Draft) -> Draft:
    snapshot = draft.snapshot
    tenants = {tenant.id: tenant for tenant in snapshot.tenants}
    clocks = turn_clocks(snapshot.pipelines, tenants)
    held = Counter[int]()
    for pipeline in snapshot.pipelines:
        held[pipeline.tenant] += len(pipeline.holds)
    waiting, over_quota = _split_by_quota(wanting_turn(snapshot), tenants, held)
    board = _Board(draft, waiting, respect_after(waiting, tenants, clocks))

    actions: list[Place | Evict] = []
    reserved = False
    for everything in (False, True):
        if everything:
            board.open_all()
        asked, waiting = waiting, []
        for pipeline in fair_order(asked, clocks):
            devices = board.devices_for(pipeline, clocks[pipeline.tenant][0])
            if len(devices) == pipeline.devices:
                actions += board.give(pipeline, devices)
                held[pipeline.tenant] += pipeline.devices
                cost = turn_cost(pipeline, tenants)
                clocks[pipeline.tenant] = later(clocks[pipeline.tenant], cost)
                continue
            waiting.append(pipeline)
            if pipeline.devices > 1 and not reserved and board.lacks(pipeline) is RefusalCode.TURN:
                board.reserve(pipeline, devices)
                reserved = True
    refusals = [
        *_quota_refusals(over_quota, waiting, tenants, held),
        *_turn_refusals(waiting, board, clocks, tenants),
    ]
    return draft.with_actions(actions).with_refusals(refusals)


def _split_by_quota(
    wanting: list[Pipeline], tenants: dict[int, Tenant], held: Counter[int]
) -> tuple[list[Pipeline], list[Pipeline]]:
    """Pipelines whose turn is within their tenant's limit, and those over it, in the order of ``rank``.

    One over it keeps its claim on the limit, so that smaller ones behind it do not overtake it for ever.
    """
    claimed = Counter(held)
    within, over = [], []
    for pipeline in sorted(wanting, key=rank):
        limit = tenants[pipeline.tenant].max_devices
        if limit is not None and claimed[pipeline.tenant] + pipeline.devices > limit:
            over.append(pipeline)
        else:
            within.append(pipeline)
        if limit is None or pipeline.devices <= limit:
            claimed[pipeline.tenant] += pipeline.devices
    return within, over


def respect_after(
    waiting: list[Pipeline], tenants: dict[int, Tenant], clocks: dict[int, Clock]
) -> dict[str, float]:
    """For each home of waiting pipelines: the virtual time above which movers leave it to them.

    It is the least over those pipelines of their tenant's time before one more turn of theirs was charged.
    """
    times: dict[str, float] = {}
    for pipeline in waiting:
        time = clocks[pipeline.tenant][0] - turn_cost(pipeline, tenants)
        for name in pipeline.home:
            times[name] = min(time, times.get(name, inf))
    return times


class _Board:
    """Free devices while turns are given.

    Free devices are in one of three places: ``_open`` (nobody at home waits for them), ``_wanted`` (somebody
    does; by falling time of ``respect_after``), ``_kept`` (their memory is kept for a queued job, so nobody
    moves there but pipelines that lost a home).
    """

    def __init__(self, draft: Draft, waiting: list[Pipeline], respect: dict[str, float]) -> None:
        snapshot = draft.snapshot
        self.memory = Memory(snapshot, draft.policy.max_pipelines_per_device)
        self.ready = frozenset(ready_devices(snapshot))
        self._free = set(self.ready - occupied_devices(snapshot))
        self._reserved: dict[int, list[str]] = {}
        kept = self._free & draft.kept
        wanted = self._free.intersection(respect) - kept
        self._kept = Shelves(self.memory, sorted(kept))
        self._open = Shelves(self.memory, sorted(self._free - kept - wanted))
        self._all_ready = Shelves(self.memory, sorted(self.ready))
        self._wanted = sorted((-respect[name], name) for name in wanted)

    def devices_for(self, pipeline: Pipeline, time: float) -> list[str]:
        """The best devices for its workers, as many as there are now."""
        reserved = self._reserved.get(pipeline.id)
        sure = reserved if reserved is not None else [n for n in pipeline.home if n in self._free]
        if len(sure) == pipeline.devices:
            return sure
        homeless = self._homeless(pipeline) > 0
        movable = self._movable(pipeline, -inf if homeless else time, homeless)
        others = (name for name in movable if name not in sure)
        return [*sure, *islice(others, pipeline.devices - len(sure))]

    def _homeless(self, pipeline: Pipeline) -> int:
        """Workers whose home is not READY."""
        return pipeline.devices - sum(name in self.ready for name in pipeline.home)

    def _movable(self, pipeline: Pipeline, time: float, homeless: bool) -> Iterator[str]:
        yield from self._open.candidates(pipeline)
        for minus_limit, name in self._wanted:
            if time > -minus_limit:
                break
            if name in self._free and self.memory.fits(name, pipeline):
                yield name
        if homeless:
            yield from self._kept.candidates(pipeline)

    def open_all(self) -> None:
        """Let everybody have what those at home left over."""
        for _, name in self._wanted:
            if name in self._free:
                self._open.put(name)
        self._wanted = []

    def reserve(self, pipeline: Pipeline, devices: list[str]) -> None:
        self._reserved[pipeline.id] = devices
        for name in devices:
            self._remove(name)

    def lacks(self, pipeline: Pipeline) -> RefusalCode:
        """What it waits for: READY devices, memory on those it must move to, or only others' turns."""
        if len(self.ready) < pipeline.devices:
            return RefusalCode.NO_DEVICES
        homeless = self._homeless(pipeline)
        others = (name for name in self._all_ready.candidates(pipeline) if name not in pipeline.home)
        if homeless and len(list(islice(others, homeless))) < homeless:
            return RefusalCode.MEMORY
        return RefusalCode.TURN

    def give(self, pipeline: Pipeline, devices: list[str]) -> Iterator[Place | Evict]:
        """Move the pipeline's memory where it is not yet, evicting idle weights, and take the devices."""
        placed = _workers_keep_their_homes(pipeline, devices)
        for name in dict.fromkeys(pipeline.home):
            if name not in placed and name in self.memory.left:
                self.memory.remove(name, pipeline)
                self._put_again(name)
        for name in placed:
            self._remove(name)
            if name not in pipeline.home:
                self.memory.add(name, pipeline)
                for resident in self.memory.evict(name):
                    reason = f"idle since {resident.last_used:g}; room for pipeline {pipeline.id}"
                    yield Evict(name, resident.weights_key, reason)
                self._put_again(name)
        moved = sum(name not in pipeline.home for name in placed)
        reason = f"its turn; {texts.count(moved, 'worker')} moved" if moved else "its turn; at home"
        yield Place(pipeline.id, placed, reason)

    def _put_again(self, name: str) -> None:
        if name in self.ready:
            self._all_ready.put(name)

    def _remove(self, name: str) -> None:
        self._free.discard(name)
        self._open.take(name)
        self._kept.take(name)


def _workers_keep_their_homes(pipeline: Pipeline, devices: list[str]) -> tuple[str, ...]:
    """The devices in the order of workers: each at its home where that is among them."""
    chosen = set(devices)
    new = iter([name for name in devices if name not in pipeline.home])
    homes = [*pipeline.home, *[""] * (pipeline.devices - len(pipeline.home))]
    return tuple(home if home in chosen else next(new) for home in homes)


def _quota_refusals(
    over_quota: list[Pipeline], waiting: list[Pipeline], tenants: dict[int, Tenant], held: Counter[int]
) -> Iterator[Refusal]:
    ahead = Counter(pipeline.tenant for pipeline in waiting)
    for pipeline in over_quota:
        limit = tenants[pipeline.tenant].max_devices or 0
        before = ahead[pipeline.tenant]
        text = texts.over_quota(pipeline.devices, limit, held[pipeline.tenant], before)
        yield Refusal(RefusalCode.QUOTA, text, pipeline=pipeline.id, ahead=before)
        ahead[pipeline.tenant] += pipeline.devices <= limit


def _turn_refusals(
    waiting: list[Pipeline], board: _Board, clocks: dict[int, Clock], tenants: dict[int, Tenant]
) -> Iterator[Refusal]:
    by_code: dict[RefusalCode, list[Pipeline]] = defaultdict(list)
    for pipeline in waiting:
        by_code[board.lacks(pipeline)].append(pipeline)
    for code in (RefusalCode.NO_DEVICES, RefusalCode.MEMORY, RefusalCode.TURN):
        for pipeline, ahead in ahead_of(by_code[code], clocks, lambda p: turn_cost(p, tenants)):
            if code is RefusalCode.NO_DEVICES:
                text = texts.not_ready(pipeline.devices, len(board.ready))
            else:
                text = texts.waiting("memory" if code is RefusalCode.MEMORY else "its turn", ahead)
            yield Refusal(code, text, pipeline=pipeline.id, ahead=ahead)
