"""What really happens in a step, which no policy sees before it happens: lengths, noise, hidden co-run costs.

A rollout worker's sequences advance in lockstep, one token for each in a forward, and end at different times.
Between two endings the batch is constant, so that seconds and steps have closed forms over the sorted
lengths.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from scheduler.core.interference import LAST_BATCH, Interference
from scheduler.core.state import Kind
from scheduler.sim.devices import DeviceProfile
from scheduler.sim.measured import ROLLOUTS, Sampled, ToolLatency, responses, step_times, tool_latency
from scheduler.sim.models import HOST, ModelCost

if TYPE_CHECKING:
    from scheduler.sim.workloads import Workload

#: Spread of training times (sigma of their logarithm).
TRAINING_SIGMA = 0.05
#: Spread of what two sub-stages really cost each other, around what the planner believes.
BESIDE_SIGMA = 0.1


class Rollout:
    """One worker's running sequences. ``sampled`` counts the tokens that it sampled so far."""

    def __init__(self, cost: ModelCost, remaining: Sequence[int], context: Sequence[int]) -> None:
        """``remaining`` are tokens still to sample (at least 1), ``context`` those in the KV cache."""
        if any(tokens < 1 for tokens in remaining):
            raise ValueError("a running sequence has at least one token to sample")
        pairs = sorted(zip(remaining, context, strict=True))
        self.cost = cost
        self.sampled = 0
        self._remaining = [tokens for tokens, _ in pairs]
        self._context = [tokens for _, tokens in pairs]

    @property
    def running(self) -> int:
        return len(self._remaining)

    @property
    def tokens(self) -> int:
        """What lies in the KV cache: what must be prefilled after a move."""
        return sum(self._context)

    @property
    def peak_tokens(self) -> int:
        """The most that will lie in the KV cache: contexts grow until one of them ends."""
        return max((context + running * steps for steps, running, context in self._spans()), default=0)

    @property
    def forward_seconds(self) -> float:
        """Wall seconds of the next forward alone on the device."""
        return self._wall(self.running, self.tokens) if self.running else 0.0

    @property
    def floor_seconds(self) -> float:
        """The part of a forward that depends neither on the batch nor on its contexts."""
        return HOST * self.cost.decode[0] / 1000

    def bandwidth(self, peak: float) -> float:
        """Part of one GPU's memory bandwidth (``peak`` bytes/s) that the next forward uses: weights and KV
        cache.
        """
        if not self.running:
            return 0.0
        own = self.cost.architecture
        read = (own.weights_bytes + self.tokens * own.kv_bytes_per_token) / self.cost.gpus
        return read / (self.forward_seconds * peak)

    def steps_until(self, below: int) -> int:
        """Forwards until fewer than ``below`` (at least 1) sequences run."""
        if below < 1:
            raise ValueError("a batch is never below 0")
        return self._remaining[self.running - below] if self.running >= below else 0

    def seconds(self, steps: int) -> float:
        """Solo wall seconds of the next forwards; none follow the last ending."""
        total, left = 0.0, steps
        for forwards, running, context in self._spans():
            taken = min(forwards, left)
            total += self._span(taken, running, context)
            left -= taken
            if not left:
                break
        return total

    def steps_in(self, seconds: float) -> int:
        """The most forwards that end within so many solo wall seconds (a nanosecond more is forgiven)."""
        steps, left = 0, seconds + 1e-9
        for forwards, running, context in self._spans():
            whole = self._span(forwards, running, context)
            if whole > left:
                return steps + self._within(left, forwards, running, context)
            steps, left = steps + forwards, left - whole
        return steps

    def advance(self, steps: int) -> int:
        """Do the next forwards; returns the tokens sampled by them."""
        ended = bisect_right(self._remaining, steps)
        tokens = sum(self._remaining[:ended]) + steps * (self.running - ended)
        self._remaining = [left - steps for left in self._remaining[ended:]]
        self._context = [context + steps for context in self._context[ended:]]
        self.sampled += tokens
        return tokens

    def join(self, other: Rollout) -> None:
        """Take over the sequences of another worker. What that one sampled stays on its own count."""
        pairs = sorted(zip(self._remaining + other._remaining, self._context + other._context, strict=True))
        self._remaining = [tokens for tokens, _ in pairs]
        self._context = [tokens for _, tokens in pairs]
        other._remaining, other._context = [], []

    def copy(self) -> Rollout:
        twin = Rollout(self.cost, self._remaining, self._context)
        twin.sampled = self.sampled
        return twin

    def _wall(self, running: int, context: float) -> float:
        a, b, c = self.cost.decode
        return HOST * (a + b * running + c * context) / 1000

    def _span(self, forwards: int, running: int, context: int) -> float:
        """Seconds of forwards with a constant batch: each adds one token to each context."""
        return forwards * self._wall(running, context + running * (forwards - 1) / 2)

    def _within(self, seconds: float, forwards: int, running: int, context: int) -> int:
        """The most of these forwards that fit: the root of a quadratic, put right where rounding moved it."""
        first = self._wall(running, context)
        half = HOST * self.cost.decode[2] * running / 2000
        slope = first - half
        root = 2 * seconds / (slope + math.sqrt(slope * slope + 4 * half * seconds)) if seconds > 0 else 0.0
        steps = min(forwards, int(root) + 1)
        while steps and self._span(steps, running, context) > seconds:
            steps -= 1
        return steps

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        """(forwards, running sequences, their context at its first forward) between successive endings."""
        context, past, running = self.tokens, 0, self.running
        ends = zip(self._remaining, self._context, strict=True)
        for end, group in groupby(ends, key=lambda pair: pair[0]):
            yield end - past, running, context
            ending = list(group)
            context += running * (end - past) - sum(own + end for _, own in ending)
            running -= len(ending)
            past = end


