"""The world between decisions, indexed, so that an event costs what it touches.

A board is a snapshot that changes in place: the driver (daemon or simulator) tells it events, the passes of a
plan tell it actions, and it remembers which devices were touched since the last decision.
``Board.of(snapshot)`` and ``board.snapshot()`` are inverse; a plan of a snapshot is the plan of its board
with everything touched.

Running sub-stages move on by prediction: whenever the set or the shares on a device change, what is left of
those that run there is settled at the speed they had, and their new speed is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import takewhile

from scheduler.core.interference import Interference
from scheduler.core.mix import Memo
from scheduler.core.rates import Running, Slot, gang_speed, slot_of, speeds
from scheduler.core.state import (
    OFF_DEVICE,
    UNKNOWN_STEP_SECONDS,
    Action,
    Admit,
    Device,
    DeviceState,
    Evict,
    Kind,
    Merge,
    Node,
    NodeState,
    Outlook,
    Pipeline,
    Place,
    QueuedJob,
    Rehome,
    Resident,
    Resize,
    Segment,
    Snapshot,
    Start,
    Tenant,
    Wait,
    Yield,
)

Key = tuple[int, str]

#: A prediction that ran out leaves so much of the whole: long tails are longer than one thinks.
OVERDUE = 0.25


class Board:
    """``tables`` has an interference table for each type of device that is multiplexed. ``shares``: whether
    gangs split their work in proportion to their workers' speeds.
    """

    def __init__(self, now: float, seed: int, tables: Mapping[str, Interference], shares: bool) -> None:
        self.now = now
        self.seed = seed
        self.tables = tables
        self.shares = shares
        self.devices: dict[str, Device] = {}
        self.tenants: dict[int, Tenant] = {}
        self.queue: dict[str, QueuedJob] = {}
        self.pipelines: dict[int, Pipeline] = {}
        self.nodes: dict[int, dict[str, Node]] = {}
        self.residents: dict[tuple[str, str], Resident] = {}
        self.running: dict[str, dict[Key, Node]] = {}
        self.at_home: dict[str, dict[int, None]] = {}
        self.speed: dict[Key, float] = {}
        self.waits: dict[int, float] = {}
        self.touched: set[str] = set()
        self.offering: dict[int, None] = {}
        self.admission = True
        self.memo: Memo = {}
        self._worker_speed: dict[Key, float] = {}
        self._gangs: dict[tuple[int, str], dict[Key, None]] = {}

    @classmethod
    def of(cls, snapshot: Snapshot, shares: bool = True) -> Board:
        board = cls(snapshot.now, snapshot.seed, dict(snapshot.tables), shares)
        for device in snapshot.devices:
            board.set_device(device)
        board.tenants = {tenant.id: tenant for tenant in snapshot.tenants}
        board.queue = {job.id: job for job in snapshot.queue}
        for pipeline in snapshot.pipelines:
            board._add_pipeline(pipeline)
        for node in snapshot.nodes:
            if node.pipeline in board.pipelines:
                board._put(node)
        board.residents = {(r.device, r.weights_key): r for r in snapshot.residents}
        board.waits = dict(snapshot.waits)
        board._refresh(name for name, running in board.running.items() if running)
        return board

    def snapshot(self) -> Snapshot:
        return Snapshot(
            now=self.now,
            seed=self.seed,
            devices=tuple(self.devices[name] for name in sorted(self.devices)),
            tenants=tuple(self.tenants[id] for id in sorted(self.tenants)),
            queue=tuple(self.queue[id] for id in sorted(self.queue)),
            pipelines=tuple(self.pipelines[id] for id in sorted(self.pipelines)),
            nodes=tuple(nodes[id] for _, nodes in sorted(self.nodes.items()) for id in sorted(nodes)),
            residents=tuple(self.residents[key] for key in sorted(self.residents)),
            tables=tuple(sorted(self.tables.items())),
            waits=tuple(sorted(self.waits.items())),
        )

    def around(self, pipeline: int) -> Snapshot:
        """The part of the snapshot that the pipeline's sub-stages see: its homes, what runs there, and
        the rest of the gangs of those.
        """
        own = self.pipelines.get(pipeline)
        homes = dict.fromkeys(own.home) if own is not None else {}
        names = {name: None for name in homes if name in self.devices}
        ids = {pipeline, *(id for name in names for id in self.at_home[name])} & self.pipelines.keys()
        nodes = [self.nodes[id][node] for id in sorted(ids) for node in sorted(self.nodes[id])]
        names |= {node.device: None for node in nodes if node.device in self.devices}
        strangers = [node for name in names for (id, _), node in self.running[name].items() if id not in ids]
        ids |= {node.pipeline for node in strangers}
        return Snapshot(
            now=self.now,
            seed=self.seed,
            devices=tuple(self.devices[name] for name in sorted(names)),
            tenants=tuple(self.tenants[id] for id in sorted({self.pipelines[id].tenant for id in ids})),
            pipelines=tuple(self.pipelines[id] for id in sorted(ids)),
            nodes=tuple(sorted((*nodes, *strangers), key=lambda node: (node.pipeline, node.id))),
            residents=tuple(r for key, r in sorted(self.residents.items()) if key[0] in names),
            tables=tuple(sorted(self.tables.items())),
            waits=tuple((id, until) for id, until in sorted(self.waits.items()) if id in ids),
        )

    # ------------------------------------------------------------ events

    def touch_all(self) -> None:
        self.touched = set(self.devices)
        self.offering = dict.fromkeys(sorted(self.pipelines))
        self.admission = True

    def untouch(self) -> None:
        self.touched, self.offering, self.admission = set(), {}, False

    def tick(self, now: float) -> None:
        self.now = now

    def set_device(self, device: Device) -> None:
        """A device comes, drains or is lost; a lost one has nothing loaded any more."""
        self.devices[device.name] = device
        self.running.setdefault(device.name, {})
        self.at_home.setdefault(device.name, {})
        if device.state is DeviceState.LOST:
            for key in [key for key in self.residents if key[0] == device.name]:
                del self.residents[key]
        self.touched.add(device.name)
        self.admission = True

    def submit(self, job: QueuedJob) -> None:
        self.queue[job.id] = job
        self.admission = True

    def withdraw(self, job: str) -> None:
        self.queue.pop(job, None)
        self.admission = True

    def offer(self, node: Node) -> None:
        """A sub-stage's inputs are ready."""
        self._put(node)
        self.offering[node.pipeline] = None
        self.touched.update(self.devices_of(node))

    def finish(self, pipeline: int, node: str) -> None:
        """A sub-stage ran to its end."""
        if node not in self.nodes.get(pipeline, {}):
            raise ValueError(f"finish: pipeline {pipeline} has no node {node}")
        self._remove((pipeline, node))

    def revise(self, pipeline: int, left: Mapping[str, float]) -> None:
        """The driver learned how long some of the pipeline's sub-stages still take alone."""
        for id, seconds in left.items():
            node = self.nodes[pipeline][id]
            if node.device is not None:
                self._settle((node.device,))
                self.touched.add(node.device)
            self.nodes[pipeline][id] = node = replace(self.nodes[pipeline][id], left=seconds)
            if node.device is not None:
                self.running[node.device][pipeline, id] = node

    def expect(self, pipeline: int, outlook: Outlook) -> None:
        """What a step of the pipeline is expected to be, from now on."""
        self.pipelines[pipeline] = replace(
            self.pipelines[pipeline], outlook=outlook, step_seconds=outlook.seconds
        )

    def step_done(self, pipeline: int) -> None:
        """An update was applied. Devices held for the step are free again, unless another step runs there."""
        done = self.pipelines[pipeline]
        seconds = self.now - done.step_began
        if done.holds and not any(n.state is NodeState.RUNNING for n in self.nodes[pipeline].values()):
            self._serve(done.tenant, len(done.holds) * seconds)
            self.touched.update(done.holds)
            done = replace(done, holds=())
        self.pipelines[pipeline] = replace(done, step_began=self.now, stepped=done.stepped + 1)

    def end(self, pipeline: int) -> None:
        """The attempt is over, however it went. Its weights stay loaded until room is needed."""
        for id in list(self.nodes[pipeline]):
            self._remove((pipeline, id))
        gone = self.pipelines.pop(pipeline)
        del self.nodes[pipeline]
        self.waits.pop(pipeline, None)
        for name in gone.home:
            self.at_home.get(name, {}).pop(pipeline, None)
            self.touched.add(name)
        self.admission = True

    # ------------------------------------------------------------ actions

    def apply(self, action: Action) -> None:
        """Raises ``ValueError`` where there is nothing to apply it to; else trusts that it is legal."""
        match action:
            case Admit():
                self._admit(action)
            case Place():
                self._place(action)
            case Start():
                self._start(action)
            case Evict():
                if self.residents.pop((action.device, action.weights_key), None) is None:
                    raise ValueError(f"evict: {action.weights_key} is not on {action.device}")
            case Resize():
                self._resize(action)
            case Yield():
                self._yield(action)
            case Merge():
                self._merge(action)
            case Rehome():
                self._move_home(self._pipeline(action.pipeline, "rehome"), action.home)
            case Wait():
                self._pipeline(action.pipeline, "wait")
                self.waits[action.pipeline] = action.until

    def _admit(self, action: Admit) -> None:
        """The job becomes a pipeline. Its id is the next free one; the real one is the attempt's."""
        job = self.queue.pop(action.job, None)
        if job is None:
            raise ValueError(f"admit: job {action.job} is not in the queue")
        self._add_pipeline(
            Pipeline(
                id=max(self.pipelines, default=0) + 1,
                job=job.id,
                tenant=job.tenant,
                submitted=job.submitted,
                devices=job.devices,
                weights_key=job.weights_key,
                weights_bytes=job.weights_bytes,
                run_bytes=job.run_bytes,
                home=action.home,
                priority=job.priority,
                demand=job.demand,
                latency_cap=job.latency_cap,
                shape=job.shape,
                outlook=job.outlook,
                fusible=job.fusible,
                kv_tokens=job.kv_tokens,
                kv_bytes=job.kv_bytes,
                peak_bytes=job.peak_bytes,
                overlap_bytes=job.overlap_bytes,
                step_seconds=job.outlook.seconds or UNKNOWN_STEP_SECONDS,
                step_began=self.now,
            )
        )

    def _place(self, action: Place) -> None:
        """The pipeline holds the devices, which become its homes, and its weights get loaded there."""
        pipeline = self._pipeline(action.pipeline, "place")
        self._move_home(replace(pipeline, holds=action.devices, step_began=self.now), action.devices)
        for name in action.devices:
            self.residents[name, pipeline.weights_key] = Resident(
                name, pipeline.weights_key, pipeline.weights_bytes, last_used=self.now
            )

    def _move_home(self, pipeline: Pipeline, home: tuple[str, ...]) -> None:
        for name in self.pipelines[pipeline.id].home:
            self.at_home.get(name, {}).pop(pipeline.id, None)
        self._add_pipeline(replace(pipeline, home=home))
        self.touched.update(home)

    def _start(self, action: Start) -> None:
        node = self._node(action.pipeline, action.node, "start")
        if action.device is None:
            self._put(replace(node, state=NodeState.RUNNING, share=action.share, since=self.now))
            return
        self._settle((action.device,))
        left = node.left or (node.segment.seconds if node.segment else 0.0)
        self._put(
            replace(
                node,
                state=NodeState.RUNNING,
                device=action.device,
                share=action.share,
                since=self.now,
                left=left,
            )
        )
        self._refresh((action.device,))

    def _resize(self, action: Resize) -> None:
        node = self._node(action.pipeline, action.node, "resize")
        if node.device is None:
            raise ValueError(f"resize: {action.node} of pipeline {action.pipeline} does not run on a device")
        self._settle((node.device,))
        self._put(replace(self.nodes[action.pipeline][action.node], share=action.share))
        self._refresh((node.device,))

    def _yield(self, action: Yield) -> None:
        node = self._node(action.pipeline, action.node, "yield")
        if node.device is None:
            raise ValueError(f"yield: {action.node} of pipeline {action.pipeline} does not run on a device")
        self._settle((node.device,))
        node = self.nodes[action.pipeline][action.node]
        node = replace(node, left=self.left_now(node), since=self.now, share=0.0, yielded=True)
        self._remove((action.pipeline, action.node))
        self._put(replace(node, state=NodeState.READY, device=None))

    def _merge(self, action: Merge) -> None:
        target = self._node(action.pipeline, action.target, "merge")
        sources = [self._node(action.pipeline, id, "merge") for id in action.sources]
        devices = [node.device for node in (target, *sources) if node.device is not None]
        if len(devices) != 1 + len(sources):
            raise ValueError(f"merge: not all of {action.sources} and {action.target} run")
        self._settle(devices)
        own = self.nodes[action.pipeline]
        settled = [replace(own[id], left=self.left_now(own[id])) for id in (action.target, *action.sources)]
        merged = merge(settled[0], settled[1:], self.pipelines[action.pipeline].outlook)
        for id in action.sources:
            self._remove((action.pipeline, id))
        self._put(merged)
        self._refresh(devices)

    # ------------------------------------------------------------ rows

    def _pipeline(self, id: int, what: str) -> Pipeline:
        if id not in self.pipelines:
            raise ValueError(f"{what}: pipeline {id} is not running")
        return self.pipelines[id]

    def _node(self, pipeline: int, id: str, what: str) -> Node:
        node = self.nodes.get(pipeline, {}).get(id)
        if node is None:
            raise ValueError(f"{what}: pipeline {pipeline} offers no node {id}")
        return node

    def _add_pipeline(self, pipeline: Pipeline) -> None:
        self.pipelines[pipeline.id] = pipeline
        self.nodes.setdefault(pipeline.id, {})
        for name in pipeline.home:
            self.running.setdefault(name, {})
            self.at_home.setdefault(name, {})[pipeline.id] = None

    def _put(self, node: Node) -> None:
        self.nodes[node.pipeline][node.id] = node
        if node.gang:
            self._gangs.setdefault((node.pipeline, node.gang), {})[node.pipeline, node.id] = None
        if node.device is not None:
            self.running.setdefault(node.device, {})[node.pipeline, node.id] = node

    def _remove(self, key: Key) -> None:
        node = self.nodes[key[0]][key[1]]
        if node.device is not None:
            self._settle((node.device,))
            del self.running[node.device][key]
            self.touched.add(node.device)
        mates = [self.nodes[pipeline][id].device for pipeline, id in self.gang(key)]
        del self.nodes[key[0]][key[1]]
        if node.gang:
            gang = self._gangs[key[0], node.gang]
            del gang[key]
            if not gang:
                del self._gangs[key[0], node.gang]
        self.speed.pop(key, None)
        self._worker_speed.pop(key, None)
        self._refresh(name for name in mates if name is not None)

    def devices_of(self, node: Node) -> tuple[str, ...]:
        """Where the node runs, or would."""
        if node.device is not None:
            return (node.device,)
        home = self.pipelines[node.pipeline].home
        return (home[node.worker],) if node.kind not in OFF_DEVICE and 0 <= node.worker < len(home) else ()

    # ------------------------------------------------------------ speeds

    def on(self, device: str) -> list[Running]:
        """What computes there, as far as it can be predicted."""
        found = []
        for key, node in self.running[device].items():
            if node.segment is not None:
                found.append(Running(key, self.slot(node), node.segment, node.share))
        return found

    def slot(self, node: Node) -> Slot:
        pipeline = self.pipelines[node.pipeline]
        return slot_of(pipeline.id, pipeline.weights_key, pipeline.fusible, node.kind)

    def gang(self, key: Key) -> list[Key]:
        """The node itself, or all of its gang that are open."""
        node = self.nodes[key[0]][key[1]]
        if not node.gang:
            return [key]
        return list(self._gangs[key[0], node.gang])

    def with_gang(self, key: Key, speed: float) -> float:
        """How fast the node goes when its worker's speed is this and the rest of its gang goes on as now."""
        mates = self.gang(key)
        return gang_speed([speed if m == key else self._worker_speed.get(m, 1.0) for m in mates], self.shares)

    def left_now(self, node: Node) -> float:
        """Solo seconds that are left of it at this moment."""
        if node.state is not NodeState.RUNNING or node.segment is None:
            return node.left or (node.segment.seconds if node.segment else 0.0)
        return self._predicted(node) or OVERDUE * node.segment.seconds

    def overran(self, node: Node) -> bool:
        """Whether it should be over by what was predicted of it."""
        return self._predicted(node) == 0

    def _predicted(self, node: Node) -> float:
        """What is left of a running sub-stage by what was predicted of it; 0 once it should be over."""
        speed = self.speed.get((node.pipeline, node.id), 1.0)
        return max(0.0, node.left - (self.now - node.since) * speed)

    def _affected(self, devices: Iterable[str]) -> dict[Key, None]:
        keys: dict[Key, None] = {}
        for name in devices:
            for key in self.running.get(name, ()):
                for mate in self.gang(key):
                    keys[mate] = None
        return keys

    def _settle(self, devices: Iterable[str]) -> None:
        """Bring what runs on the devices, and the rest of their gangs, to ``now``."""
        for key in self._affected(devices):
            node = self.nodes[key[0]][key[1]]
            if node.device is None or node.since == self.now:
                continue
            pipeline = self.pipelines[node.pipeline]
            if not pipeline.holds:  # who holds whole devices is charged for that when the step is over
                part = node.share / self._sharing(node)
                self._serve(pipeline.tenant, (self.now - node.since) * part)
            self._put(replace(node, left=self._predicted(node), since=self.now))

    def _sharing(self, node: Node) -> int:
        """How many sub-stages are in the node's slot."""
        if node.device is None or len(self.running[node.device]) == 1:
            return 1
        own = self.slot(node)
        return sum(self.slot(other) == own for other in self.running[node.device].values())

    def _serve(self, tenant: int, device_seconds: float) -> None:
        served = self.tenants[tenant]
        self.tenants[tenant] = replace(served, service=served.service + device_seconds / served.weight)

    def _refresh(self, devices: Iterable[str]) -> None:
        keys: dict[Key, None] = {}
        for name in devices:
            table = self.tables.get(self.devices[name].type) if name in self.devices else None
            if table is None:
                continue
            for key, speed in speeds(self.on(name), table).items():
                self._worker_speed[key] = speed  # type: ignore[index]
                keys[key] = None  # type: ignore[index]
        for key in keys:
            mates = [self._worker_speed.get(mate, 1.0) for mate in self.gang(key)]
            speed = gang_speed(mates, self.shares)
            for mate in self.gang(key):
                self.speed[mate] = speed


