"""What goes into a grader and what comes out.

A grade that fails is an error with its own type, never a score of 0: the caller decides what a missing reward
means. Scores are floats of at most MAX_SCORE either way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

#: Group statistics square the scores: beyond this they lose their precision, and in the end overflow.
MAX_SCORE = 1e6


class ErrorType(StrEnum):
    """Why a grade has no score."""

    TEMPLATE = "template"  # the row lacks what a template reads
    SAMPLE = "sample"  # a template reads the sample as JSON, and it is none, or lacks the field
    FORMULA = "formula"  # the formula of a multi grader has no value for these scores
    BAD_SCORE = "bad_score"  # not a finite number, too large, or out of the grader's range
    SECRET = "secret"  # the organization has no such secret, or its value cannot be used
    # The sandbox's FailureKind, by the same names.
    SOURCE = "source"
    EXCEPTION = "exception"
    TIMEOUT = "timeout"  # also of requests
    MEMORY = "memory"
    CRASHED = "crashed"
    BAD_VALUE = "bad_value"
    SANDBOX = "sandbox"
    # Requests, see workers.outside.Trouble.
    REFUSED_URL = "refused_url"
    UNREACHABLE = "unreachable"
    STATUS = "status"
    TOO_LARGE = "too_large"
    NOT_JSON = "not_json"
    BAD_ANSWER = "bad_answer"  # JSON, but not what was asked for
    REFUSAL = "refusal"  # the model would not grade


@dataclass(frozen=True)
class GradeInput:
    """A dataset row and one completion for it."""

    item: dict[str, Any]
    output_text: str


@dataclass(frozen=True)
class GradeResult:
    """A score, or an error.

    ``output`` is what a Python grader printed or a model wrote, up to a cap; ``parts`` are the scores of a
    multi grader's graders that have one, by name; ``tokens`` are those that models used, by their names.
    """

    score: float | None
    error: str | None = None
    error_type: ErrorType | None = None
    seconds: float = 0.0
    output: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)


class GradeError(Exception):
    """Why there is no score; within this package only, outside it is a GradeResult."""

    def __init__(self, type: ErrorType, message: str):
        super().__init__(message)
        self.type = type


def checked_score(value: Any, what: str) -> float:
    """``value`` as a score. ``what`` begins the sentence of the error. Raises GradeError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        shown = json.dumps(value, ensure_ascii=False)
        raise GradeError(ErrorType.BAD_SCORE, f"{what} {shown[:100]}: a score is a number")
    score = as_float(value)
    if not math.isfinite(score):
        raise GradeError(ErrorType.BAD_SCORE, f"{what} {score}: a score is a finite number")
    if abs(score) > MAX_SCORE:
        raise GradeError(
            ErrorType.BAD_SCORE,
            f"{what} {score:g}: a score lies between {-MAX_SCORE:,.0f} and {MAX_SCORE:,.0f}",
        )
    return score


def as_float(value: float) -> float:
    """A float; a whole number that is too long for one is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def as_sample(output_text: str) -> dict[str, Any]:
    """What graders get as ``sample``; ``output_json`` is there when the text is JSON."""
    try:
        return {"output_text": output_text, "output_json": read_json(output_text)}
    except ValueError:
        return {"output_text": output_text}


def read_json(text: str) -> Any:
    """The text as JSON that can be written again as JSON. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=read_float, parse_float=read_float)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_float(text: str) -> float:
    """Python reads NaN and Infinity, and 1e999 as infinite, which no one else reads back."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number of JSON")
    return number
