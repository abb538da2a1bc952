"""What is wrong with a line of a file, in words for who wrote it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn

#: Longest name of a field, also in messages.
MAX_FIELD_CHARS = 256


@dataclass(frozen=True)
class RowError:
    """What is wrong with a line. ``message`` is a whole sentence that names the place itself."""

    line: int
    column: int | None
    field: str | None
    message: str


class RowProblem(ValueError):
    """A line that is no usable row; ``error`` is the report's entry."""

    def __init__(self, error: RowError):
        super().__init__(error.message)
        self.error = error


def refuse_field(number: int, path: str, reason: str) -> NoReturn:
    refuse(number, None, path, f"row {number}: {path} {reason}")


def refuse(number: int, column: int | None, path: str | None, message: str) -> NoReturn:
    raise RowProblem(RowError(number, column, path, message))


def kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:60]