# ---------------------------------------------------------------- a step


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn of a worker: prefill, then decode until all its sequences end, then the tool's
    answers.
    """

    prefill_seconds: float
    rollout: Rollout
    tool_seconds: float = 0.0
    prefill_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TrueSegment:
    """A segment of the trainers' chain: solo seconds of a worker when the token work is split evenly."""

    kind: Kind
    seconds: float
    early: bool = False


@dataclass(frozen=True, slots=True)
class StepTruth:
    """``rollout[w]`` are the turns of rollout worker ``w``. ``tokens`` are the step's response tokens."""

    rollout: tuple[tuple[Turn, ...], ...]
    train: tuple[TrueSegment, ...]
    tokens: int


def draw(
    workload: Workload,
    profile: DeviceProfile,
    workers: int,
    gpus: int,
    seed: int,
    job_id: str,
    step: int,
    stream: bool = False,
) -> StepTruth:
    """The step as it will be with so many rollout workers and ``gpus`` training GPUs.

    Responses are drawn by bootstrap, whole groups at a time, because the samples of a prompt resemble each
    other. They depend on seed, job and step only, so that every policy meets the same ones.
    """
    groups = draw_groups(workload, random.Random(f"{seed}/{job_id}/{step}/lengths"))
    noise = random.Random(f"{seed}/{job_id}/{step}/noise")
    dealt = [[s for group in groups[worker::workers] for s in group] for worker in range(workers)]
    tools = [_spread(call, noise) for call in _calls(workload, groups)]
    rollout = tuple(turns(workload, profile, own, tools) for own in dealt)
    finished = finished_share(groups, workers) if stream else None
    train = training(workload, profile, gpus, step_tokens(workload, groups), finished)
    noisy = tuple(replace(s, seconds=s.seconds * noise.lognormvariate(0, TRAINING_SIGMA)) for s in train)
    return StepTruth(rollout, noisy, sum(s.tokens for group in groups for s in group))


def hidden(interference: Interference, seed: int) -> Interference:
    """What co-running really costs, which the planner does not see."""
    rng = random.Random(f"{seed}/beside")
    noisy = {
        pair: max(1.0, interference.beside[pair] * rng.lognormvariate(0, BESIDE_SIGMA))
        for pair in sorted(interference.beside)
    }
    return Interference(
        interference.shares, interference.alone, noisy, interference.saturation, interference.source
    )


Groups = list[tuple[Sampled, ...]]


def draw_groups(workload: Workload, rng: random.Random) -> Groups:
    """One group of responses for each prompt."""
    pool = grouped(workload)
    return rng.choices(pool, k=workload.prompts)


def grouped(workload: Workload) -> Groups:
    """The measured responses, those of a prompt together, cut at the workload's limit."""
    found = [replace(s, tokens=min(s.tokens, workload.max_tokens)) for s in responses(workload.lengths)]
    size = workload.samples
    return [tuple(found[at : at + size]) for at in range(0, len(found) - size + 1, size)]


