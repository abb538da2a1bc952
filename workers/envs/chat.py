"""A talk with a scripted user: ``workers.spec.Chat``."""

from __future__ import annotations

from workers.envs.environment import Beginning, Observation
from workers.envs.problems import EnvironmentProblem
from workers.spec import Chat as Settings


class Chat:
    def __init__(self, settings: Settings, beginning: Beginning) -> None:
        turns = beginning.item.get(settings.turns_field)
        if not isinstance(turns, list) or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise EnvironmentProblem(f"{settings.turns_field} must be a list of texts")
        self._turns: list[str] = list(turns)

    async def step(self, turn: str) -> Observation:
        """What the user says next, whatever the model said; over when the script is."""
        return Observation(self._turns.pop(0) if self._turns else None)
