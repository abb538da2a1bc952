"""How much better each token did than was to be expected: advantages, from the rewards of a whole step.

By the algorithm's baseline (``workers.spec.algorithms``); a group is one prompt's G samples:

    group          A_i = r_i - mean(r)                  GRPO, Dr. GRPO, DAPO, GSPO, CISPO
    leave_one_out  A_i = r_i - mean(r without r_i)      RLOO
    none           A_i,t = r_i - beta * KL_i from t on  REINFORCE++, normalized over all tokens of the step
    value          A_i,t = sum_k (gamma lambda)^k d_t+k  PPO, d_t = r_t + gamma V_t+1 - V_t

Samples without a usable reward get 0 and count in no mean and no deviation. Where rewards that are compared
are all equal the advantage is exactly 0: their mean may differ from each of them by rounding, and dividing by
a deviation of rounding errors would train on noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from workers.spec import RLConfig

Floats = NDArray[np.float64]

#: Keeps the division by a deviation stable; TRL's, so that the same rewards give the same advantages.
EPSILON = 1e-4


@dataclass(frozen=True)
class Outcome:
    """One sample of a step. ``reward`` is the whole episode's; None: there is no usable one.

    ``sampled`` marks the tokens of the completion that the model made. ``turn_rewards`` are parts of
    ``reward`` that were given for a turn, by the index of the turn's last sampled token; the rest came at the
    end. ``kl`` (per token, before its weight) is taken off the reward; ``values`` is what the value head
    expected before each token.
    """

    group: int
    reward: float | None
    sampled: Sequence[bool]
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    kl: Sequence[float] | None = None
    values: Sequence[float] | None = None

    @property
    def usable(self) -> bool:
        return self.reward is not None and bool(np.isfinite(self.reward)) and any(self.sampled)


@dataclass(frozen=True)
class Estimates:
    """Per sample and token of its completion, 0.0 where the token was not sampled; ``returns`` of PPO
    only."""

    advantages: list[list[float]]
    returns: list[list[float]] | None


def estimate(spec: RLConfig, outcomes: Sequence[Outcome]) -> Estimates:
    """The advantages of a step's samples, all groups together, in float64.

    With ``scope`` group, or without normalization, a group's do not depend on the other groups.
    """
    if spec.method.baseline == "value":
        return value_advantages(spec, outcomes)
    if spec.method.baseline == "none":
        return Estimates(_spread(outcomes, token_advantages(spec, outcomes)), None)
    return Estimates(_spread(outcomes, _of_groups(spec, outcomes)), None)


# ---------------------------------------------------------------- a sample against its group


def group_advantages(rewards_G: Sequence[float], valid_G: Sequence[bool], normalize: bool) -> list[float]:
    """Group-relative advantage (GRPO, https://arxiv.org/abs/2402.03300): r - mean, over the group's sample
    deviation if ``normalize``; without it Dr. GRPO's (https://arxiv.org/abs/2503.20783).

    Samples that are not valid, or whose reward is not finite, get 0 and count in neither mean nor deviation.
    """
    rewards, counted = _counted(rewards_G, valid_G)
    used = rewards[counted]
    if not _differ(used):
        return [0.0] * len(rewards)
    centred = np.where(counted, rewards - used.mean(), 0.0)
    return [float(value) for value in (centred / (used.std(ddof=1) + EPSILON) if normalize else centred)]


def leave_one_out_advantages(rewards_G: Sequence[float], valid_G: Sequence[bool]) -> list[float]:
    """RLOO's advantage (https://arxiv.org/abs/2402.14740): r_i - mean of the group's other rewards, which is
    G / (G - 1) times r_i - mean of all."""
    rewards, counted = _counted(rewards_G, valid_G)
    used = rewards[counted]
    if not _differ(used):
        return [0.0] * len(rewards)
    count = len(used)
    return [float(value) for value in np.where(counted, rewards - used.mean(), 0.0) * count / (count - 1)]


def _counted(rewards_G: Sequence[float], valid_G: Sequence[bool]) -> tuple[Floats, NDArray[np.bool_]]:
    if len(rewards_G) != len(valid_G):
        raise ValueError(f"{len(rewards_G)} rewards but {len(valid_G)} validity marks")
    rewards = np.asarray(rewards_G, dtype=np.float64)
    counted = np.asarray(valid_G, dtype=bool) & np.isfinite(rewards)
    return np.where(counted, rewards, 0.0), counted


def _differ(used: Floats) -> bool:
    return len(used) > 1 and not bool((used == used[0]).all())


def _of_groups(spec: RLConfig, outcomes: Sequence[Outcome]) -> list[float]:
    """One number per sample."""
    rewards, usable = _rewards(spec, outcomes), [outcome.usable for outcome in outcomes]
    found = np.zeros(len(outcomes))
    normalize = bool(spec.normalize_advantage)
    for own in _groups(outcomes):
        of_group = [rewards[index] for index in own], [usable[index] for index in own]
        found[own] = (
            leave_one_out_advantages(*of_group)
            if spec.method.baseline == "leave_one_out"
            else group_advantages(*of_group, normalize and spec.method.scope == "group")
        )
    if normalize and spec.method.scope == "batch":
        found = _whitened(found, np.asarray(usable))
    return found.tolist()


def _groups(outcomes: Sequence[Outcome]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for index, outcome in enumerate(outcomes):
        groups.setdefault(outcome.group, []).append(index)
    return list(groups.values())


def _rewards(spec: RLConfig, outcomes: Sequence[Outcome]) -> list[float]:
    """Of whole samples, what the divergence costs taken off where it is part of the reward."""
    return [
        (outcome.reward or 0.0) - spec.loss.kl_beta * sum(_kl(spec, outcome)) if outcome.usable else 0.0
        for outcome in outcomes
    ]


def _kl(spec: RLConfig, outcome: Outcome) -> list[float]:
    """Of every token, 0 where it was not sampled or the reward does not pay for it."""
    if spec.loss.kl_in != "reward":
        return [0.0] * len(outcome.sampled)
    if outcome.kl is None:
        raise ValueError("a KL penalty in the reward needs each token's divergence")
    return [kl if sampled else 0.0 for kl, sampled in zip(outcome.kl, outcome.sampled, strict=True)]


def _whitened(values: Floats, counted: NDArray[np.bool_]) -> Floats:
    """(x - mean) / deviation over what counts, 0 elsewhere; all 0 where all are equal."""
    used = values[counted]
    if not _differ(used):
        return np.zeros_like(values)
    return np.where(counted, (values - used.mean()) / (used.std(ddof=1) + EPSILON), 0.0)


# ---------------------------------------------------------------- tokens against the batch


def token_advantages(spec: RLConfig, outcomes: Sequence[Outcome]) -> list[list[float]]:
    """REINFORCE++ (https://arxiv.org/abs/2501.03262): what a token is followed by, undiscounted, normalized
    over all tokens of the step.

    With ``group_baseline`` the group's mean reward is subtracted first.
    """
    usable = [outcome.usable for outcome in outcomes]
    means = np.zeros(len(outcomes))
    if spec.group_baseline:
        for own in _groups(outcomes):
            used = [outcomes[index].reward or 0.0 for index in own if usable[index]]
            means[own] = np.mean(used) if _differ(np.asarray(used)) else (used[0] if used else 0.0)
    rows = [
        _to_go(spec, outcome, mean) if outcome.usable else [0.0] * len(outcome.sampled)
        for outcome, mean in zip(outcomes, means, strict=True)
    ]
    if not spec.normalize_advantage:
        return rows
    counted = np.asarray(
        [outcome.usable and mark for outcome in outcomes for mark in outcome.sampled], dtype=bool
    )
    flat = iter(_whitened(np.asarray([value for row in rows for value in row]), counted).tolist())
    return [[next(flat) for _ in row] for row in rows]


def _to_go(spec: RLConfig, outcome: Outcome, mean: float) -> list[float]:
    """Each token's own and later rewards, less ``mean``."""
    rewards = token_rewards(spec, outcome)
    return [float(value) - mean for value in np.cumsum(rewards[::-1])[::-1]]


def token_rewards(spec: RLConfig, outcome: Outcome) -> Floats:
    """Where a sample's reward is paid: turns' on their last sampled token, the rest on the last of all; the
    divergence's cost on every token.
    """
    rewards = -spec.loss.kl_beta * np.asarray(_kl(spec, outcome), dtype=np.float64)
    for index, reward in outcome.turn_rewards.items():
        rewards[index] += reward
    last = max(index for index, sampled in enumerate(outcome.sampled) if sampled)
    rewards[last] += (outcome.reward or 0.0) - sum(outcome.turn_rewards.values())
    return rewards


# ---------------------------------------------------------------- tokens against a value


def gae(rewards_T: Floats, values_T: Floats, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """Generalized advantage estimation (https://arxiv.org/abs/1506.02438) over an episode's sampled tokens:
    advantages, and the returns that values are trained on, A + V. The episode ends with its last token.
    """
    advantages = np.zeros_like(rewards_T)
    following = 0.0
    for index in range(len(rewards_T) - 1, -1, -1):
        ahead = values_T[index + 1] if index + 1 < len(values_T) else 0.0
        following = rewards_T[index] + gamma * ahead - values_T[index] + gamma * lam * following
        advantages[index] = following
    return advantages, advantages + values_T


def value_advantages(spec: RLConfig, outcomes: Sequence[Outcome]) -> Estimates:
    """PPO (https://arxiv.org/abs/1707.06347): GAE over sampled tokens, what environments wrote left out; the
    advantages normalized over all tokens of the step.
    """
    settings = spec.value
    assert settings is not None
    advantages, returns = [], []
    for outcome in outcomes:
        row, expected = np.zeros(len(outcome.sampled)), np.zeros(len(outcome.sampled))
        if outcome.usable:
            if outcome.values is None:
                raise ValueError("PPO needs what its value head expected of each token")
            places = [index for index, sampled in enumerate(outcome.sampled) if sampled]
            values = np.asarray(outcome.values, dtype=np.float64)[places]
            row[places], expected[places] = gae(
                token_rewards(spec, outcome)[places], values, settings.gamma, settings.lam
            )
        advantages.append(row.tolist())
        returns.append(expected.tolist())
    if spec.normalize_advantage:
        counted = [outcome.usable and mark for outcome in outcomes for mark in outcome.sampled]
        flat = np.asarray([value for row in advantages for value in row])
        white = iter(_whitened(flat, np.asarray(counted, dtype=bool)).tolist())
        advantages = [[next(white) for _ in row] for row in advantages]
    return Estimates(advantages, returns)


# ---------------------------------------------------------------- shapes and rewards


def _spread(outcomes: Sequence[Outcome], found: Sequence[float] | Sequence[list[float]]) -> list[list[float]]:
    """Per token of each sample, 0 where it was not sampled."""
    rows = []
    for outcome, value in zip(outcomes, found, strict=True):
        row = value if isinstance(value, list) else [value] * len(outcome.sampled)
        rows.append([number if mark else 0.0 for number, mark in zip(row, outcome.sampled, strict=True)])
    return rows


def shaped(spec: RLConfig, reward: float, length: int) -> float:
    """The reward with DAPO's soft overlong punishment (https://arxiv.org/abs/2503.14476, equation 13): over
    the last ``overlong_buffer`` tokens before ``max_tokens`` it falls by up to ``overlong_penalty``.
    """
    buffer = spec.overlong_buffer or 0
    over = length - (spec.sampling.max_tokens - buffer)
    if not buffer or over <= 0:
        return reward
    return reward - (spec.overlong_penalty or 0.0) * min(1.0, over / buffer)


def teaches(spec: RLConfig, rewards: Sequence[float | None]) -> bool:
    """Whether a group's rewards can change the weights: at least two usable ones that differ.

    What compares with no group learns from any usable reward.
    """
    used = np.asarray([reward for reward in rewards if reward is not None and np.isfinite(reward)])
    return _differ(used) if spec.method.compares_in_group else len(used) > 0
