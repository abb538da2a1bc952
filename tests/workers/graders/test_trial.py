"""OpenAI's run and validate."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.workers.graders.servers import Answer, serving
from workers.graders.grades import ErrorType, GradeResult
from workers.graders.trial import FLAGS, response, run_grader, validate_grader
from workers.spec import Grader, PythonGrader, StringCheckGrader

GRADER: TypeAdapter[Grader] = TypeAdapter(Grader)
RIGHT = {"type": "string_check", "name": "right", "reference": "{{item.answer}}"}
BROKEN = {"type": "python", "source": "def grade(sample, item):\n    print('hm')\n    return item['none']\n"}


def run(settings: dict[str, Any], text: str = "Paris", **more: Any) -> dict[str, Any]:
    return run_grader(GRADER.validate_python(settings), {"answer": "Paris"}, text, **more)


def raised(answer: dict[str, Any]) -> list[str]:
    return [name for name, value in answer["metadata"]["errors"].items() if value is True]


def test_a_reward_comes_in_openais_shape() -> None:
    answer = run(RIGHT)
    assert 0 <= answer["metadata"].pop("execution_time") < 10
    assert answer == {
        "reward": 1.0,
        "error": None,
        "metadata": {
            "name": "right",
            "type": "string_check",
            "errors": dict.fromkeys(FLAGS, False)
            | dict.fromkeys(
                (
                    "python_grader_server_error_type",
                    "python_grader_runtime_error_details",
                    "model_grader_server_error_details",
                )
            ),
            "scores": {},
            "token_usage": None,
            "sampled_model_name": None,
            "output": "",
        },
        "sub_rewards": {},
        "model_grader_token_usage_per_model": {},
    }
    assert json.loads(json.dumps(answer)) == answer


def test_parts_and_tokens_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JIGSAW_PRIVATE_URLS", "allow")
    body = {"choices": [{"message": {"content": "0.5"}}], "usage": {"total_tokens": 9}}
    with serving(lambda asked: Answer(json.dumps(body).encode())) as server:
        judge = {
            "type": "score_model",
            "url": server.url,
            "model": "judge-1",
            "input": [{"role": "user", "content": "{{sample.output_text}}"}],
        }
        alone = run(judge)
        both = run({"type": "multi", "graders": {"a": RIGHT, "b": judge}, "calculate_output": "a + b"})
    assert (alone["reward"], alone["metadata"]["sampled_model_name"]) == (0.5, "judge-1")
    assert (alone["metadata"]["token_usage"], alone["model_grader_token_usage_per_model"]) == (
        9,
        {"judge-1": 9},
    )
    assert (both["reward"], both["sub_rewards"]) == (1.5, {"a": 1.0, "b": 0.5})
    assert both["metadata"]["token_usage"] == 9


def test_a_python_grader_that_raises_is_an_answer_that_says_where() -> None:
    answer = run(BROKEN)
    assert answer["reward"] is None
    assert answer["error"]["type"] == "exception"
    assert "KeyError" in answer["error"]["message"]
    assert raised(answer) == ["python_grader_runtime_error"]
    assert answer["metadata"]["errors"]["python_grader_runtime_error_details"] == answer["error"]["message"]
    assert answer["metadata"]["output"] == "hm\n"


@pytest.mark.parametrize(
    ("settings", "kind", "flag"),
    [
        ({"type": "math", "reference": "{{item.none}}"}, "template", "invalid_variable_error"),
        ({**RIGHT, "input": "{{sample.output_json.a}}"}, "sample", "sample_parse_error"),
        (
            {"type": "multi", "graders": {"a": RIGHT}, "calculate_output": "1 / (a - 1)"},
            "formula",
            "formula_parse_error",
        ),
    ],
)
def test_errors_raise_openais_flags(settings: dict[str, Any], kind: str, flag: str) -> None:
    answer = run(settings)
    assert (answer["reward"], answer["error"]["type"], raised(answer)) == (None, kind, [flag])


@pytest.mark.parametrize("kind", ErrorType)
def test_every_error_raises_exactly_one_flag(kind: ErrorType) -> None:
    judge = {"type": "score_model", "url": "https://example.com", "model": "m"}
    for settings in (RIGHT, BROKEN, {**judge, "input": [{"role": "user", "content": "x"}]}):
        answer = response(GRADER.validate_python(settings), GradeResult(None, "why", kind))
        assert len(raised(answer)) == 1


def test_a_grader_that_could_grade_no_row_is_refused() -> None:
    with pytest.raises(ValueError, match="line 1: "):
        run({"type": "python", "source": "def grade(:"})


def test_a_valid_grader_comes_back_with_its_defaults() -> None:
    answer = validate_grader(StringCheckGrader(type="string_check", reference="x"))
    assert answer["grader"] == {
        "type": "string_check",
        "name": "string_check",
        "input": "{{sample.output_text}}",
        "reference": "x",
        "operation": "eq",
    }
    with pytest.raises(ValueError, match="grade"):
        validate_grader(PythonGrader(type="python", source="x = 1"))
