from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from workers.spec import Grader, first_error
from workers.spec.graders import secrets_of, template_fields

GRADER: TypeAdapter[Grader] = TypeAdapter(Grader)
JUDGE = {
    "type": "score_model",
    "url": "https://example.com/v1",
    "model": "m",
    "input": [{"role": "user", "content": "{{item.a}}"}],
}
RIGHT = {"type": "string_check", "reference": "{{item.b.c}}"}


def judge(**settings: Any) -> Any:
    return GRADER.validate_python({**JUDGE, **settings})


@pytest.mark.parametrize(
    "content",
    [
        "one\ntwo",
        {"type": "input_text", "text": "one\ntwo"},
        ["one", {"type": "input_text", "text": "two"}],
        [{"type": "input_text", "text": "one"}, {"type": "output_text", "text": "two"}],
    ],
)
def test_openais_messages_are_read(content: Any) -> None:
    message = {"type": "message", "role": "developer", "content": content}
    assert judge(input=[message]).input[0].model_dump() == {"role": "developer", "content": "one\ntwo"}


@pytest.mark.parametrize("content", ["", [], {"type": "input_image", "image_url": "x"}, [1], None])
def test_other_content_is_refused(content: Any) -> None:
    with pytest.raises(ValidationError):
        judge(input=[{"role": "user", "content": content}])


def test_openais_sampling_params_are_read() -> None:
    params = {"temperature": 1, "top_p": 0.9, "seed": 42, "max_completions_tokens": 99}
    read = judge(sampling_params=params)
    assert (read.temperature, read.top_p, read.seed, read.max_tokens) == (1.0, 0.9, 42, 99)
    assert GRADER.validate_python(read.model_dump(mode="json")) == read


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"sampling_params": {"reasoning_effort": "low"}}, "reasoning_effort: Extra inputs"),
        ({"sampling_params": {"seed": 1}, "seed": 2}, "seed is given twice"),
        ({"sampling_params": 3}, "sampling_params: Extra inputs"),
        ({"range": [1, 1]}, "range needs its lowest score first"),
        ({"url": "file:///etc/passwd"}, "url: String should match"),
        ({"secret": "sk-1 2"}, "secret: String should match"),
    ],
)
def test_what_has_no_effect_is_refused_by_name(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError) as found:
        judge(**settings)
    assert text in ": ".join(first_error(found.value))


@pytest.mark.parametrize("name", ["and", "lambda", "Upper", "a b", "1a", ""])
def test_a_name_that_no_formula_could_call_is_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        GRADER.validate_python({"type": "multi", "graders": {name: RIGHT}, "calculate_output": "1"})


def test_fields_and_secrets_of_all_graders_are_found() -> None:
    endpoint = {"type": "endpoint", "url": "https://example.com", "secret": "signing"}
    graders = {"judge": {**JUDGE, "secret": "key"}, "right": RIGHT, "endpoint": endpoint}
    grader = GRADER.validate_python({"type": "multi", "graders": graders, "calculate_output": "judge"})
    assert template_fields(grader) == {"a", "b"}
    assert secrets_of(grader) == {"key", "signing"}
    assert GRADER.validate_python(grader.model_dump(mode="json")) == grader
