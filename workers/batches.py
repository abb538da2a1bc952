"""From finished sequences and grades to training batches, metrics and samples to read."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from workers.engines.sequences import Request, Rollout
from workers.graders.run import GradeInput, GradeResult
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
    """One completion of a group, graded."""

    prompt: Prompt
    rollout: Rollout
    text: str
    grade: GradeResult
    advantage: float

    @property
    def index(self) -> int:
        return self.rollout.request.key[2]


def requests(
    spec: JobSpec, run_key: str, step: int, prompts: Iterable[Prompt], eos_ids: frozenset[int]
) -> list[Request]:
    """The sequences to sample. Each draws from a random stream named by (seed, step, group, sample)."""
    sampling = spec.rl.sampling
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
        )
        for prompt in prompts
        for index in range(spec.rl.group_size)
    ]


def texts(spec: JobSpec, rollouts: Iterable[Rollout], tokenizer: ChatTokenizer) -> list[str]:
    """What the grader reads: no special tokens, and nothing from a stop text on."""
    stop = spec.rl.sampling.stop
    return [trim_stop(tokenizer.decode(rollout.tokens), stop) for rollout in rollouts]


def grade_inputs(
    prompts: Sequence[Prompt], rollouts: Iterable[Rollout], outputs: Iterable[str]
) -> list[GradeInput]:
    items = {prompt.group: prompt.item for prompt in prompts}
    return [
        GradeInput(items[rollout.request.key[1]], text)
        for rollout, text in zip(rollouts, outputs, strict=True)
    ]


def samples(
    spec: JobSpec,
    prompts: Iterable[Prompt],
    rollouts: Sequence[Rollout],
    outputs: Sequence[str],
    grades: Sequence[GradeResult],
) -> list[Sample]:
    """Rollouts with their advantages, ordered by group and index. Failed grades are left out of the group."""
    by_group: dict[int, list[tuple[Rollout, str, GradeResult]]] = {}
    for rollout, text, grade in zip(rollouts, outputs, grades, strict=True):
        by_group.setdefault(rollout.request.key[1], []).append((rollout, text, grade))
    made = []
    for prompt in sorted(prompts, key=lambda prompt: prompt.group):
        members = sorted(by_group[prompt.group], key=lambda member: member[0].request.key)
        rewards = [grade.score if grade.score is not None else 0.0 for _, _, grade in members]
        valid = [grade.score is not None for _, _, grade in members]
        advantages = group_advantages(rewards, valid, spec.rl.normalize_advantage)
        made += [
            Sample(prompt, rollout, text, grade, advantage)
            for (rollout, text, grade), advantage in zip(members, advantages, strict=True)
        ]
    return made


def batch(spec: JobSpec, graded: Sequence[Sample]) -> Batch:
    return Batch(
        groups=[sample.prompt.group for sample in graded],
        prompts=[sample.prompt.tokens for sample in graded],
        completions=[tuple(sample.rollout.tokens) for sample in graded],
        engine_logprobs=[sample.rollout.logprobs for sample in graded],
        advantages=[sample.advantage for sample in graded],
        keep=[_trained(spec, sample) for sample in graded],
    )


def _trained(spec: JobSpec, sample: Sample) -> bool:
    truncated = sample.rollout.finish == "length"
    return sample.grade.score is not None and not (truncated and spec.rl.mask_truncated)


def rollout_metrics(graded: Sequence[Sample]) -> dict[str, float]:
    """What can be said of a step before it is trained (names: ``workers.protocol.METRICS``)."""
    scores = [sample.grade.score for sample in graded if sample.grade.score is not None]
    lengths = [len(sample.rollout.tokens) for sample in graded]
    groups: dict[int, set[float]] = {}
    for sample in graded:
        groups.setdefault(sample.prompt.group, set())
        if sample.grade.score is not None:
            groups[sample.prompt.group].add(sample.grade.score)
    return {
        "reward": statistics.fmean(scores) if scores else 0.0,
        "reward_std": statistics.pstdev(scores) if scores else 0.0,
        "completion_length": statistics.fmean(lengths),
        "truncated": statistics.fmean(sample.rollout.finish == "length" for sample in graded),
        "zero_variance_groups": statistics.fmean(len(found) <= 1 for found in groups.values()),
        "grade_errors": 1 - len(scores) / len(graded),
        "tokens": float(sum(lengths)),
    }


def records(graded: Iterable[Sample], groups: int) -> tuple[SampleRecord, ...]:
    """The completions of the step's first ``groups`` groups, for people."""
    return tuple(
        SampleRecord(
            group=sample.prompt.group,
            index=sample.index,
            row=sample.prompt.row,
            prompt="\n\n".join(f"{m['role']}: {m['content']}" for m in sample.prompt.item["messages"]),
            completion=sample.text,
            tokens=len(sample.rollout.tokens),
            reward=sample.grade.score,
            error=sample.grade.error,
            advantage=sample.advantage,
            finish=sample.rollout.finish or "length",
        )
        for sample in graded
        if sample.prompt.group < groups
    )
