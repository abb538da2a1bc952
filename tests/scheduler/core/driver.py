"""Plays a world on a board: every event is followed by a decision, and every decision is checked.

Sub-stages end when the board predicts it, or at a random moment before; what is offered next comes from the
pipeline's graph. The driver believes the board and knows nothing of its own, so it has no physics.
"""

from __future__ import annotations

import random
from dataclasses import replace
from math import isclose

from scheduler.core.board import Board
from scheduler.core.graph import Graph, GraphNode, build, offered
from scheduler.core.invariants import check, check_decision, check_plan
from scheduler.core.plan import decide, plan
from scheduler.core.state import (
    Action,
    Admit,
    Device,
    DeviceState,
    Merge,
    Node,
    NodeState,
    Plan,
    Policy,
    QueuedJob,
    Snapshot,
    Start,
    Tenant,
    Wait,
    Yield,
)
from tests.scheduler.core.patience import Patience

Key = tuple[int, str]


class Run:
    """An attempt: which nodes of its graph are over, and which were offered."""

    def __init__(self, job: QueuedJob, steps: int) -> None:
        assert job.shape is not None
        self.job, self.steps, self.trained = job, steps, 0
        self.graph: Graph = build(job.shape, job.outlook, 0, steps)
        self.done: set[str] = set()
        self.begun: set[str] = set()

    def last_of_step(self, step: int) -> set[str]:
        last = len(self.job.outlook.train) - 1
        return {n.id for n in self.graph.nodes if n.step == step and n.part == last and _trains(n)}

    def skip_rollouts(self, id: str) -> None:
        """The node's sequences went to another: what is left of its worker's step is over with them."""
        of = next(node for node in self.graph.nodes if node.id == id)
        for node in self.graph.nodes:
            if (
                (node.step, node.worker) == (of.step, of.worker)
                and node.part >= of.part
                and not _trains(node)
            ):
                self.done.add(node.id)


def _trains(node: GraphNode) -> bool:
    return node.id.rsplit(".", 1)[1].startswith("t")


def same(one: Snapshot, other: Snapshot) -> bool:
    """But for the order of sums; and a wait that is over is forgotten sooner or later."""

    def bare(world: Snapshot) -> Snapshot:
        tenants = tuple(replace(t, service=0.0) for t in world.tenants)
        return replace(
            world, tenants=tenants, nodes=tuple(replace(n, left=0.0) for n in world.nodes), waits=()
        )

    sums = [[*(t.service for t in w.tenants), *(n.left for n in w.nodes)] for w in (one, other)]
    return bare(one) == bare(other) and all(isclose(a, b, abs_tol=1e-6) for a, b in zip(*sums, strict=True))


