"""A pool in full swing, played by predictions, to measure decisions in.

It drives a ``Board`` as the daemon does: sub-stages end, the next ones are offered, steps end, now and then
a job ends and another comes. Jobs are those of the evaluation, on 1 to 8 devices each. How long a sub-stage
really takes is its prediction times a drawn factor; all that happens at one moment is decided about at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from time import perf_counter, thread_time

from scheduler.core.board import Board, Key
from scheduler.core.graph import Graph, GraphNode, build, offered
from scheduler.core.plan import decide
from scheduler.core.state import (
    ROLLOUT,
    Action,
    Admit,
    Device,
    Kind,
    Merge,
    Node,
    Outlook,
    Policy,
    QueuedJob,
    Start,
    Tenant,
    Wait,
    Yield,
)
from scheduler.sim.devices import H100
from scheduler.sim.nature import Measured
from scheduler.sim.scenario import Scenario, SimJob
from scheduler.sim.workloads import WORKLOADS

#: Successive jobs and their workers: 4.5 in the mean. With half as many jobs as devices 2 or 3 live on each.
JOBS = (
    ("aime-qwen3-4b", 8),
    ("math-llama3.1-8b", 4),
    ("search128-qwen3-4b", 8),
    ("gsm8k-qwen3-8b", 2),
    ("math-qwen3-4b", 4),
    ("search128-llama3.1-8b", 8),
    ("math-qwen3-0.6b", 1),
    ("gsm8k-qwen3-4b", 1),
)
TENANTS = 8
#: Spread of true durations around predictions (sigma of the logarithm).
SPREAD = 0.2
#: Of so many decisions one follows the end or the arrival of a job. A step has tens of sub-stages and a job
#: tens of steps, so in life it is one of a thousand: here often enough to be seen in the 99th percentile.
CHURN = 50


@cache
def queued(number: int) -> QueuedJob:
    """The job that comes as the ``number``-th."""
    task, workers = JOBS[number % len(JOBS)]
    workload = WORKLOADS[task]
    job = SimJob(f"job-{number}", number % TENANTS, float(number), workload, 1, workers)
    return Measured(Scenario("jobs", H100, workers, (job,))).queued(job)


@dataclass(slots=True)
class Life:
    """A job that runs: the graph of its present step, and which of its nodes are over or were offered."""

    job: QueuedJob
    step: int
    graph: Graph
    done: set[str] = field(default_factory=set)
    begun: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Truth:
    """Of a running sub-stage: true solo seconds left at ``since``, and the speed since then."""

    left: float
    speed: float
    since: float


@dataclass(frozen=True, slots=True)
class Decision:
    """``cpu_seconds`` are less than ``seconds`` when the core was taken away. ``touched`` devices were to be
    looked at; ``admission``: queued jobs as well.
    """

    seconds: float
    cpu_seconds: float
    touched: int
    admission: bool
    actions: tuple[Action, ...]


class World:
    def __init__(self, devices: int, pipelines: int, policy: Policy, seed: int) -> None:
        self._policy = policy
        self._seed = seed
        self._rng = random.Random(f"{seed}/world")
        self._events: list[tuple[float, int, str, Key]] = []
        self._entered = 0
        self._lives: dict[int, Life] = {}
        self._truths: dict[Key, Truth] = {}
        self._due: dict[Key, float] = {}
        self._decided = 0
        self._arrived = self._at_first = pipelines
        self.steps = 0
        self.board = Board(0.0, seed, {H100.name: H100.interference}, policy.shares)
        for place in range(devices):
            self.board.set_device(Device(f"d{place:04}", H100.name, H100.memory_bytes))
        self.board.tenants = {id: Tenant(id) for id in range(TENANTS)}
        for number in range(pipelines):
            self.board.submit(queued(number))
        self._decide()
        self.play()

    @property
    def pipelines(self) -> int:
        return len(self.board.pipelines)

    def play(self) -> Decision:
        """The next moment, and the decision about it."""
        if self._decided % CHURN == 0:
            self._churn()
        else:
            self._next_moment()
        return self._decide()

    # ------------------------------------------------------------ what happens

    def _enter(self, time: float, what: str, key: Key) -> None:
        heappush(self._events, (time, self._entered, what, key))
        self._entered += 1

    def _next_moment(self) -> None:
        """Raises ``IndexError`` when nothing happens any more: then the planner left everybody waiting."""
        happened = False
        while not happened or self._events[0][0] <= self.board.now + 1e-9:
            time, _, what, key = heappop(self._events)
            if what == "end" and self._due.get(key) == time:
                self.board.tick(max(self.board.now, time))
                self._end(key)
                happened = True
            elif what == "begin":
                self._live(key[0])
                happened = True
            elif what == "wake" and self.board.waits.get(key[0]) == time:
                self.board.tick(max(self.board.now, time))
                self.board.touched.update(self.board.pipelines[key[0]].home)
                happened = True
            if not self._events and happened:
                return

    def _churn(self) -> None:
        """A job ends, or the one that takes its place comes."""
        if self._decided // CHURN % 2:
            self.board.submit(queued(self._arrived))
            self._arrived += 1
            return
        gone = self._rng.choice(sorted(self._lives))
        self.board.end(gone)
        del self._lives[gone]
        for key in [key for key in self._truths if key[0] == gone]:
            del self._truths[key]
            self._due.pop(key, None)

    def _end(self, key: Key) -> None:
        pipeline, node = key
        del self._truths[key], self._due[key]
        self.board.finish(pipeline, node)
        self._lives[pipeline].done.add(node)
        self._offer(pipeline)

    def _offer(self, pipeline: int, started: float = 0.0) -> None:
        """Offer what may begin, of which ``started`` is done; what does not occur is over at once."""
        life = self._lives[pipeline]
        while True:
            if len(life.done) == len(life.graph.nodes):
                self.board.step_done(pipeline)
                self.steps += 1
                self._lives[pipeline] = life = _life(life.job, life.step + 1)
            ready = offered(life.graph, life.done, life.begun)
            absent = [node.id for node in ready if node.segment.seconds <= 0]
            life.done.update(absent)
            life.begun.update(node.id for node in ready)
            for node in ready:
                if node.segment.seconds > 0:
                    self.board.offer(self._node(pipeline, node, started))
            if not absent:
                return

    def _node(self, pipeline: int, node: GraphNode, started: float) -> Node:
        segment = node.segment
        return Node(
            id=node.id,
            pipeline=pipeline,
            step=node.step,
            worker=node.worker,
            kind=segment.kind,
            gang=node.gang,
            part=node.part,
            segment=segment,
            left=segment.seconds * (1 - started),
            since=self.board.now,
            tokens=segment.batch * 1000 if segment.kind in (Kind.DECODE, Kind.TAIL) else 0,
        )

    # ------------------------------------------------------------ what is decided

    def _decide(self) -> Decision:
        board = self.board
        touched, admission = len(board.touched), board.admission and bool(board.queue)
        began, worked = perf_counter(), thread_time()
        plan = decide(board, self._policy)
        seconds, cpu_seconds = perf_counter() - began, thread_time() - worked
        self._decided += 1
        begun_and_merged = {
            (action.pipeline, source)
            for action in plan.actions
            if isinstance(action, Merge)
            for source in action.sources
        }
        for action in plan.actions:
            if not (isinstance(action, Start) and (action.pipeline, action.node) in begun_and_merged):
                self._carry_out(action)
        self._keep_pace()
        return Decision(seconds, cpu_seconds, touched, admission, plan.actions)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Admit():
                pipeline = next(p.id for p in self.board.pipelines.values() if p.job == action.job)
                self._enter(self.board.now, "begin", (pipeline, ""))
            case Start():
                self._begin((action.pipeline, action.node))
            case Wait():
                self._enter(action.until, "wake", (action.pipeline, ""))
            case Merge():
                self._gather(action)
            case Yield():
                del self._truths[action.pipeline, action.node], self._due[action.pipeline, action.node]

    def _live(self, pipeline: int) -> None:
        """The job begins; the first ones in the middle of a step, so that not all are at the same place."""
        number = int(self.board.pipelines[pipeline].job.removeprefix("job-"))
        job = queued(number)
        self._lives[pipeline] = life = _life(job, 0)
        if number >= self._at_first:
            self._offer(pipeline)
            return
        rollout = len(job.outlook.rollout)
        place, started = _moment(job.outlook, self._rng.random())
        over = {n.id for n in life.graph.nodes if n.part + (0 if _rolls(n) else rollout) < place}
        life.done, life.begun = set(over), set(over)
        self._offer(pipeline, started)

    def _begin(self, key: Key) -> None:
        node = self.board.nodes[key[0]][key[1]]
        left = node.left or (node.segment.seconds if node.segment else 0.0)
        self._truths[key] = Truth(left * self._factor(node), 0.0, self.board.now)
        if node.device is None:
            self._run_at(key, 1.0)

    def _factor(self, node: Node) -> float:
        """The same for all of a gang."""
        rng = random.Random(f"{self._seed}/{node.pipeline}/{node.gang or node.id}")
        return rng.lognormvariate(0, SPREAD)

    def _gather(self, merge: Merge) -> None:
        """The sources' sequences go on with the target, in later turns too."""
        life = self._lives[merge.pipeline]
        for source in merge.sources:
            self._truths.pop((merge.pipeline, source), None)
            self._due.pop((merge.pipeline, source), None)
        emptied = {node.worker for node in life.graph.nodes if node.id in merge.sources}
        over = {node.id for node in life.graph.nodes if node.worker in emptied and _rolls(node)}
        life.done |= over
        life.begun |= over
        self._begin((merge.pipeline, merge.target))

    def _keep_pace(self) -> None:
        """Sub-stages whose speed changed end at another time."""
        for device in self.board.running.values():
            for key in device:
                speed = self.board.speed[key]
                if self._truths[key].speed != speed:
                    self._run_at(key, speed)

    def _run_at(self, key: Key, speed: float) -> None:
        truth, now = self._truths[key], self.board.now
        truth.left = max(0.0, truth.left - (now - truth.since) * truth.speed)
        truth.speed, truth.since = speed, now
        self._due[key] = now + truth.left / speed
        self._enter(self._due[key], "end", key)


def _life(job: QueuedJob, step: int) -> Life:
    if job.shape is None:
        raise ValueError(f"{job.id} has no shape")
    return Life(job, step, build(job.shape, job.outlook, step, 1))


def _moment(outlook: Outlook, passed: float) -> tuple[int, float]:
    """The part that runs after so much of a step, and how much of it is over."""
    left = passed * outlook.seconds
    for place, segment in enumerate((*outlook.rollout, *outlook.train)):
        if left < segment.seconds:
            return place, left / segment.seconds
        left -= segment.seconds
    raise ValueError(f"{passed} is not before the end of a step of {outlook.seconds} s")


def _rolls(node: GraphNode) -> bool:
    return node.segment.kind in ROLLOUT or node.segment.kind is Kind.TOOL
