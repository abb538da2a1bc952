"""``reasoning-gym/<task>``: the puzzles of any task of the library, at its own settings.

They are made in the sandbox, where they are scored too: see ``workers.envs.reasoning_gym``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from workers.data.builtin.dataset import BuiltinDataset, Row, prompt, recommended, write_rows
from workers.envs.reasoning_gym import LOAD_TIMEOUT_S, SOURCE, TIMEOUT_S
from workers.sandbox.pool import SandboxPool
from workers.sandbox.view import packages

PREFIX = "reasoning-gym/"
TASK = re.compile(r"[a-z0-9_]{1,64}")
#: Some tasks take half a second a puzzle.
ROWS = 100
SEED = 0
#: Made of other tasks, which only its settings could name.
WITHOUT_TASKS = "composite"


class DatasetUnavailable(ValueError):
    """No such data set here; the text says why, for the customer."""


def reasoning_gym(task: str, folder: Path) -> BuiltinDataset:
    """Raises ``DatasetUnavailable``: the library is not installed, or has no such task."""
    if not TASK.fullmatch(task) or task == WITHOUT_TASKS:
        raise unknown(task)
    try:
        installed = version("reasoning-gym")
    except PackageNotFoundError:
        raise DatasetUnavailable(
            f"{PREFIX}{task} needs the package reasoning-gym: pip install 'jigsaw-rl[environments]'"
        ) from None
    path = folder / f"reasoning-gym-{task}-{installed}.jsonl"
    if not path.exists():
        write_rows(path, lambda _: puzzles(task))
    return BuiltinDataset(
        name=f"{PREFIX}{task}",
        title=f"reasoning-gym: {task.replace('_', ' ')}",
        description="Puzzles of the library reasoning-gym, scored by it.",
        path=path,
        grader=None,
        environment={"type": "reasoning_gym", "max_turns": 1, "turn_tokens": 48},
        rl=recommended(learning_rate=3e-4, warmup_steps=8, max_tokens=48),
    )


def puzzles(task: str) -> list[Row]:
    """Raises ``DatasetUnavailable``."""
    names = [(task, SEED, ROWS, index) for index in range(ROWS)]
    with SandboxPool(1) as pool:
        (known,) = made(pool, "known", [(task,)])
        if not known:
            raise unknown(task)
        found = made(pool, "question", names)
    return [
        puzzle_row(each["question"], {"task": task, "version": each["version"], "index": index})
        for index, each in enumerate(found)
    ]


def made(pool: SandboxPool, function: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
    results = pool.call(
        SOURCE, function, calls, TIMEOUT_S, owner=PREFIX, load_timeout_s=LOAD_TIMEOUT_S, paths=packages()
    )
    for result in results:
        if result.error is not None:
            raise DatasetUnavailable(f"{PREFIX} puzzles cannot be made: {result.error}")
    return [result.value for result in results]


def puzzle_row(question: str, name: dict[str, Any]) -> Row:
    return {
        "messages": prompt("Reply with the answer and nothing else.", question),
        "puzzle": {**name, "seed": SEED, "size": ROWS},
    }


def unknown(task: str) -> DatasetUnavailable:
    return DatasetUnavailable(f"reasoning-gym has no task {task[:64]!r} that can be asked for by its name")