def merge(target: Node, sources: list[Node], outlook: Outlook) -> Node:
    """The target once it has the sources' sequences: they prefill first, then all decode in one batch.

    A tail's sequences go on in the parts that follow, so the whole tails are joined; what the target's own
    following parts will take is not left of this one.
    """
    if target.segment is None:
        raise ValueError(f"merge: nothing is predicted of {target.id}")
    following = _tail_after(outlook, target.part)
    seconds, forward = _whole_tail(target, following)
    batch, moved, bandwidth = target.segment.batch, 0, target.segment.bandwidth
    for source in sources:
        if source.segment is None:
            raise ValueError(f"merge: nothing is predicted of {source.id}")
        other = source.segment
        own, own_forward = _whole_tail(source, _tail_after(outlook, source.part))
        together = forward + max(0.0, own_forward - other.floor_seconds)
        seconds = joined_seconds(seconds, forward, own, own_forward, together)
        forward, batch, moved = together, batch + other.batch, moved + source.tokens
        bandwidth = min(1.0, bandwidth + other.bandwidth / 2)
    left = max(target.left, seconds - sum(s.seconds for s in following))
    left += moved * prefill_seconds_per_token(outlook)
    segment = replace(
        target.segment,
        seconds=max(left, target.segment.seconds),
        batch=batch,
        forward_seconds=forward,
        bandwidth=bandwidth,
    )
    return replace(target, segment=segment, left=left, tokens=target.tokens + moved)


