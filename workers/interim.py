from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from workers.rl.advantages import group_advantages
from workers.spec import RLConfig


@dataclass(frozen=True)
class Outcome:
    group: int
    reward: float | None
    sampled: Sequence[bool]
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    kl: Sequence[float] | None = None
    values: Sequence[float] | None = None


@dataclass(frozen=True)
class Estimates:
    advantages: list
    returns: list | None


def estimate(spec: RLConfig, outcomes: Sequence[Outcome]) -> Estimates:
    found = [0.0] * len(outcomes)
    for group in {o.group for o in outcomes}:
        own = [i for i, o in enumerate(outcomes) if o.group == group]
        rewards = [outcomes[i].reward for i in own]
        values = group_advantages(
            [r or 0.0 for r in rewards], [r is not None for r in rewards], bool(spec.normalize_advantage)
        )
        for i, v in zip(own, values):
            found[i] = v
    return Estimates(found, None)


def shaped(spec: RLConfig, reward: float, length: int) -> float:
    return reward


def teaches(spec: RLConfig, rewards) -> bool:
    used = [r for r in rewards if r is not None]
    return len(used) > 1 and len(set(used)) > 1


class EpisodeFailed(Exception):
    kind = message = ""
