"""What an environment is to the pipeline.

    sampled turn ──► environment.answer(text) ──► observation, or the end of the episode

There is one object per episode. It hears text and says text: how a conversation is written in tokens is the
model's affair (``workers.envs.conversation``). What it draws by chance comes from the episode's own stream.
"""

from __future__ import annotations

from typing import Any, Protocol

from workers.envs.guessing_game import GuessingGame
from workers.spec import Environment as Settings


class Environment(Protocol):
    async def answer(self, turn: str) -> str | None:
        """What it says to the model's turn; None when the episode is over.

        It may take its time. ``EnvironmentProblem`` says what is wrong with the row.
        """


def begin(settings: Settings, item: dict[str, Any], stream: tuple[int, ...]) -> Environment:
    """The environment of a new episode about a row of the data; raises ``EnvironmentProblem``."""
    return GuessingGame(settings, item, stream)
