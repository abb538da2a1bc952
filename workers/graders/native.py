"""Graders that compute on two rendered texts, right here: string check and text similarity."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from workers.graders.grades import GradeError, GradeInput, GradeResult
from workers.graders.similarity import METRICS
from workers.graders.templates import Filler
from workers.spec import StringCheckGrader, TextSimilarityGrader


def string_check(text: str, reference: str, operation: Literal["eq", "ne", "like", "ilike"]) -> float:
    """OpenAI's operations: equal, not equal, contains, contains regardless of case; 1.0 or 0.0."""
    if operation == "eq":
        return float(text == reference)
    if operation == "ne":
        return float(text != reference)
    if operation == "like":
        return float(reference in text)
    return float(reference.casefold() in text.casefold())


def grade_native(
    grader: StringCheckGrader | TextSimilarityGrader, samples: Sequence[GradeInput]
) -> list[GradeResult]:
    return [grade_one(grader, sample) for sample in samples]


def grade_one(grader: StringCheckGrader | TextSimilarityGrader, sample: GradeInput) -> GradeResult:
    start = time.monotonic()
    filler = Filler(sample)
    try:
        text, reference = filler.fill(grader.input), filler.fill(grader.reference)
    except GradeError as error:
        return GradeResult(None, str(error), error.type, time.monotonic() - start)
    if isinstance(grader, StringCheckGrader):
        score = string_check(text, reference, grader.operation)
    else:
        score = METRICS[grader.evaluation_metric](text, reference)
    return GradeResult(score, seconds=time.monotonic() - start)
