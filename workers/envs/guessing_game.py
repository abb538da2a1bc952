"""A secret number, guessed in several turns: ``workers.spec.GuessingGame``."""

from __future__ import annotations

import asyncio
import random
import re

from workers.envs.environment import Beginning, Observation
from workers.envs.problems import EnvironmentProblem
from workers.spec import GuessingGame as Settings

#: A guess is the first whole number of the turn.
GUESS = re.compile(r"-?\d{1,18}")
#: What the nearest guess is worth at most, if the number is never found.
NEAR = 0.5


class GuessingGame:
    def __init__(self, settings: Settings, beginning: Beginning) -> None:
        number = beginning.item.get(settings.number_field)
        if not isinstance(number, int) or isinstance(number, bool):
            raise EnvironmentProblem(f"{settings.number_field} must be a whole number")
        self._settings = settings
        self._number = number
        self._chance = random.Random(":".join(map(str, beginning.stream)))
        self._turns = 0
        self._nearest: int | None = None

    async def step(self, turn: str) -> Observation:
        """ "Higher." or "Lower."; over when the number was found or the last turn is over."""
        self._turns += 1
        found = GUESS.search(turn)
        guess = None if found is None else int(found[0])
        if guess == self._number:
            return Observation(None, 1.0)
        if guess is not None:
            distance = abs(guess - self._number)
            self._nearest = distance if self._nearest is None else min(self._nearest, distance)
        if self._turns == self._settings.max_turns:
            return Observation(None, self._consolation())
        await asyncio.sleep(self._chance.uniform(*self._settings.delay_s))
        if guess is None:
            return Observation("Say a number.")
        return Observation("Higher." if guess < self._number else "Lower.")

    def _consolation(self) -> float:
        """Nothing for a distance of the number itself and more."""
        if self._nearest is None:
            return 0.0
        return NEAR * max(0.0, 1 - self._nearest / (abs(self._number) + 1))
