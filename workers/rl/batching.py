"""The samples of an RL step, and how they are split: by groups into updates, by size into micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

from workers.rl.averages import Denominator

T = TypeVar("T")

#: A micro-batch's memory grows with its padded tokens times the longest sequence.
MICRO_BATCH_TOKENS = 8192


#: The batch's columns with a number per token; the last ones may be missing.
PER_TOKEN = (
    *("sampled", "engine_logprobs", "advantages"),
    *("old_logprobs", "reference_logprobs", "values", "returns"),
)


@dataclass(frozen=True)
class Batch:
    """Each list has one entry per sample; lists of lists have one number per token of the completion.

    ``groups`` names the prompt's group within the step. ``keep`` False: the sample is not trained and not
    counted. ``sampled`` False: the token was not sampled but written by an environment; it is read, and
    neither trained nor counted, and its log-probs mean nothing. Left out, every token was sampled.
    ``old_logprobs`` are the trainer's own before the step's first update, ``reference_logprobs`` those of the
    starting weights; ``values`` and ``returns`` are PPO's. Two samples of a group that are a pair (DPO) stand
    one behind the other, the preferred one first.
    """

    groups: list[int]
    prompts: list[tuple[int, ...]]
    completions: list[tuple[int, ...]]
    engine_logprobs: list[list[float]]
    advantages: list[list[float]]
    keep: list[bool]
    sampled: list[list[bool]] = field(default_factory=list)
    old_logprobs: list[list[float]] | None = None
    reference_logprobs: list[list[float]] | None = None
    values: list[list[float]] | None = None
    returns: list[list[float]] | None = None

    def __post_init__(self) -> None:
        if not self.sampled:
            object.__setattr__(self, "sampled", [[True] * len(tokens) for tokens in self.completions])
        counts = {name: len(column) for name, column in vars(self).items() if column is not None}
        if len(set(counts.values())) > 1:
            raise ValueError(f"a batch needs one entry per sample in every list; got {counts}")
        for index, completion in enumerate(self.completions):
            if not completion or not self.prompts[index]:
                raise ValueError(f"sample {index}: prompt and completion need at least one token each")
            for name in PER_TOKEN:
                column = getattr(self, name)
                if column is not None and len(column[index]) != len(completion):
                    raise ValueError(
                        f"sample {index}: {len(completion)} tokens but {len(column[index])} {name}"
                    )

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def trained(self) -> list[int]:
        """The samples that are trained: kept, with at least one sampled token."""
        return [index for index, kept in enumerate(self.keep) if kept and any(self.sampled[index])]

    def of_groups(self, names: Collection[int]) -> Batch:
        return self.select([index for index, group in enumerate(self.groups) if group in names])

    def select(self, indices: Sequence[int]) -> Batch:
        chosen: dict[str, Any] = {
            name: None if column is None else [column[index] for index in indices]
            for name, column in vars(self).items()
        }
        return Batch(**chosen)

    def with_logprobs(
        self, old: list[list[float]] | None = None, reference: list[list[float]] | None = None
    ) -> Batch:
        """The batch with the given log-probs filled in; what is None stays as it was."""
        return replace(
            self,
            old_logprobs=self.old_logprobs if old is None else old,
            reference_logprobs=self.reference_logprobs if reference is None else reference,
        )


def sampled(batch: Batch, rows: Sequence[Sequence[T]]) -> list[T]:
    """The entries of the sampled tokens, one sample after the other."""
    return [
        value
        for row, marks in zip(rows, batch.sampled, strict=True)
        for value, mark in zip(row, marks, strict=True)
        if mark
    ]


def denominator(batch: Batch, max_tokens: int) -> Denominator:
    trained = batch.trained
    return Denominator(sum(sum(batch.sampled[index]) for index in trained), len(trained), max_tokens)


def split_updates(batch: Batch, updates: int) -> list[Batch]:
    """``updates`` parts of whole groups, in order of group, as even as whole groups allow."""
    names = sorted(set(batch.groups))
    if updates > len(names):
        raise ValueError(f"{len(names)} groups cannot be split into {updates} updates")
    edges = [len(names) * part // updates for part in range(updates + 1)]
    return [batch.of_groups(set(names[low:high])) for low, high in pairwise(edges)]


def micro_batch_chunks(groups: Collection[int], size: int, group_size: int) -> list[list[int]]:
    """The groups of one worker's update, in order, in chunks that fill a micro-batch of ``size`` samples.

    The chunks depend on nothing else: each can be computed as soon as its own groups are ready, and
    ``micro_batches`` of it are the same whenever that is. A group larger than ``size`` is a chunk of its own.
    """
    names = sorted(set(groups))
    count = max(1, size // group_size)
    return [names[start : start + count] for start in range(0, len(names), count)]


def micro_batch_indices(
    batch: Batch, size: int, tokens: int = MICRO_BATCH_TOKENS, pairs: bool = False
) -> list[list[int]]:
    """At most ``size`` samples each, and at most ``tokens`` with their padding unless it is one sample alone.

    Neighbours of one group together (their prompt is computed once), long ones with long ones; the same batch
    always gives the same split. ``pairs``: a group's samples are never split, and keep their order.
    """
    parts: list[list[int]] = []
    for unit in _units(batch, pairs):
        joined = [*parts[-1], *unit] if parts else []
        prompts = {batch.prompts[index] for index in joined}
        if not joined or len(joined) > size or padded_tokens(batch, joined, prompts) > tokens:
            parts.append(unit)
        else:
            parts[-1] = joined
    return parts


def _units(batch: Batch, pairs: bool) -> list[list[int]]:
    """What stays together, in order."""
    if pairs:
        groups: dict[int, list[int]] = {}
        for index, group in enumerate(batch.groups):
            groups.setdefault(group, []).append(index)
        return [groups[name] for name in sorted(groups)]
    order = sorted(
        range(len(batch)), key=lambda index: (batch.groups[index], -len(batch.completions[index]), index)
    )
    return [[index] for index in order]


def padded_tokens(batch: Batch, indices: Sequence[int], prompts: Collection[tuple[int, ...]]) -> int:
    """What attention holds of these samples: each prompt once and before each completion, all padded."""
    prompt = max(map(len, prompts))
    completion = max(len(batch.completions[index]) for index in indices)
    return len(prompts) * prompt + len(indices) * (prompt + completion)


def micro_batches(batch: Batch, size: int, pairs: bool = False) -> list[Batch]:
    return [batch.select(indices) for indices in micro_batch_indices(batch, size, pairs=pairs)]
