"""A world small enough to compute by hand: forwards of one second, a tenth of a second to prefill a token.

A share of a half slows everything down 1.5 times; saturation is a batch of 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from scheduler.core.board import Board
from scheduler.core.interference import Character, Interference
from scheduler.core.state import (
    OFF_DEVICE,
    Action,
    Admit,
    Kind,
    Merge,
    NodeState,
    Outlook,
    Plan,
    Policy,
    QueuedJob,
    Segment,
    Shape,
    Start,
)
from scheduler.sim.devices import H100
from scheduler.sim.models import HOST, Line, ModelCost, cost
from scheduler.sim.scenario import Scenario, SimJob
from scheduler.sim.truth import Rollout, StepTruth, TrueSegment, Turn
from scheduler.sim.workloads import WORKLOADS

#: A forward takes 1 s whatever its batch; a token is prefilled in 0.1 s.
COST: ModelCost = replace(
    cost("qwen3-4b"), decode=(1000 / HOST, 0.0, 0.0), prefill=Line(0.0, 100 / HOST), gpus=4
)
#: Prompt tokens of every sequence.
PROMPT = 6

#: Decode until fewer than 4 of 5 sequences run: 4 s; the tail: 6 s more.
LENGTHS = (2, 4, 6, 8, 10)
#: Seconds of a step alone on its device: prefill 1, decode 4, tail 6, grade 0.5, sync 1, update 4, sync 0.5.
STEP = 17.0
#: Of its rollouts and of its training.
ROLLOUT, TRAIN = 11.0, 6.0


def halved(beside: Mapping[tuple[Character, Character], float] | None = None) -> Interference:
    return Interference((0.5, 1.0), dict.fromkeys(Character, (1.5, 1.0)), beside or {}, 4, "by hand")


def turn(lengths: Sequence[int], prefill: float = 1.0, tool: float = 0.0, context: int = PROMPT) -> Turn:
    return Turn(prefill, Rollout(COST, lengths, [context] * len(lengths)), tool)


#: What the planner expects: the truth.
EXPECTED = Outlook(
    (
        Segment(Kind.PREFILL, 1.0, 1.0, 5, tokens=10),
        Segment(Kind.DECODE, 4.0, 4.0, 5, 1.0, 1.0),
        Segment(Kind.TAIL, 6.0, 6.0, 3, 1.0, 1.0),
    ),
    (
        Segment(Kind.GRADE, 0.5, 0.5),
        Segment(Kind.SYNC, 1.0, 1.0),
        Segment(Kind.UPDATE, 4.0, 4.0),
        Segment(Kind.SYNC, 0.5, 0.5),
    ),
)
TRAINED = (
    TrueSegment(Kind.GRADE, 0.5),
    TrueSegment(Kind.SYNC, 1.0),
    TrueSegment(Kind.UPDATE, 4.0),
    TrueSegment(Kind.SYNC, 0.5),
)


@dataclass
class Tiny:
    """``lengths[w]`` are tokens to sample of worker ``w`` in every step; ``true`` the true table."""

    lengths: tuple[tuple[int, ...], ...] = (LENGTHS, LENGTHS)
    expected: Outlook = EXPECTED
    trained: tuple[TrueSegment, ...] = TRAINED
    table: Interference = field(default_factory=halved)
    true: Interference = field(default_factory=halved)
    device_type: str = "tiny"
    memory_bytes: int = 100
    peak: float = 1e30

    def hidden(self, seed: int) -> Interference:
        return self.true

    def queued(self, job: SimJob) -> QueuedJob:
        return QueuedJob(
            id=job.id,
            tenant=job.tenant,
            submitted=job.arrival,
            devices=job.devices,
            weights_key=job.id,
            weights_bytes=1,
            run_bytes=1,
            priority=job.priority,
            latency_cap=job.latency_cap,
            shape=job.shape,
            outlook=self.expected,
        )

    def draw(self, job: SimJob, step: int, seed: int) -> StepTruth:
        rollout = tuple((turn(self.lengths[worker]),) for worker in range(job.workers))
        tokens = sum(sum(self.lengths[worker]) for worker in range(job.workers))
        return StepTruth(rollout, self.trained, tokens)


class OnlyTraining(Tiny):
    """Jobs whose ids begin with "sft" roll out nothing."""

    def queued(self, job: SimJob) -> QueuedJob:
        queued = super().queued(job)
        if not job.id.startswith("sft"):
            return queued
        workers = tuple(range(job.workers))
        return replace(queued, shape=Shape((), workers), outlook=Outlook(train=self.expected.train))

    def draw(self, job: SimJob, step: int, seed: int) -> StepTruth:
        truth = super().draw(job, step, seed)
        return replace(truth, rollout=()) if job.id.startswith("sft") else truth


def job(id: str, steps: int = 1, **fields: object) -> SimJob:
    known: dict[str, object] = {"tenant": 1, "arrival": 0.0, "workload": WORKLOADS["gsm8k-qwen3-0.6b"]}
    return SimJob(id=id, steps=steps, **{**known, **fields})  # type: ignore[arg-type]


def scenario(*jobs: SimJob, devices: int = 1, **fields: object) -> Scenario:
    return Scenario("tiny", H100, devices, jobs, **fields)  # type: ignore[arg-type]


#: Two jobs may compute on a device; ``Fixed`` decides, so that nothing else of the policy matters.
PAIRED = Policy("greedy", max_computing=2, shares=True, corun=frozenset(Kind))


@dataclass
class Fixed:
    """Decides nothing: everybody is at home on the first devices and starts at once, with ``share`` of them.

    ``merge``: as soon as all of a pipeline's rollouts are tails that run, the first takes them all.
    ``times`` are those at which it was asked, ``offered`` the sub-stages that it saw ready.
    """

    share: float = 0.5
    shares: Mapping[str, float] = field(default_factory=dict)
    merge: bool = False
    times: list[float] = field(default_factory=list)
    offered: dict[str, Segment | None] = field(default_factory=dict)

    def __call__(self, board: Board, policy: Policy) -> Plan:
        self.times.append(board.now)
        actions: list[Action] = []

        def do(action: Action) -> None:
            board.apply(action)
            actions.append(action)

        for queued in sorted(board.queue.values(), key=lambda job: job.id):
            do(Admit(queued.id, tuple(sorted(board.devices))[: queued.devices], "fixed"))
        for id, nodes in board.nodes.items():
            for node in list(nodes.values()):
                if node.state is NodeState.READY:
                    self.offered[node.id] = node.segment
                    device = None if node.kind in OFF_DEVICE else board.pipelines[id].home[node.worker]
                    do(Start(node.id, id, device, self.shares.get(device or "", self.share), "fixed"))
            tails = [node for node in nodes.values() if node.kind is Kind.TAIL]
            tails.sort(key=lambda node: node.worker)
            if self.merge and len(tails) == board.pipelines[id].devices > 1:
                do(Merge(id, tuple(node.id for node in tails[1:]), tails[0].id, "fixed"))
        board.untouch()
        return Plan(tuple(actions))