class Driver:
    """``watch`` sees every decision; ``whole``: each is about everything, not about what was touched."""

    def __init__(
        self,
        seed: int,
        policy: Policy,
        devices: tuple[Device, ...],
        tenants: tuple[Tenant, ...],
        tables: dict,
        steps: int = 2,
        watch: Patience | None = None,
        whole: bool = False,
    ) -> None:
        self.rng, self.policy, self.steps = random.Random(seed), policy, steps
        self.board = Board(0.0, seed, tables, policy.shares)
        for device in devices:
            self.board.set_device(device)
        self.board.tenants = {tenant.id: tenant for tenant in tenants}
        self.runs: dict[int, Run] = {}
        self.jobs: dict[str, QueuedJob] = {}
        self.left: dict[str, int] = {}
        self.timers: dict[int, float] = {}
        #: When each job that did all its steps did the last.
        self.ended: dict[str, float] = {}
        self.story: list[str] = []
        self.yields: list[Key] = []
        self._watch, self._whole = watch, whole

    # ------------------------------------------------------------ events

    def submit(self, job: QueuedJob) -> None:
        """A tenant that had no work gets no credit for that time."""
        busy = {p.tenant for p in self.board.pipelines.values()} | {
            j.tenant for j in self.board.queue.values()
        }
        if busy and job.tenant not in busy:
            least = min(self.board.tenants[id].service for id in busy)
            own = self.board.tenants[job.tenant]
            self.board.tenants[job.tenant] = replace(own, service=max(own.service, least))
        self.jobs[job.id] = job
        self.left.setdefault(job.id, self.steps)
        self.board.submit(job)
        self.decide()

    def advance(self) -> bool:
        """The next predicted end, or somebody's wait that is over; False when nothing is to come."""
        ends = self.ends()
        timers = [(until, id) for id, until in self.timers.items()]
        if timers and min(timers)[0] < min(ends, default=(float("inf"),))[0]:
            until, id = min(timers)
            del self.timers[id]
            self.board.tick(max(self.board.now, until))
            self.board.touched.update(self.board.pipelines[id].home)
            self.board.offering[id] = None
            self.decide()
            return True
        if not ends:
            return False
        first = min(ends)[0]
        self.finish(first, [(id, unit) for end, id, unit in ends if end - first < 1e-9])
        return True

    def surprise(self) -> None:
        """Something ends long before it was predicted."""
        ends = self.ends()
        if ends:
            _, pipeline, unit = self.rng.choice(ends)
            before = min(end for end, _, _ in ends) - self.board.now
            self.finish(self.board.now + before * self.rng.choice([0.1, 0.7]), [(pipeline, unit)])

    def ends(self) -> list[tuple[float, int, str]]:
        """When each unit that runs is predicted to end: a node, or all of a gang."""
        found: dict[tuple[int, str], float] = {}
        for id in self.runs:
            for node in self.board.nodes[id].values():
                if node.state is NodeState.RUNNING:
                    speed = self.board.speed.get((id, node.id), 1.0)
                    end = self.board.now + self.board.left_now(node) / speed
                    unit = (id, node.gang or node.id)
                    found[unit] = max(end, found.get(unit, 0.0))
        return [(end, id, unit) for (id, unit), end in found.items()]

    def finish(self, now: float, units: list[Key]) -> None:
        self.board.tick(now)
        for pipeline, unit in units:
            for node in list(self.board.nodes[pipeline].values()):
                if unit in (node.gang, node.id):
                    self.board.finish(pipeline, node.id)
                    self.runs[pipeline].done.add(node.id)
        for pipeline in dict.fromkeys(pipeline for pipeline, _ in units):
            self.go_on(pipeline)
        self.decide()

    def go_on(self, pipeline: int) -> None:
        """Count the steps that are over; offer what may begin; end the attempt when all is done."""
        run = self.runs[pipeline]
        while run.trained < run.steps and run.last_of_step(run.trained) <= run.done:
            run.trained += 1
            self.left[run.job.id] -= 1
            self.board.step_done(pipeline)
        if run.trained == run.steps:
            del self.runs[pipeline]
            self.timers.pop(pipeline, None)
            del self.left[run.job.id]
            self.ended[run.job.id] = self.board.now
            self.board.end(pipeline)
            return
        for node in offered(run.graph, run.done, run.begun):
            run.begun.add(node.id)
            kind, segment = node.segment.kind, node.segment
            self.board.offer(
                Node(
                    node.id,
                    pipeline,
                    node.step,
                    node.worker,
                    kind,
                    gang=node.gang,
                    part=node.part,
                    segment=segment,
                    left=segment.seconds,
                    since=self.board.now,
                    tokens=10 * segment.batch,
                )
            )

    def lose(self, pipeline: int) -> None:
        """The attempt ends, and its job is submitted again for the steps that are left."""
        run = self.runs.pop(pipeline)
        self.timers.pop(pipeline, None)
        self.board.end(pipeline)
        self.board.submit(run.job)

    def set_state(self, name: str, state: DeviceState) -> None:
        device = self.board.devices[name]
        if state is DeviceState.LOST:
            for id in [id for id, p in self.board.pipelines.items() if name in p.home]:
                self.lose(id)
        self.board.set_device(replace(device, state=state))
        self.decide()

    def disturb(self) -> None:
        """One thing that is not just work going on."""
        board, rng = self.board, self.rng
        choice = rng.random()
        if choice < 0.3 and board.devices:
            self.set_state(rng.choice(sorted(board.devices)), rng.choice(list(DeviceState)))
        elif choice < 0.4 and self.runs:
            id = rng.choice(sorted(self.runs))
            del self.left[self.runs[id].job.id]
            del self.runs[id]
            self.timers.pop(id, None)
            board.end(id)
            self.decide()
        elif choice < 0.5 and board.queue:
            job = rng.choice(sorted(board.queue))
            del self.left[job]
            board.withdraw(job)
            self.decide()
        elif choice < 0.7:
            running = [n for nodes in board.nodes.values() for n in nodes.values() if n.device is not None]
            if running:
                node = rng.choice(running)
                mates = [n.id for n in board.nodes[node.pipeline].values() if n.gang == node.gang != ""]
                seconds = node.left * rng.choice([0.3, 2.0])
                board.revise(node.pipeline, dict.fromkeys(mates or [node.id], seconds))
                self.decide()
        else:
            self.surprise()

    # ------------------------------------------------------------ decisions

    def decide(self) -> None:
        board, policy = self.board, self.policy
        while True:
            before = board.snapshot()
            assert not (wrong := check(before, policy)), wrong
            if self._whole:
                board.touch_all()
            if self._watch is not None:
                self._watch.before(board)
            whole = plan(before, policy)
            assert not (wrong := check_plan(before, whole, policy)), wrong
            decided = decide(board, policy)
            assert not (wrong := check_decision(before, decided, policy)), wrong
            after = board.snapshot()
            assert not (wrong := check(after, policy)), wrong
            assert same(self.applied(before, decided), after)
            self.require_the_same_predictions(after)
            self.story.append(repr(decided))
            if self._watch is not None:
                self._watch.after(board, decided)
            for action in decided.actions:
                self.note(action)
            new = [a for a in decided.actions if isinstance(a, Admit)]
            if not new and not board.touched and not board.offering:
                return

    def applied(self, before: Snapshot, decided: Plan) -> Snapshot:
        board = Board.of(before, self.policy.shares)
        for action in decided.actions:
            board.apply(action)
        return board.snapshot()

    def require_the_same_predictions(self, after: Snapshot) -> None:
        """What a board knows is in its snapshot: rows, and the speeds that follow from them."""
        again = Board.of(after, self.policy.shares)
        assert again.snapshot() == after
        for device in sorted(after.devices, key=lambda d: d.name):
            for key in self.board.running[device.name]:
                assert abs(again.speed.get(key, 1.0) - self.board.speed.get(key, 1.0)) < 1e-9, key

    def note(self, action: Action) -> None:
        board = self.board
        match action:
            case Admit():
                (id,) = (id for id, p in board.pipelines.items() if p.job == action.job)
                self.runs[id] = Run(self.jobs[action.job], self.left[action.job])
                self.go_on(id)
            case Merge():
                for source in action.sources:
                    self.runs[action.pipeline].skip_rollouts(source)
            case Wait():
                self.timers[action.pipeline] = action.until
            case Start():
                self.timers.pop(action.pipeline, None)
            case Yield():
                self.yields.append((action.pipeline, action.node))
