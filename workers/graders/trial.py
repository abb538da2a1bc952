"""Try a grader before paying for a job: OpenAI's ``run`` and ``validate`` of graders.

Shapes as in https://platform.openai.com/docs/api-reference/graders, apart from two: ``reward`` is null where
there is none, and ``error`` says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.graders.check import check_grader
from workers.graders.grades import ErrorType, GradeInput, GradeResult
from workers.graders.run import grade_batch
from workers.sandbox.pool import SandboxPool
from workers.spec import Grader, PythonGrader, ScoreModelGrader, plain_graders

#: The flag of OpenAI's ``metadata.errors`` that each type of error raises; a grader of a kind has its own.
COMMON = {
    ErrorType.TEMPLATE: "invalid_variable_error",
    ErrorType.SAMPLE: "sample_parse_error",
    ErrorType.FORMULA: "formula_parse_error",
}
OF_MODELS = {ErrorType.REFUSAL: "model_grader_refusal_error", ErrorType.BAD_SCORE: "model_grader_parse_error"}
FLAGS = (
    "formula_parse_error",
    "sample_parse_error",
    "truncated_observation_error",
    "unresponsive_reward_error",
    "invalid_variable_error",
    "other_error",
    "python_grader_server_error",
    "python_grader_runtime_error",
    "model_grader_server_error",
    "model_grader_refusal_error",
    "model_grader_parse_error",
)


def validate_grader(grader: Grader) -> dict[str, Any]:
    """The grader as it is understood, every default filled in. Raises ValueError, see ``check_grader``."""
    check_grader(grader)
    return {"grader": grader.model_dump(mode="json")}


def run_grader(
    grader: Grader,
    item: dict[str, Any],
    output_text: str,
    *,
    pool: SandboxPool | None = None,
    owner: str | None = None,
    secrets: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Grade one completion for one row; what graders answer is in the answer, their errors too.

    Raises ValueError for a grader that could grade no row.
    """
    check_grader(grader)
    (result,) = grade_batch(grader, [GradeInput(item, output_text)], pool=pool, owner=owner, secrets=secrets)
    return response(grader, result)


def response(grader: Grader, result: GradeResult) -> dict[str, Any]:
    return {
        "reward": result.score,
        "error": None if result.error is None else {"type": result.error_type, "message": result.error},
        "metadata": {
            "name": grader.name,
            "type": grader.type,
            "errors": errors(grader, result),
            "execution_time": result.seconds,
            "scores": dict(result.parts),
            "token_usage": sum(result.tokens.values()) if result.tokens else None,
            "sampled_model_name": grader.model if isinstance(grader, ScoreModelGrader) else None,
            "output": result.output,
        },
        "sub_rewards": dict(result.parts),
        "model_grader_token_usage_per_model": dict(result.tokens),
    }


def errors(grader: Grader, result: GradeResult) -> dict[str, Any]:
    """OpenAI's flags, and their details."""
    raised = None if result.error_type is None else flag(grader, result.error_type)
    details = {
        "python_grader_server_error_type": "python_grader_server_error",
        "python_grader_runtime_error_details": "python_grader_runtime_error",
        "model_grader_server_error_details": "model_grader_server_error",
    }
    return {name: name == raised for name in FLAGS} | {
        name: result.error if about == raised else None for name, about in details.items()
    }


def flag(grader: Grader, kind: ErrorType) -> str:
    if kind in COMMON:
        return COMMON[kind]
    kinds = {type(plain) for plain in plain_graders(grader)}
    if kinds == {PythonGrader}:
        sandbox = kind is ErrorType.SANDBOX
        return "python_grader_server_error" if sandbox else "python_grader_runtime_error"
    if kinds == {ScoreModelGrader}:
        return OF_MODELS.get(kind, "model_grader_server_error")
    return "other_error"
