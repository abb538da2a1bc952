"""Grade a batch of completions.

A grade that fails is an error with its own type, never a score of 0: the caller decides what a missing reward
means. Scores are floats of at most MAX_SCORE either way; a Python grader's True and False count as 1 and 0.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, assert_never

from workers.graders import native
from workers.graders.templates import TemplateError, check_template, render
from workers.sandbox.pool import SandboxPool, check_source
from workers.sandbox.process import CallResult
from workers.spec import Grader, MathGrader, PythonGrader, StringCheckGrader, TextSimilarityGrader

#: Group statistics square the scores: beyond this they lose their precision, and in the end overflow.
MAX_SCORE = 1e6


class ErrorType(StrEnum):
    """Why a grade has no score; from ``source`` on they are the sandbox's ``FailureKind``."""

    TEMPLATE = "template"
    SOURCE = "source"
    EXCEPTION = "exception"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    CRASHED = "crashed"
    BAD_SCORE = "bad_score"
    SANDBOX = "sandbox"


@dataclass(frozen=True)
class GradeInput:
    """A dataset row and one completion for it."""

    item: dict[str, Any]
    output_text: str


@dataclass(frozen=True)
class GradeResult:
    """A score, or an error; ``output`` is what a Python grader printed, up to a cap."""

    score: float | None
    error: str | None = None
    error_type: ErrorType | None = None
    seconds: float = 0.0
    output: str = ""


def check_grader(grader: Grader) -> None:
    """Refuse a grader that could grade no row. Raises ValueError that says why, naming the source's line."""
    if isinstance(grader, PythonGrader):
        check_source(grader.source)
    else:
        check_template(grader.input)
        check_template(grader.reference)


def grade_batch(
    grader: Grader,
    samples: Sequence[GradeInput],
    *,
    pool: SandboxPool | None = None,
    owner: str | None = None,
) -> list[GradeResult]:
    """One result for each sample, in order.

    ``python`` and ``math`` graders run in ``pool``; without one, in a pool of one process that ends with the
    call. ``owner`` names the run whose processes may stay warm between batches, see ``SandboxPool.grade``.
    """
    if isinstance(grader, StringCheckGrader | TextSimilarityGrader):
        return [grade_native(grader, sample) for sample in samples]
    with nullcontext(pool) if pool is not None else SandboxPool(1) as ready:
        if isinstance(grader, MathGrader):
            return grade_math(grader, samples, ready, owner)
        return grade_python(grader, samples, ready, owner)


def grade_native(grader: StringCheckGrader | TextSimilarityGrader, sample: GradeInput) -> GradeResult:
    start = time.monotonic()
    try:
        text = render(grader.input, sample.item, sample.output_text)
        reference = render(grader.reference, sample.item, sample.output_text)
    except TemplateError as error:
        return GradeResult(None, str(error), ErrorType.TEMPLATE, time.monotonic() - start)
    if isinstance(grader, StringCheckGrader):
        score = native.string_check(text, reference, grader.operation)
    elif isinstance(grader, TextSimilarityGrader):
        score = native.fuzzy_match(text, reference)
    else:
        assert_never(grader)
    return GradeResult(score, seconds=time.monotonic() - start)


def grade_python(
    grader: PythonGrader, samples: Sequence[GradeInput], pool: SandboxPool, owner: str | None
) -> list[GradeResult]:
    calls = [(as_sample(sample.output_text), sample.item) for sample in samples]
    return [as_result(result) for result in pool.grade(grader.source, calls, grader.timeout_s, owner=owner)]


def grade_math(
    grader: MathGrader, samples: Sequence[GradeInput], pool: SandboxPool, owner: str | None
) -> list[GradeResult]:
    results: list[GradeResult | None] = []
    calls = []
    for sample in samples:
        try:
            text = render(grader.input, sample.item, sample.output_text)
            reference = render(grader.reference, sample.item, sample.output_text)
        except TemplateError as error:
            results.append(GradeResult(None, str(error), ErrorType.TEMPLATE))
        else:
            results.append(None)
            calls.append(({"output_text": text}, {"reference": reference}))
    graded = iter(
        pool.grade(
            native.MATH_SOURCE,
            calls,
            native.MATH_TIMEOUT_S,
            owner=owner,
            shared="math",
            load_timeout_s=native.MATH_LOAD_TIMEOUT_S,
            paths=tuple(path for path in sys.path if path),
        )
    )
    return [result or as_result(next(graded)) for result in results]


def as_sample(output_text: str) -> dict[str, Any]:
    """What a Python grader gets as ``sample``; ``output_json`` is there when the text is JSON."""
    try:
        return {"output_text": output_text, "output_json": json.loads(output_text)}
    except (ValueError, RecursionError):
        return {"output_text": output_text}


def as_result(result: CallResult) -> GradeResult:
    if result.score is not None and abs(result.score) > MAX_SCORE:
        error = (
            f"grade returned {result.score:g}: a score lies between {-MAX_SCORE:,.0f} and {MAX_SCORE:,.0f}"
        )
        return GradeResult(None, error, ErrorType.BAD_SCORE, result.seconds, result.output)
    kind = ErrorType(result.kind) if result.kind is not None else None
    return GradeResult(result.score, result.error, kind, result.seconds, result.output)
