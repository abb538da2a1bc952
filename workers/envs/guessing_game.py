"""A secret number, guessed in several turns: ``workers.spec.GuessingGame``."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

from workers.envs.problems import EnvironmentProblem
from workers.spec import GuessingGame as Settings

#: A guess is the first whole number of the turn.
GUESS = re.compile(r"-?\d{1,18}")


class GuessingGame:
    def __init__(self, settings: Settings, item: dict[str, Any], stream: tuple[int, ...]) -> None:
        number = item.get(settings.number_field)
        if not isinstance(number, int) or isinstance(number, bool):
            raise EnvironmentProblem(f"{settings.number_field} must be a whole number")
        self._settings = settings
        self._number = number
        self._chance = random.Random(":".join(map(str, stream)))
        self._turns = 0

    async def answer(self, turn: str) -> str | None:
        """ "Higher." or "Lower."; None when the number was found or the last turn is over."""
        self._turns += 1
        guess = GUESS.search(turn)
        if self._turns == self._settings.max_turns or (guess and int(guess[0]) == self._number):
            return None
        await asyncio.sleep(self._chance.uniform(*self._settings.delay_s))
        if guess is None:
            return "Say a number."
        return "Higher." if int(guess[0]) < self._number else "Lower."
