"""What is told of a step's completions: metrics (names: ``workers.protocol.METRICS``), and texts to read."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from workers.batches import Sample
from workers.protocol import SampleRecord
from workers.rl.batching import Batch
from workers.spec import JobSpec, Tools

#: The mean advantage of a sample's tokens, by group and index.
Advantages = Mapping[tuple[int, int], float]


def rollout_metrics(spec: JobSpec, graded: Sequence[Sample]) -> dict[str, float]:
    """Of all that a step rolled out, groups that were replaced included."""
    rewards = [sample.reward for sample in graded if sample.reward is not None]
    lengths = [sum(sample.rollout.sampled) for sample in graded]
    metrics = {
        "reward": statistics.fmean(rewards) if rewards else 0.0,
        "reward_std": statistics.pstdev(rewards) if rewards else 0.0,
        "completion_length": statistics.fmean(lengths),
        "truncated": statistics.fmean(sample.truncated for sample in graded),
        "zero_variance_groups": statistics.fmean(len(found) <= 1 for found in _rewards_by_group(graded)),
        "grade_errors": statistics.fmean(sample.reward is None for sample in graded),
        "tokens": float(sum(lengths)),
    }
    if spec.rl.mask_truncated:
        metrics["masked"] = statistics.fmean(sample.masked(spec) for sample in graded)
    if spec.rl.sampling_rounds != 1:
        metrics["sampling_rounds"] = 1.0 + max(sample.prompt.round for sample in graded)
    return metrics | _parts(graded) | _grading(graded) | _episodes(spec, graded)


def _rewards_by_group(graded: Sequence[Sample]) -> Iterable[set[float]]:
    groups: dict[tuple[int, int], set[float]] = {}
    for sample in graded:
        found = groups.setdefault((sample.prompt.round, sample.prompt.group), set())
        if sample.shaped is not None:
            found.add(sample.shaped)
    return groups.values()


def _parts(graded: Sequence[Sample]) -> dict[str, float]:
    """``reward.<part>``: the mean over the samples that have the part."""
    found: dict[str, list[float]] = {}
    for sample in graded:
        for name, value in sample.parts.items():
            found.setdefault(name, []).append(value)
    return {f"reward.{name}": statistics.fmean(values) for name, values in sorted(found.items())}


def _grading(graded: Sequence[Sample]) -> dict[str, float]:
    seconds = [sample.grade_seconds for sample in graded if sample.grade_seconds is not None]
    if not seconds:
        return {}
    return {"grade_seconds": statistics.fmean(seconds), "grade_seconds_max": max(seconds)}


def _episodes(spec: JobSpec, graded: Sequence[Sample]) -> dict[str, float]:
    if spec.environment is None:
        return {}
    failed = [sample.error is not None and sample.error.source == "environment" for sample in graded]
    metrics = {
        "turns": statistics.fmean(sample.turns for sample in graded),
        "environment_errors": statistics.fmean(failed),
    }
    if isinstance(spec.environment, Tools):
        calls = sum(sample.calls for sample in graded)
        metrics["tool_calls"] = calls / len(graded)
        metrics["tool_errors"] = sum(sample.failed_calls for sample in graded) / max(1, calls)
    return metrics


def example_metrics(batch: Batch) -> dict[str, float]:
    """Of a step of the data's own completions."""
    lengths = [sum(marks) for marks in batch.sampled]
    return {"completion_length": statistics.fmean(lengths), "tokens": float(sum(lengths))}


def staleness(step: int, graded: Iterable[Sample]) -> dict[str, float]:
    """How far behind the update of ``step`` the weights were that made its tokens."""
    behind = [
        step - version
        for sample in graded
        for version, sampled in zip(sample.rollout.versions, sample.rollout.sampled, strict=True)
        if sampled
    ]
    return {"staleness": statistics.fmean(behind), "staleness_max": float(max(behind))}


def advantages_of(samples: Sequence[Sample], batch: Batch) -> dict[tuple[int, int], float]:
    """Of the batch of these samples."""
    found = {}
    for sample, row, sampled in zip(samples, batch.advantages, batch.sampled, strict=True):
        own = [value for value, mark in zip(row, sampled, strict=True) if mark]
        found[sample.prompt.group, sample.index] = statistics.fmean(own) if own else 0.0
    return found


def records(graded: Iterable[Sample], groups: int, advantages: Advantages) -> tuple[SampleRecord, ...]:
    """The completions of the step's first ``groups`` groups, for people."""
    return tuple(
        SampleRecord(
            group=sample.prompt.group,
            index=sample.index,
            row=sample.prompt.row,
            prompt="\n\n".join(f"{m['role']}: {m['content']}" for m in sample.prompt.messages),
            completion=sample.text,
            tokens=sum(sample.rollout.sampled),
            reward=sample.reward,
            error=None if sample.error is None else str(sample.error),
            advantage=advantages.get((sample.prompt.group, sample.index), 0.0),
            parts=dict(sample.parts),
            finish=sample.rollout.finish or "length",
        )
        for sample in graded
        if sample.prompt.group < groups
    )
