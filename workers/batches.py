"""From a row to its sequences, and from finished sequences to a training batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from workers.engines.sequences import Request, Rollout
from workers.models.chat import ChatTokenizer, trim_stop
from workers.rl.advantages import Outcome, estimate
from workers.rl.batching import Batch
from workers.spec import JobSpec


@dataclass(frozen=True)
class Prompt:
    """One group of the step: a row of the data, what the model is told of it, and its tokens.

    ``round`` counts from 0: a group that taught nothing is replaced by one of another row in the next round
    of the step's sampling.
    """

    group: int
    row: int
    item: dict[str, Any]
    messages: Sequence[Mapping[str, Any]]
    tokens: tuple[int, ...]
    round: int = 0


@dataclass(frozen=True)
class SampleError:
    """Why a completion has no usable reward. ``kind`` is the source's own word for it."""

    source: Literal["grader", "environment"]
    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.source}: {self.kind}: {self.message}"


@dataclass(frozen=True)
class Sample:
    """One completion of a group, graded.

    ``reward`` is what was given for it, ``shaped`` what it is trained by; both are None where there is an
    ``error``. ``turn_rewards`` are the part of the reward that was given for single turns, by the place of
    the turn's last token. ``turns`` counts the model's turns, ``calls`` what it asked of tools.
    """

    prompt: Prompt
    rollout: Rollout
    text: str
    reward: float | None
    shaped: float | None
    error: SampleError | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    turns: int = 1
    calls: int = 0
    failed_calls: int = 0
    grade_seconds: float | None = None

    @property
    def index(self) -> int:
        return self.rollout.request.key[2]

    @property
    def truncated(self) -> bool:
        return self.rollout.finish == "length"

    def masked(self, spec: JobSpec) -> bool:
        return self.truncated and spec.rl.mask_truncated

    def trained(self, spec: JobSpec) -> bool:
        return self.error is None and not self.masked(spec)


def requests(
    spec: JobSpec, run_key: str, step: int, prompt: Prompt, eos_ids: frozenset[int]
) -> list[Request]:
    """A group's sequences. Each draws from a random stream named by (seed, step, group, sample), where groups
    of further rounds are counted on.
    """
    sampling, environment = spec.rl.sampling, spec.environment
    number = prompt.round * spec.rl.prompts_per_step + prompt.group
    return [
        Request(
            run_key=run_key,
            key=(step, number, index),
            prompt=prompt.tokens,
            max_tokens=sampling.max_tokens,
            stream=(spec.seed, step, number, index),
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


# ---------------------------------------------------------------- batches


def batch_of(spec: JobSpec, samples: Sequence[Sample]) -> Batch:
    """A batch of samples that have tokens; their advantages are not known yet."""
    return Batch(
        groups=[sample.prompt.group for sample in samples],
        prompts=[sample.prompt.tokens for sample in samples],
        completions=[tuple(sample.rollout.tokens) for sample in samples],
        engine_logprobs=[sample.rollout.logprobs for sample in samples],
        advantages=[[0.0] * len(sample.rollout.tokens) for sample in samples],
        keep=[sample.trained(spec) for sample in samples],
        sampled=[sample.rollout.sampled for sample in samples],
    )


def with_advantages(spec: JobSpec, samples: Sequence[Sample], batch: Batch) -> Batch:
    """The batch of these samples, its log-probs and values known, with what each token is trained by.

    Of whole groups; of the whole step where advantages are compared over it.
    """
    found = estimate(spec.rl, outcomes(spec, samples, batch))
    return replace(batch, advantages=found.advantages, returns=found.returns)


def outcomes(spec: JobSpec, samples: Sequence[Sample], batch: Batch) -> list[Outcome]:
    penalties = _penalties(spec, batch)
    return [
        Outcome(
            group=sample.prompt.group,
            reward=sample.shaped,
            sampled=sample.rollout.sampled,
            turn_rewards=sample.turn_rewards,
            kl=None if penalties is None else penalties[place],
            values=None if batch.values is None else batch.values[place],
        )
        for place, sample in enumerate(samples)
    ]


def _penalties(spec: JobSpec, batch: Batch) -> list[list[float]] | None:
    """The divergence from the starting weights per token, where it is taken off the reward."""
    old, reference = batch.old_logprobs, batch.reference_logprobs
    if spec.rl.loss.kl_in != "reward" or old is None or reference is None:
        return None
    return [
        [divergence(spec.rl.loss.kl_estimator or "k1", one, other) for one, other in zip(*rows, strict=True)]
        for rows in zip(old, reference, strict=True)
    ]


def divergence(estimator: str, logprob: float, reference: float) -> float:
    """Of one sampled token (http://joschu.net/blog/kl-approx.html)."""
    log_ratio = logprob - reference
    match estimator:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio**2 / 2
        case _:
            return math.exp(-log_ratio) - 1 + log_ratio


def idle(spec: JobSpec, samples: Sequence[Sample], batch: Batch) -> str:
    """Why the rewards of a step teach nothing; empty where they do."""
    usable = [sample for sample in samples if sample.error is None]
    if not usable:
        return "no completion has a usable reward"
    if not any(sample.trained(spec) for sample in usable):
        return "every completion with a reward hit max_tokens and is left out (rl.mask_truncated)"
    if not any(any(batch.advantages[index]) for index in batch.trained):
        return (
            "in every group all rewards are equal"
            if spec.rl.method.compares_in_group
            else "all rewards are equal"
        )
    return ""
