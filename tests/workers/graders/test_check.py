"""What is refused before a job starts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from workers.graders.run import check_grader, check_templates
from workers.spec import Grader

GRADER: TypeAdapter[Grader] = TypeAdapter(Grader)


def grader(type: str, **settings: Any) -> Grader:
    return GRADER.validate_python({"type": type, **settings})


def schema(**json_schema: Any) -> Grader:
    return grader("json_schema", json_schema=json_schema)


def judge(url: str = "https://api.example.com/v1", content: str = "{{sample.output_text}}") -> Grader:
    return grader("score_model", url=url, model="m", input=[{"role": "user", "content": content}])


def multi(formula: str, **graders: Any) -> Grader:
    return grader("multi", graders=graders, calculate_output=formula)


RIGHT = {"type": "string_check", "reference": "{{item.answer}}"}
PYTHON = {"type": "python", "source": "def grade(sample, item):\n    return 1\n"}


@pytest.mark.parametrize(
    "usable",
    [
        grader(**RIGHT),
        grader("math", input="{{sample.output_json.answer}}", reference="{{item.a.b[0]}}"),
        grader("text_similarity", reference="x", evaluation_metric="rouge_l"),
        grader(**PYTHON),
        judge(),
        grader("endpoint", url="https://example.com/grade", secret="signing"),
        multi("right * python - 1", right=RIGHT, python=PYTHON),
        schema(type="object", properties={"$ref": {"type": "string"}, "pattern": {"const": "("}}),
        schema(**{"$ref": "#/$defs/a", "$defs": {"a": {"$anchor": "here", "$ref": "#here"}}}),
        schema(enum=[{"$ref": "elsewhere"}], patternProperties={"^a+$": {"pattern": "b"}}),
    ],
)
def test_usable_graders_pass(usable: Grader) -> None:
    check_grader(usable)


@pytest.mark.parametrize(
    ("useless", "text"),
    [
        (grader("string_check", reference="{{answer}}"), "expected item"),
        (grader("math", reference="{{item.answer}"), "expected a path"),
        (grader("json_schema", json_schema={}, input="{{sample.text}}"), "output_text and output_json"),
        (judge(content="{{item}}"), "expected item"),
        (grader("python", source="def grade(sample, item):\n  return (\n"), "line 2: "),
        (grader("python", source="x = 1\n"), "grade"),
        (judge("http://127.0.0.1:8000/v1"), "url: 127.0.0.1 is 127.0.0.1, which is no public address"),
        (judge("https://key@example.com/v1"), "url: the URL holds a user or a password"),
        (grader("endpoint", url="http://localhost/x", secret="s"), "url: localhost is this machine"),
        (schema(type="strin"), r"json_schema\['type'\]: 'strin' is not valid"),
        (schema(properties={"a": {"minimum": "3"}}), r"json_schema\['properties'\]\['a'\]\['minimum'\]"),
        (schema(**{"$ref": "https://example.com/a.json"}), "leads out of the schema"),
        (schema(items={"$ref": "other.json#/a"}), "leads out of the schema"),
        (schema(anyOf=[{"$ref": "#/$defs/b"}]), "'#/\\$defs/b' leads nowhere"),
        (schema(properties={"a": {"pattern": "("}}), "'\\(' is not a 'regex'"),
        (schema(patternProperties={"[": {}}), "'\\[' is not a 'regex'"),
        (multi("right + wrong", right=RIGHT), "calculate_output: the formula names 'wrong'"),
        (multi("right", right=RIGHT, bad={"type": "math", "reference": "{{x}}"}), "graders.bad: {{x}}"),
    ],
)
def test_a_grader_that_could_grade_no_row_is_refused_with_the_reason(useless: Grader, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_grader(useless)


def test_private_urls_pass_where_the_operator_allows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JIGSAW_PRIVATE_URLS", "allow")
    check_grader(judge("http://127.0.0.1:8000/v1"))


def test_fields_that_no_row_has_are_named() -> None:
    reads = multi(
        "right + judged", right=RIGHT, judged=judge(content="{{item.hint.text}} {{item.b[0]}}").model_dump()
    )
    check_templates(reads, {"answer", "hint", "b", "messages"})
    with pytest.raises(ValueError, match=r"{{item.hint}}: no row of the data has the field 'hint'"):
        check_templates(reads, {"answer", "b"})
