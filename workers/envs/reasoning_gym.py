"""Puzzles of reasoning-gym, scored by the library: ``workers.spec.ReasoningGym``.

A puzzle is named, not kept: the library makes it again from task, seed, size and index, and scores the
answer. It does so in the run's sandbox, because some tasks evaluate the answer as Python, and some iterate
over sets, which only processes with the same hash seed do in the same order.
https://github.com/open-thought/reasoning-gym
"""

from __future__ import annotations

from typing import Any

from workers.envs.environment import Beginning, Observation
from workers.envs.helpers import failure_of
from workers.envs.problems import EnvironmentProblem, EpisodeFailed, EpisodeFailure
from workers.spec import ReasoningGym as Settings

TIMEOUT_S = 20.0
#: Importing the library takes seconds, with every library that its tasks need.
LOAD_TIMEOUT_S = 120.0
#: What names a puzzle. ``size`` is of the data set that it is taken from: some tasks share it out.
FIELDS = {"task": str, "version": str, "seed": int, "size": int, "index": int}
SOURCE = """
import os

os.environ |= {"OPENBLAS_NUM_THREADS": "1", "MPLCONFIGDIR": os.getcwd()}  # no threads, no home folder

from functools import lru_cache
from importlib.metadata import version

import reasoning_gym
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

VERSION = version("reasoning-gym")


def known(task):
    return task in DATASETS


@lru_cache(maxsize=8)
def dataset(task, seed, size):
    return reasoning_gym.create_dataset(task, seed=seed, size=size)


@lru_cache(maxsize=256)
def entry(task, seed, size, index):
    return dataset(task, seed, size)[index]


def question(task, seed, size, index):
    return {"version": VERSION, "question": entry(task, seed, size, index)["question"]}


def score(puzzle, text):
    if puzzle["version"] != VERSION:
        raise ValueError(f"the puzzle is of reasoning-gym {puzzle['version']}, and here is {VERSION}")
    place = puzzle["task"], puzzle["seed"], puzzle["size"]
    asked, scorer = entry(*place, puzzle["index"]), dataset(*place)
    tagged = extract_answer(text)
    try:
        return float(scorer.score_answer(text.strip() if tagged is None else tagged, asked))
    except Exception:
        return 0.0  # some tasks raise at an answer that they cannot read
"""


class ReasoningGym:
    def __init__(self, settings: Settings, beginning: Beginning) -> None:
        self._puzzle = _puzzle(beginning.item.get(settings.puzzle_field), settings.puzzle_field)
        self._helpers = beginning.helpers
        self._given = 0.0

    async def step(self, turn: str) -> Observation:
        """Over when the answer is right; the rewards of the turns sum to the score of the last."""
        result = await self._helpers.score_puzzle(self._puzzle, turn)
        if result.error is not None:
            raise failure_of(result)
        if isinstance(result.value, bool) or not isinstance(result.value, int | float):
            raise EpisodeFailed(EpisodeFailure.BAD_ANSWER, "the answer has upset the library that scores it")
        score = min(1.0, max(0.0, float(result.value)))
        reward, self._given = score - self._given, score
        return Observation(None if score >= 1 else "That is not right. Try again.", reward)


def _puzzle(puzzle: Any, name: str) -> dict[str, Any]:
    if not isinstance(puzzle, dict) or set(puzzle) != set(FIELDS):
        raise EnvironmentProblem(f"{name} must be an object of {', '.join(FIELDS)}")
    for field, kind in FIELDS.items():
        if not isinstance(puzzle[field], kind) or isinstance(puzzle[field], bool):
            raise EnvironmentProblem(
                f"{name}.{field} must be {'a text' if kind is str else 'a whole number'}"
            )
    return dict(puzzle)
