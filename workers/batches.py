"""From finished sequences and grades to training batches, metrics and samples to read."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from workers.engines.sequences import Request, Rollout
from workers.graders.run import GradeResult
from workers.models.chat import ChatTokenizer, trim_stop
from workers.protocol import SampleRecord
from workers.rl.advantages import group_advantages
from workers.rl.batching import Batch
from workers.spec import JobSpec


@dataclass(frozen=True)
class Prompt:
    """One group of the step: a row of the data and its tokens."""

    group: int
    row: int
    item: dict[str, Any]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """One completion of a group, graded. ``turns`` counts the model's turns."""

    prompt: Prompt
    rollout: Rollout
    turns: int
    text: str
    grade: GradeResult
    advantage: float

    @property
    def index(self) -> int:
        return self.rollout.request.key[2]


def requests(
    spec: JobSpec, run_key: str, step: int, prompt: Prompt, eos_ids: frozenset[int]
) -> list[Request]:
    """A group's sequences. Each draws from a random stream named by (seed, step, group, sample)."""
    sampling, environment = spec.rl.sampling, spec.environment
    return [
        Request(
            run_key=run_key,
            key=(step, prompt.group, index),
            prompt=prompt.tokens,
            max_tokens=sampling.max_tokens,
            stream=(spec.seed, step, prompt.group, index),
            temperature=sampling.temperature,
            stop_ids=eos_ids,
            stop=sampling.stop,
            turn_tokens=None if environment is None else environment.turn_tokens,
            keep=environment is not None,
        )
        for index in range(spec.rl.group_size)
    ]


def last_turn(rollout: Rollout, tokenizer: ChatTokenizer) -> str:
    """What graders and environments read: no special tokens, and nothing from a stop text on."""
    return trim_stop(tokenizer.decode(rollout.tokens[rollout.turn_start :]), rollout.request.stop)


def transcript(rollout: Rollout, tokenizer: ChatTokenizer) -> str:
    """All that follows the prompt, for people."""
    before = tokenizer.decode(rollout.tokens[: rollout.turn_start])
    return before + last_turn(rollout, tokenizer)


def advantages(spec: JobSpec, grades: Sequence[GradeResult]) -> list[float]:
    """Of the samples of one group. Failed grades are left out of it."""
    rewards = [grade.score if grade.score is not None else 0.0 for grade in grades]
    valid = [grade.score is not None for grade in grades]
    return group_advantages(rewards, valid, spec.rl.normalize_advantage)


def batch(spec: JobSpec, graded: Sequence[Sample]) -> Batch:
    return Batch(
        groups=[sample.prompt.group for sample in graded],
        prompts=[sample.prompt.tokens for sample in graded],
        completions=[tuple(sample.rollout.tokens) for sample in graded],
        engine_logprobs=[sample.rollout.logprobs for sample in graded],
        advantages=[sample.advantage for sample in graded],
        keep=[_trained(spec, sample) for sample in graded],
        sampled=[sample.rollout.sampled for sample in graded],
    )


def _trained(spec: JobSpec, sample: Sample) -> bool:
    truncated = sample.rollout.finish == "length"
    return sample.grade.score is not None and not (truncated and spec.rl.mask_truncated)


def rollout_metrics(spec: JobSpec, graded: Sequence[Sample]) -> dict[str, float]:
    """What can be said of a step before it is trained (names: ``workers.protocol.METRICS``)."""
    scores = [sample.grade.score for sample in graded if sample.grade.score is not None]
    lengths = [sum(sample.rollout.sampled) for sample in graded]
    groups: dict[int, set[float]] = {}
    for sample in graded:
        groups.setdefault(sample.prompt.group, set())
        if sample.grade.score is not None:
            groups[sample.prompt.group].add(sample.grade.score)
    metrics = {
        "reward": statistics.fmean(scores) if scores else 0.0,
        "reward_std": statistics.pstdev(scores) if scores else 0.0,
        "completion_length": statistics.fmean(lengths),
        "truncated": statistics.fmean(sample.rollout.finish == "length" for sample in graded),
        "zero_variance_groups": statistics.fmean(len(found) <= 1 for found in groups.values()),
        "grade_errors": 1 - len(scores) / len(graded),
        "tokens": float(sum(lengths)),
    }
    if spec.environment is not None:
        metrics["turns"] = statistics.fmean(sample.turns for sample in graded)
    return metrics


def staleness(step: int, graded: Iterable[Sample]) -> dict[str, float]:
    """How far behind the update of ``step`` the weights were that made its tokens."""
    behind = [
        step - version
        for sample in graded
        for version, sampled in zip(sample.rollout.versions, sample.rollout.sampled, strict=True)
        if sampled
    ]
    return {"staleness": statistics.fmean(behind), "staleness_max": float(max(behind))}


def records(graded: Iterable[Sample], groups: int) -> tuple[SampleRecord, ...]:
    """The completions of the step's first ``groups`` groups, for people."""
    return tuple(
        SampleRecord(
            group=sample.prompt.group,
            index=sample.index,
            row=sample.prompt.row,
            prompt="\n\n".join(f"{m['role']}: {m['content']}" for m in sample.prompt.item["messages"]),
            completion=sample.text,
            tokens=sum(sample.rollout.sampled),
            reward=sample.grade.score,
            error=sample.grade.error,
            advantage=sample.advantage,
            finish=sample.rollout.finish or "length",
        )
        for sample in graded
        if sample.prompt.group < groups
    )