def turns(
    workload: Workload, profile: DeviceProfile, own: Sequence[Sampled], tools: Sequence[float]
) -> tuple[Turn, ...]:
    """A worker's chain. ``tools[j]`` are the seconds of the step's batched tool call after turn ``j``."""
    cost = profile.cost(workload.model, workload.lora)
    chain = []
    for turn in range(max((s.turns for s in own), default=0)):
        present = [s for s in own if s.turns > turn]
        more = any(s.turns > turn + 1 for s in own)
        # What a sequence sampled or was sent before is still in its KV cache.
        fresh = workload.prompt_tokens if turn == 0 else workload.observation_tokens
        remaining = [turn_tokens(s, turn) for s in present]
        context = [
            workload.prompt_tokens
            + turn * workload.observation_tokens
            + sum(turn_tokens(s, earlier) for earlier in range(turn))
            for s in present
        ]
        chain.append(
            Turn(
                cost.prefill_seconds(fresh * len(present)),
                Rollout(cost, remaining, context),
                tools[turn] if more and workload.tools else 0.0,
                fresh * len(present),
            )
        )
    return tuple(chain)


def turn_tokens(response: Sampled, turn: int) -> int:
    """Response tokens are split evenly over the turns; the first ones take the rest."""
    even, rest = divmod(response.tokens, response.turns)
    return max(1, even + (turn < rest))


def step_tokens(workload: Workload, groups: Groups) -> int:
    """Tokens that are trained on or attended to: prompts, responses, observations."""
    return sum(
        workload.prompt_tokens + s.tokens + (s.turns - 1) * workload.observation_tokens
        for group in groups
        for s in group
    )


#: The phases of training, as ``ModelCost.phases`` has them.
TRAINING = (Kind.LOGPROB, Kind.LOGPROB, Kind.UPDATE)


def training(
    workload: Workload, profile: DeviceProfile, gpus: int, tokens: float, finished: float | None = None
) -> tuple[TrueSegment, ...]:
    """The trainers' chain: grading, then for each of old log-probs, reference and update a SYNC (loading and
    offloading over the host's link) and the work, then the weights to the engines.

    ``finished`` is the part of the work whose groups end before the last few sequences do: mode STREAM does
    it early, while they still run, and the rest after them. The chain has the same parts in every step.
    """
    cost = profile.cost(workload.model, workload.lora)
    early, begun = finished is not None, 1.0 if finished is None else finished
    rollouts = workload.prompts * workload.samples
    chain = [TrueSegment(Kind.GRADE, grading_seconds() * rollouts / ROLLOUTS, early)]
    work = []
    for kind, (line, moved) in zip(TRAINING, cost.phases, strict=True):
        link = cost.link_seconds(line, moved, gpus, profile.link)
        if link > 0:
            chain.append(TrueSegment(Kind.SYNC, link, early))
        launches = cost.launch_seconds(line, moved, rollouts, gpus)
        work.append((kind, launches + cost.token_seconds(line, tokens, gpus)))
        chain.append(TrueSegment(kind, work[-1][1] * begun, early))
    if early:
        chain += [TrueSegment(kind, seconds * (1 - begun)) for kind, seconds in work]
    return (*chain, TrueSegment(Kind.SYNC, cost.weight_sync))


def grading_seconds() -> float:
    """Of 1,024 rule-based grades: the median of what a step takes beyond its phases in the logs."""
    rows = step_times().values()
    spare = sorted(
        max(0.0, r.step - r.generation - r.old_logprob - r.reference - r.update - r.weight_sync) for r in rows
    )
    return spare[len(spare) // 2]


def finished_share(groups: Groups, workers: int) -> float:
    """Part of the tokens in groups that are whole before their worker's last ``LAST_BATCH`` sequences.

    Mode STREAM begins with them when those last sequences are all that runs.
    """
    whole = total = 0
    for worker in range(workers):
        own = groups[worker::workers]
        lengths = sorted(s.tokens for group in own for s in group)
        limit = lengths[-LAST_BATCH] if len(lengths) >= LAST_BATCH else 0
        total += sum(lengths)
        whole += sum(s.tokens for group in own if all(s.tokens <= limit for s in group) for s in group)
    return whole / total if total else 0.0


def _calls(workload: Workload, groups: Groups) -> Iterator[tuple[ToolLatency, int]]:
    """The tool calls of a step with their numbers of queries."""
    if workload.tools is None:
        return
    everyone = [s for group in groups for s in group]
    for turn in range(max(s.turns for s in everyone)):
        yield tool_latency(workload.tools), sum(s.turns > turn + 1 for s in everyone)


def _spread(call: tuple[ToolLatency, int], rng: random.Random) -> float:
    """Seconds of one call: linear in its queries, within the measured range."""
    latency, queries = call
    return rng.triangular(latency.least, latency.most, latency.mean) * queries / ROLLOUTS
