"""Graders that run in the sandbox: a tenant's Python, and two of ours that an adversarial completion can keep
busy for ever.

math-verify calls sympy, and its own time limit is a signal that works in a main thread only. A tenant's JSON
schema may hold a regular expression that backtracks for ever. Both run where Python graders run, under the
pool's wall clock, in processes that all tenants share: they keep nothing of anyone's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from workers.graders.grades import ErrorType, GradeError, GradeInput, GradeResult, as_sample, checked_score
from workers.graders.templates import Filler
from workers.sandbox.pool import SandboxPool
from workers.sandbox.replies import CallResult
from workers.sandbox.view import packages
from workers.spec import JsonSchemaGrader, MathGrader, PythonGrader

Arguments = tuple[dict[str, Any], dict[str, Any]]  # sample, item

# A reference is an answer and nothing else: without marks of its own it is read as one piece of LaTeX.
MATH_SOURCE = r"""
import logging
from math_verify import parse, verify

logging.disable(logging.CRITICAL)  # it warns at each call that its own limit is off


def grade(sample, item):
    reference = item["reference"]
    marked = any(mark in reference for mark in ("$", "\\boxed", "\\(", "\\["))
    expected = parse(reference if marked else f"${reference}$", parsing_timeout=None)
    if not expected:
        raise ValueError(f"the reference {reference[:100]!r} holds no mathematical answer")
    answer = parse(sample["output_text"], parsing_timeout=None)
    return verify(expected, answer, timeout_seconds=None)
"""
SCHEMA_SOURCE = r"""
import json
from jsonschema import Draft202012Validator
from referencing import Registry


def refuse(constant):
    raise ValueError(f"{constant} is not JSON")


def grade(sample, item):
    validator = Draft202012Validator(item["json_schema"], registry=Registry())  # fetches nothing
    try:
        value = json.loads(sample["output_text"], parse_constant=refuse)
    except (ValueError, RecursionError):
        return 0.0
    return validator.is_valid(value)
"""
OWN_TIMEOUT_S = 5.0
OWN_LOAD_TIMEOUT_S = 60.0


def grade_python(
    grader: PythonGrader, samples: Sequence[GradeInput], pool: SandboxPool, owner: str | None
) -> list[GradeResult]:
    calls = [(as_sample(sample.output_text), sample.item) for sample in samples]
    return [as_result(result) for result in pool.grade(grader.source, calls, grader.timeout_s, owner=owner)]


def grade_math(
    grader: MathGrader, samples: Sequence[GradeInput], pool: SandboxPool, owner: str | None
) -> list[GradeResult]:
    def arguments(filler: Filler) -> Arguments:
        text, reference = filler.fill(grader.input), filler.fill(grader.reference)
        return {"output_text": text}, {"reference": reference}

    calls = [filled(sample, arguments) for sample in samples]
    return grade_ours("math", MATH_SOURCE, calls, pool, owner)


def grade_json_schema(
    grader: JsonSchemaGrader, samples: Sequence[GradeInput], pool: SandboxPool, owner: str | None
) -> list[GradeResult]:
    def arguments(filler: Filler) -> Arguments:
        return {"output_text": filler.fill(grader.input)}, {"json_schema": grader.json_schema}

    calls = [filled(sample, arguments) for sample in samples]
    return grade_ours("json_schema", SCHEMA_SOURCE, calls, pool, owner)


def filled(sample: GradeInput, arguments: Callable[[Filler], Arguments]) -> Arguments | GradeResult:
    """The arguments of a call, or the GradeResult of a sample whose templates cannot be filled in."""
    try:
        return arguments(Filler(sample))
    except GradeError as error:
        return GradeResult(None, str(error), error.type)


def grade_ours(
    name: str,
    source: str,
    calls: Sequence[Arguments | GradeResult],
    pool: SandboxPool,
    owner: str | None,
) -> list[GradeResult]:
    graded = iter(
        pool.grade(
            source,
            [call for call in calls if not isinstance(call, GradeResult)],
            OWN_TIMEOUT_S,
            owner=owner,
            shared=name,
            load_timeout_s=OWN_LOAD_TIMEOUT_S,
            paths=packages(),
        )
    )
    return [call if isinstance(call, GradeResult) else as_result(next(graded)) for call in calls]


def as_result(result: CallResult) -> GradeResult:
    if result.score is None:
        kind = None if result.kind is None else ErrorType(result.kind)
        return GradeResult(None, result.error, kind, result.seconds, result.output)
    try:
        score = checked_score(result.score, "grade returned")
    except GradeError as error:
        return GradeResult(None, str(error), error.type, result.seconds, result.output)
    return GradeResult(score, seconds=result.seconds, output=result.output)