def _tail_after(outlook: Outlook, part: int) -> list[Segment]:
    """The parts of the same turn that follow a tail."""
    return list(takewhile(lambda segment: segment.kind is Kind.TAIL, outlook.rollout[part + 1 :]))


def _whole_tail(node: Node, following: list[Segment]) -> tuple[float, float]:
    """Seconds to the end of the node's tail, and a forward of it in the mean."""
    forward = node.segment.forward_seconds if node.segment else 0.0
    parts = [(node.left, forward), *((s.seconds, s.forward_seconds) for s in following)]
    seconds = sum(part for part, _ in parts)
    steps = sum(part / forward for part, forward in parts if forward > 0)
    return seconds, seconds / steps if steps > 0 else forward


def joined_seconds(
    left: float, forward: float, other_left: float, other_forward: float, together: float
) -> float:
    """Solo seconds of two batches decoded as one: together until the shorter has ended, then the longer."""
    steps = left / forward if forward > 0 else 0.0
    other_steps = other_left / other_forward if other_forward > 0 else 0.0
    longer = forward if steps >= other_steps else other_forward
    return min(steps, other_steps) * together + abs(steps - other_steps) * longer


def prefill_seconds_per_token(outlook: Outlook) -> float:
    for segment in outlook.rollout:
        if segment.tokens > 0 and segment.seconds > 0:
            return segment.seconds / segment.tokens
    return 0.0
