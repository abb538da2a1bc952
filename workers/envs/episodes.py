"""Beginning an episode of any environment, and the limits that all of them have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, assert_never

from workers.envs.chat import Chat
from workers.envs.environment import Beginning, Environment, Observation, bounded
from workers.envs.grid_world import GridWorld
from workers.envs.guessing_game import GuessingGame
from workers.envs.own import OwnEnvironment
from workers.envs.problems import EpisodeFailed, EpisodeFailure
from workers.envs.reasoning_gym import ReasoningGym
from workers.envs.remote import RemoteEnvironment
from workers.envs.tools import ToolUse, instructions
from workers.spec import environments as spec

Messages = Sequence[Mapping[str, Any]]


def opening(settings: spec.Environment | None, messages: Messages) -> list[Mapping[str, Any]]:
    """The prompt's messages: with tools, the first says which there are and how they are called."""
    if not isinstance(settings, spec.Tools):
        return list(messages)
    said = instructions(settings)
    first, *others = messages
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{first['content']}\n\n{said}"}, *others]
    return [{"role": "system", "content": said}, *messages]


def begin(settings: spec.Environment, beginning: Beginning) -> Environment:
    """The environment of a new episode; raises ``EnvironmentProblem`` for a row that does not fit."""
    return Limited(settings, _begin(settings, beginning))


def _begin(settings: spec.Environment, beginning: Beginning) -> Environment:
    match settings:
        case spec.GuessingGame():
            return GuessingGame(settings, beginning)
        case spec.GridWorld():
            return GridWorld(settings, beginning)
        case spec.Chat():
            return Chat(settings, beginning)
        case spec.Tools():
            return ToolUse(settings, beginning)
        case spec.ReasoningGym():
            return ReasoningGym(settings, beginning)
        case spec.OwnEnvironment():
            return OwnEnvironment(settings, beginning)
        case spec.RemoteEnvironment():
            return RemoteEnvironment(settings, beginning)
    assert_never(settings)


class Limited:
    """Ends an episode with its last turn, and fails it when the environment has taken too long in all."""

    def __init__(self, settings: spec.Environment, inner: Environment) -> None:
        self._inner = inner
        self._turns_left = settings.max_turns
        self._limit_s = settings.episode_s
        self._seconds_left = settings.episode_s

    async def step(self, turn: str) -> Observation:
        """The last turn is heard, for its reward, and not answered."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._seconds_left):
                found = await self._inner.step(turn)
        except TimeoutError:
            raise EpisodeFailed(
                EpisodeFailure.TIMEOUT, f"the environment took more than {self._limit_s:g} s over the episode"
            ) from None
        self._seconds_left = max(0.0, self._seconds_left - (time.monotonic() - began))
        self._turns_left -= 1
        text = None if found.text is None or self._turns_left == 0 else bounded(found.text)
        return Observation(text, found.reward, found.calls, found.failed_calls)
