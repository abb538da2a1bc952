"""Grade a batch of completions by any grader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import assert_never

from workers.graders.check import check_grader, check_templates
from workers.graders.formula import FormulaError, evaluate
from workers.graders.grades import (
    ErrorType,
    GradeError,
    GradeInput,
    GradeResult,
    checked_score,
)
from workers.graders.native import grade_native
from workers.graders.remote import grade_remote
from workers.graders.sandboxed import grade_json_schema, grade_math, grade_python
from workers.sandbox.pool import SandboxPool
from workers.spec import (
    EndpointGrader,
    Grader,
    JsonSchemaGrader,
    MathGrader,
    MultiGrader,
    PythonGrader,
    ScoreModelGrader,
    StringCheckGrader,
    TextSimilarityGrader,
    plain_graders,
)

__all__ = ["ErrorType", "GradeInput", "GradeResult", "check_grader", "check_templates", "grade_batch"]

SANDBOXED = PythonGrader | MathGrader | JsonSchemaGrader


def grade_batch(
    grader: Grader,
    samples: Sequence[GradeInput],
    *,
    pool: SandboxPool | None = None,
    owner: str | None = None,
    secrets: Mapping[str, str] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[GradeResult]:
    """One result for each sample, in order. Blocks; not to be called inside an event loop.

    Graders that need the sandbox run in ``pool``; without one, in a pool of one process that ends with the
    call. ``owner`` names the run whose processes may stay warm between batches, see ``SandboxPool.grade``.
    ``secrets`` are values by the names that the grader uses. ``stopped`` ends requests to other servers.
    """
    own = pool is None and any(isinstance(plain, SANDBOXED) for plain in plain_graders(grader))
    with SandboxPool(1) if own else nullcontext(pool) as ready:
        return grade(grader, samples, ready, owner, secrets or {}, stopped)


def grade(
    grader: Grader,
    samples: Sequence[GradeInput],
    pool: SandboxPool | None,
    owner: str | None,
    secrets: Mapping[str, str],
    stopped: Callable[[], bool],
) -> list[GradeResult]:
    match grader:
        case StringCheckGrader() | TextSimilarityGrader():
            return grade_native(grader, samples)
        case MultiGrader():
            return grade_multi(grader, samples, pool, owner, secrets, stopped)
        case ScoreModelGrader() | EndpointGrader():
            return grade_remote(grader, samples, secrets, stopped)
    assert pool is not None
    match grader:
        case MathGrader():
            return grade_math(grader, samples, pool, owner)
        case JsonSchemaGrader():
            return grade_json_schema(grader, samples, pool, owner)
        case PythonGrader():
            return grade_python(grader, samples, pool, owner)
    assert_never(grader)


def grade_multi(
    grader: MultiGrader,
    samples: Sequence[GradeInput],
    pool: SandboxPool | None,
    owner: str | None,
    secrets: Mapping[str, str],
    stopped: Callable[[], bool],
) -> list[GradeResult]:
    """Its graders run side by side, each over the whole batch; then the formula, sample by sample."""

    def one(part: Grader) -> list[GradeResult]:
        return grade(part, samples, pool, owner, secrets, stopped)

    with ThreadPoolExecutor(len(grader.graders), thread_name_prefix="multi") as threads:
        columns = list(threads.map(one, grader.graders.values()))
    rows = zip(*columns, strict=True)
    return [combine(grader.calculate_output, dict(zip(grader.graders, row, strict=True))) for row in rows]


def combine(formula: str, results: Mapping[str, GradeResult]) -> GradeResult:
    """The formula's value; where a part has no score, that part's error."""
    parts = {name: result.score for name, result in results.items() if result.score is not None}
    score, error, kind = None, None, None
    for name, result in results.items():
        if result.score is None:
            error, kind = f"{name}: {result.error}", result.error_type
            break
    else:
        try:
            score = checked_score(evaluate(formula, parts), "the formula gives")
        except FormulaError as problem:
            error, kind = str(problem), ErrorType.FORMULA
        except GradeError as problem:
            error, kind = str(problem), problem.type
    tokens: dict[str, int] = {}
    for result in results.values():
        for model, used in result.tokens.items():
            tokens[model] = tokens.get(model, 0) + used
    seconds = max(result.seconds for result in results.values())
    output = "\n".join(f"{name}: {result.output}" for name, result in results.items() if result.output)
    return GradeResult(score, error, kind, seconds, output, parts, tokens)
