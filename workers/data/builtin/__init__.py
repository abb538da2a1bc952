"""Datasets for a first job with a small model on a CPU.

Rows come from a seeded generator, so the bytes are the same everywhere. All graders give partial credit: a
small model with few samples a step learns nothing from a reward it almost never gets. All give 0 to an empty
completion, and to no constant completion much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from workers.data.builtin.arithmetic import arithmetic
from workers.data.builtin.constraints import constraints
from workers.data.builtin.dataset import BuiltinCorpus, BuiltinDataset, write_rows
from workers.data.builtin.exact_words import WORDS_GRADER, exact_words, word_rows
from workers.data.builtin.grid import grid
from workers.data.builtin.guessing import guessing
from workers.data.builtin.multihop import CORPUS, multihop_qa
from workers.data.builtin.passages import passages
from workers.data.builtin.puzzles import PREFIX, DatasetUnavailable, reasoning_gym
from workers.data.builtin.small_sums import small_sums

__all__ = [
    "WORDS_GRADER",
    "BuiltinCorpus",
    "BuiltinDataset",
    "DatasetUnavailable",
    "builtin_named",
    "word_rows",
    "write_builtin",
    "write_corpora",
]

DATASETS: Mapping[str, Callable[[Path], BuiltinDataset]] = {
    "exact-words": exact_words,
    "small-sums": small_sums,
    "arithmetic": arithmetic,
    "constraints": constraints,
    "multihop-qa": multihop_qa,
    "guessing": guessing,
    "grid": grid,
}


def write_builtin(folder: Path) -> list[BuiltinDataset]:
    """Write the files that are not there yet and describe all; several processes may do so at once."""
    folder.mkdir(parents=True, exist_ok=True)
    return [write(folder) for write in DATASETS.values()]


def builtin_named(name: str, folder: Path) -> BuiltinDataset:
    """The one of that name, its file in ``folder``; ``reasoning-gym/<task>`` names any of that library.

    ``DatasetUnavailable`` says for the customer why there is none. The first use of a task takes seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if name.startswith(PREFIX):
        return reasoning_gym(name.removeprefix(PREFIX), folder)
    if name not in DATASETS:
        raise DatasetUnavailable(f"there is no built-in dataset {name[:100]!r}")
    return DATASETS[name](folder)


def write_corpora(folder: Path) -> list[BuiltinCorpus]:
    """Like ``write_builtin``, of what the datasets' tools search."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        BuiltinCorpus(
            name=CORPUS,
            title="People, towns, rivers and trades of a land that is not",
            path=write_rows(folder / f"{CORPUS}.jsonl", passages),
        )
    ]
