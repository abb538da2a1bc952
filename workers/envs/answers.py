"""What a tenant's environment answers: ``{"observation", "reward", "done"}``, a text, or null."""

from __future__ import annotations

import math
from typing import Any

from workers.envs.environment import Observation
from workers.envs.problems import EpisodeFailed, EpisodeFailure

KEYS = {"observation", "reward", "done"}


def observation_of(answer: Any) -> Observation:
    """Raises ``EpisodeFailed`` for what is none. ``done``, or no text, ends the episode."""
    if answer is None or isinstance(answer, str):
        return Observation(answer)
    if not isinstance(answer, dict) or set(answer) - KEYS:
        raise _bad(f"expected a text, null, or an object of {', '.join(sorted(KEYS))}")
    text, reward, done = answer.get("observation"), answer.get("reward"), answer.get("done", False)
    if text is not None and not isinstance(text, str):
        raise _bad("observation is not a text")
    if not isinstance(done, bool):
        raise _bad("done is not true or false")
    return Observation(None if done else text, _reward(reward))


def _reward(reward: Any) -> float | None:
    if reward is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise _bad("reward is not a finite number")
    return float(reward)


def _bad(reason: str) -> EpisodeFailed:
    return EpisodeFailed(EpisodeFailure.BAD_ANSWER, f"the environment's answer cannot be used: {reason}")
