"""What an environment is to the pipeline.

    sampled turn ──► environment.step(text) ──► observation: a text, or the end; perhaps a reward

There is one object per episode. It hears text and says text: how a conversation is written in tokens is
``workers.envs.conversation``'s affair. What it draws by chance comes from the episode's own stream, so that
an episode that is played again is the same.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

from workers.envs.helpers import Helpers

#: Longest observation, in characters; what is beyond is cut, and the model is told.
OBSERVATION_CHARS = 8_000


@dataclass(frozen=True)
class Observation:
    """What follows a turn of the model. ``text`` None: the episode is over.

    ``reward`` is that of the turn. ``calls`` counts what the turn asked of tools, ``failed_calls`` those of
    them that were answered with an error.
    """

    text: str | None
    reward: float | None = None
    calls: int = 0
    failed_calls: int = 0


OVER = Observation(None)


class Environment(Protocol):
    async def step(self, turn: str) -> Observation:
        """What follows the model's turn. It may take its time.

        ``EnvironmentProblem`` says what is wrong with the row, ``EpisodeFailed`` with this episode.
        """


@dataclass(frozen=True)
class Beginning:
    """What an episode is made of: a row of the data, the random stream's name, and who helps."""

    item: dict[str, Any]
    stream: tuple[int, ...]
    helpers: Helpers

    @property
    def name(self) -> str:
        """The episode's, unique within its run."""
        return "-".join(map(str, self.stream))

    @property
    def seed(self) -> int:
        """For what the world draws by chance; below 2^31."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4]) >> 1


def bounded(text: str) -> str:
    if len(text) <= OBSERVATION_CHARS:
        return text
    return f"{text[:OBSERVATION_CHARS]}\n[cut: {len(text) - OBSERVATION_CHARS:,} more characters]"
