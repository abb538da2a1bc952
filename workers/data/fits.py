"""Whether a file's rows fit a job: what its grader reads, what its environment needs, how long they are.

The file has passed ``workers.data.rows.check_jsonl``. Each check gives the first errors only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from workers.data.problems import RowError, RowProblem
from workers.data.rows import MAX_ERRORS, Row, Source, iter_rows
from workers.data.shapes import WANTED, check_row
from workers.envs.environment import Beginning
from workers.envs.episodes import begin
from workers.envs.helpers import Helpers
from workers.envs.problems import EnvironmentProblem
from workers.graders.templates import TemplateError, item_paths, item_value
from workers.spec import Environment, Grader, templates


def check_kind(source: Source, kind: str) -> list[RowError]:
    """Rows that are no ``kind`` of ``workers.data.shapes``."""
    return _first(
        RowError(number, None, "messages", f"row {number}: {WANTED[kind]}")
        for number, row in enumerate(iter_rows(source), start=1)
        if kind not in _kinds(row, number)
    )


def _kinds(row: Row, number: int) -> frozenset[str]:
    try:
        return check_row(row, number)
    except RowProblem:
        return frozenset()


def check_grader_fields(source: Source, grader: Grader) -> list[RowError]:
    """Rows that lack what the grader's templates read. Code reads what it likes: nothing is said of it."""
    paths = item_paths(*templates(grader))
    return _first(_missing(source, paths)) if paths else []


def _missing(source: Source, paths: Iterable[str]) -> Iterator[RowError]:
    for number, row in enumerate(iter_rows(source), start=1):
        for path in paths:
            try:
                item_value(path, row)
            except TemplateError as error:
                yield RowError(number, None, path, f"row {number}: the grader's {error}")


def check_environment_fields(source: Source, environment: Environment) -> list[RowError]:
    """Rows that no episode can begin with."""
    return _first(_unplayable(source, environment))


def _unplayable(source: Source, environment: Environment) -> Iterator[RowError]:
    nobody = Helpers(actor=None, run_key="")
    for number, row in enumerate(iter_rows(source), start=1):
        try:
            begin(environment, Beginning(row, (), nobody))
        except EnvironmentProblem as problem:
            yield RowError(number, None, None, f"row {number}: {problem}")


def check_prompt_lengths(
    source: Source, encode: Callable[[list[dict[str, Any]]], int], limit: int
) -> list[RowError]:
    """Rows whose prompt has more than ``limit`` tokens; ``encode`` counts a message list's."""
    return _first(_too_long(source, encode, limit))


def _too_long(
    source: Source, encode: Callable[[list[dict[str, Any]]], int], limit: int
) -> Iterator[RowError]:
    for number, row in enumerate(iter_rows(source), start=1):
        tokens = encode(row["messages"])
        if tokens > limit:
            message = f"row {number}: the prompt has {tokens:,} tokens, the limit is {limit:,}"
            yield RowError(number, None, "messages", message)


def _first(errors: Iterable[RowError]) -> list[RowError]:
    return list(islice(errors, MAX_ERRORS))
