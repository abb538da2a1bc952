"""Environments outside of a pipeline: the real sandbox and search, without an actor around them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from workers.envs.environment import Beginning, Environment, Observation
from workers.envs.episodes import begin
from workers.envs.helpers import Helpers
from workers.spec import Environment as Settings

SETTINGS: TypeAdapter[Settings] = TypeAdapter(Settings)


class Method:
    """An actor's method, called in a thread."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *arguments: Any) -> Any:
        return asyncio.to_thread(self._method, *arguments)


class Local:
    """An actor that lives in this process."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Method:
        return Method(getattr(self._actor, name))


def settings(**fields: Any) -> Settings:
    return SETTINGS.validate_python(fields)


def episode(
    asked: Settings,
    item: dict[str, Any],
    *,
    pool: Any = None,
    stream: tuple[int, ...] = (0, 0, 0, 0),
    corpora: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
) -> Environment:
    helpers = Helpers(Local(pool), "run", corpora or {}, secrets or {})
    return begin(asked, Beginning(item, stream, helpers))


def play(environment: Environment, *turns: str) -> list[Observation]:
    async def all_turns() -> list[Observation]:
        return [await environment.step(turn) for turn in turns]

    return asyncio.run(all_turns())
