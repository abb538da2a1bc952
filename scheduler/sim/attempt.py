"""A running job as it truly is: what of its graph is over, what is open, and how much of that is left."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from scheduler.core.graph import GraphNode, build, staleness
from scheduler.core.profile import Profile
from scheduler.core.state import OFF_DEVICE, ROLLOUT, Kind, Node, Outlook, QueuedJob, Segment
from scheduler.sim.chain import Chain, Piece, parts_of
from scheduler.sim.nature import Nature
from scheduler.sim.scenario import SimJob
from scheduler.sim.truth import Rollout, StepTruth, TrueSegment


@dataclass(slots=True, eq=False)
class Task:
    """A unit of the graph that is open: a gang, or one node. All of a gang moves on together.

    ``left`` are true solo seconds, ``seen`` the solo seconds done as far as the planner can tell (time by the
    speed it predicts), ``expected`` those that it predicts in all. ``places`` has the nodes that run.
    """

    attempt: Attempt
    unit: str
    nodes: tuple[GraphNode, ...]
    kind: Kind
    part: int
    true: Segment
    whole: float
    left: float
    expected: float
    chain: Chain | None = None
    places: dict[str, str | None] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    worker_speeds: dict[str, float] = field(default_factory=dict)
    speed: float = 0.0
    predicted_speed: float = 0.0
    since: float = 0.0
    seen: float = 0.0
    version: int = 0
    warned: bool = False

    @property
    def runs(self) -> bool:
        return bool(self.places)

    @property
    def on_device(self) -> bool:
        return self.kind not in OFF_DEVICE

    def settle(self, now: float) -> None:
        if self.runs:
            self.left -= (now - self.since) * self.speed
            self.seen += (now - self.since) * self.predicted_speed
        self.since = now

    def do(self, piece: Piece) -> None:
        """What it truly is from now on."""
        self.kind, self.part, self.true = piece.segment.kind, piece.part, piece.segment
        self.whole = self.left = piece.seconds


@dataclass(slots=True)
class Step:
    """``version`` is the number of updates that the weights had seen which rolled it out (the least of all
    workers'). ``to_sample``: tokens.
    """

    truth: StepTruth
    chains: dict[int, Chain]
    train: tuple[TrueSegment | None, ...]
    to_sample: int
    version: int | None = None

    @property
    def sampled(self) -> int:
        return sum(chain.sampled for chain in self.chains.values())


class Attempt:
    """``updates`` is the number of steps that are over; ``over`` those that ended and were not yet told."""

    def __init__(
        self, job: SimJob, queued: QueuedJob, pipeline: int, done: int, nature: Nature, seed: int
    ) -> None:
        if queued.shape is None:
            raise ValueError(f"{job.id}: a simulated job needs a shape")
        self.job, self.queued, self.pipeline = job, queued, pipeline
        self.updates = done
        self.max_staleness = staleness(queued.shape)
        self.profile = Profile.of(queued.outlook)
        self.open: dict[str, Task] = {}
        self.over: list[int] = []
        self._nature, self._seed = nature, seed
        self._shape = queued.shape
        self._parts = parts_of(queued.outlook.rollout, nature.table.saturation)
        self._graph = build(queued.shape, queued.outlook, done, job.steps - done)
        self._missing = {unit: len(before) for unit, before in self._graph.before.items()}
        self._steps: dict[int, Step] = {}
        self._outlook: Outlook | None = queued.outlook

    # ------------------------------------------------------------ the graph

    def first(self) -> list[Task]:
        """What is offered when the attempt begins."""
        return self._open_units([unit for unit, missing in self._missing.items() if not missing])

    def follow(self, task: Task) -> list[Task]:
        """What is offered once the task has no more pieces."""
        return self._open_units(self._close(task.unit))

    def next_piece(self, task: Task) -> Piece | None:
        """The node's next piece, when it is one of a rollout and goes on."""
        return task.chain.proceed(task.nodes[0].part) if task.chain is not None else None

    def step(self, number: int) -> Step:
        if number not in self._steps:
            self._steps[number] = self._draw(number)
        return self._steps[number]

    def forget(self, number: int) -> None:
        del self._steps[number]

    def starts(self, task: Task) -> None:
        """Its rollouts are made by the weights of this moment."""
        if task.chain is not None:
            step = self.step(task.nodes[0].step)
            step.version = self.updates if step.version is None else min(step.version, self.updates)

    def _draw(self, number: int) -> Step:
        truth = self._nature.draw(self.job, number, self._seed)
        saturation = self._nature.table.saturation
        chains = {
            worker: Chain(self._parts, list(turns), self._nature.peak, saturation)
            for worker, turns in zip(self._shape.rollout_workers, truth.rollout, strict=True)
        }
        to_sample = sum(_to_sample(turn.rollout) for turns in truth.rollout for turn in turns)
        train = occurring(truth.train, self.queued.outlook.train)
        return Step(truth, chains, train, to_sample)

    def _open_units(self, units: Iterable[str]) -> list[Task]:
        """Tasks for what occurs; what does not is over at once."""
        tasks, waiting = [], deque(units)
        while waiting:
            unit = waiting.popleft()
            task = self._task(unit)
            if task is None:
                waiting.extend(self._close(unit))
            else:
                tasks.append(task)
                self.open.update((node.id, task) for node in task.nodes)
        return tasks

    def _close(self, unit: str) -> list[str]:
        nodes = self._graph.units[unit]
        for node in nodes:
            self.open.pop(node.id, None)
        if not _is_rollout(nodes[0]) and nodes[0].part == len(self.queued.outlook.train) - 1:
            self.updates += 1
            self.over.append(nodes[0].step)
        freed = []
        for after in self._graph.after[unit]:
            self._missing[after] -= 1
            if not self._missing[after]:
                freed.append(after)
        return freed

    def _task(self, unit: str) -> Task | None:
        nodes = self._graph.units[unit]
        first = nodes[0]
        step = self.step(first.step)
        if _is_rollout(first):
            chain = step.chains[first.worker]
            piece = chain.proceed(first.part)
            self.learn(chain)
            if piece is None:
                return None
            task = Task(
                self, unit, nodes, piece.segment.kind, piece.part, piece.segment, 0.0, 0.0, 0.0, chain
            )
            task.do(piece)
            return task
        segment = step.train[first.part]
        if segment is None:
            self.observe_train(first.part, 0.0)
            return None
        predicted = self.outlook.train[first.part]
        true = Segment(segment.kind, segment.seconds, bandwidth=predicted.bandwidth)
        return Task(self, unit, nodes, segment.kind, first.part, true, segment.seconds, segment.seconds, 0.0)

    # ------------------------------------------------------------ what the planner is told

    @property
    def outlook(self) -> Outlook:
        """What is expected of a step, after all that was seen."""
        if self._outlook is None:
            self._outlook = self.profile.outlook()
        return self._outlook

    def learn(self, chain: Chain) -> None:
        for seen in chain.report():
            self.profile = self.profile.observe(
                "rollout", seen.part, seen.seconds, seen.batch, seen.forward_seconds
            )
            self._outlook = None

    def observe_train(self, part: int, seconds: float) -> None:
        self.profile = self.profile.observe("train", part, seconds)
        self._outlook = None

    def offers(self, task: Task, now: float) -> list[Node]:
        """The task's nodes, with what is predicted of them."""
        segment = self._predicted(task)
        task.expected = segment.seconds
        tokens = task.chain.piece.tokens if task.chain is not None and task.chain.piece is not None else 0
        return [
            Node(
                id=node.id,
                pipeline=self.pipeline,
                step=node.step,
                worker=node.worker,
                kind=segment.kind,
                gang=node.gang,
                part=task.part,
                segment=segment,
                left=segment.seconds,
                since=now,
                tokens=tokens,
            )
            for node in task.nodes
        ]

    def _predicted(self, task: Task) -> Segment:
        """For a decode the batch is known when it begins: its forwards are counted at that batch."""
        chain: Literal["rollout", "train"] = "train" if task.chain is None else "rollout"
        return self.profile.predicted(chain, task.part, task.true.batch)


def _is_rollout(node: GraphNode) -> bool:
    return node.segment.kind in ROLLOUT or node.segment.kind is Kind.TOOL


def _to_sample(rollout: Rollout) -> int:
    whole = rollout.copy()
    return whole.advance(whole.steps_until(1))


def occurring(truth: Sequence[TrueSegment], expected: Sequence[Segment]) -> tuple[TrueSegment | None, ...]:
    """The true segments, None where one takes no time. Raises ``ValueError`` when they are others."""
    if [segment.kind for segment in truth] != [segment.kind for segment in expected]:
        raise ValueError(f"{[s.kind for s in truth]} where {[s.kind for s in expected]} was expected")
    return tuple(segment if segment.seconds > 0 else None for segment in truth)
