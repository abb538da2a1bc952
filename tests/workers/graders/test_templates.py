import pytest

from workers.graders.grades import ErrorType, GradeError, GradeInput
from workers.graders.templates import Filler, TemplateError, check_template, item_paths

ITEM = {
    "x": "four",
    "n": 4,
    "f": 0.5,
    "yes": True,
    "none": None,
    "a": {"b": "deep"},
    "list": ["p", {"q": "r"}],
}


def fill(template: str, text: str = "it says {{item.x}}") -> str:
    return Filler(GradeInput(ITEM, text)).fill(template)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("plain { } text", "plain { } text"),
        ("{{item.x}}", "four"),
        ("{{ item.x }}!", "four!"),
        ("{{item.n}} {{item.f}} {{item.yes}} {{item.none}}", "4 0.5 true null"),
        ("{{item.a.b}}", "deep"),
        ("{{item.list[0]}}{{item.list[1].q}}", "pr"),
        ("{{item.a}}", '{"b": "deep"}'),
        ("<{{sample.output_text}}>", "<it says {{item.x}}>"),
    ],
)
def test_a_template_is_filled_in_once(template: str, text: str) -> None:
    assert fill(template) == text


@pytest.mark.parametrize(
    ("template", "text", "filled"),
    [
        ("{{sample.output_json.answer}}", '{"answer": "Paris"}', "Paris"),
        ("{{sample.output_json.list[1].n}}", '{"list": [0, {"n": 2.5}]}', "2.5"),
        ("{{sample.output_json[0]}}", "[true]", "true"),
        ("{{sample.output_json}}", ' {"a":1} ', '{"a": 1}'),
    ],
)
def test_a_completion_is_read_as_json(template: str, text: str, filled: str) -> None:
    assert fill(template, text) == filled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no", "{{sample.output_json.a}}: the completion is not JSON"),
        ("[" * 100_000, "{{sample.output_json.a}}: the completion is not JSON"),
        ("[1]", "{{sample.output_json.a}}: the completion's JSON has no sample.output_json.a"),
        ('{"b": 1}', "{{sample.output_json.a}}: the completion's JSON has no sample.output_json.a"),
    ],
)
def test_a_completion_that_is_not_the_json_asked_for_is_the_samples_error(text: str, message: str) -> None:
    with pytest.raises(GradeError) as refused:
        fill("{{sample.output_json.a}}", text)
    assert (refused.value.type, str(refused.value)) == (ErrorType.SAMPLE, message)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{item.y}}", "{{item.y}}: the row has no item.y"),
        ("{{item.a.c}}", "{{item.a.c}}: the row has no item.a.c"),
        ("{{item.list[2]}}", "{{item.list[2]}}: the row has no item.list[2]"),
        ("{{item.x[0]}}", "{{item.x[0]}}: the row has no item.x[0]"),
        ("{{item.a[0]}}", "{{item.a[0]}}: the row has no item.a[0]"),
    ],
)
def test_a_missing_field_is_named(template: str, message: str) -> None:
    with pytest.raises(GradeError) as refused:
        fill(template)
    assert (refused.value.type, str(refused.value)) == (ErrorType.TEMPLATE, message)


@pytest.mark.parametrize(
    "template",
    [
        *(
            "{{item}}",
            "{{x}}",
            "{{item.}}",
            "{{item.a-b}}",
            "{{}}",
            "{{item.x",
            "{{item..x}}",
            "{{item.list[x]}}",
            "{{item[0]}}",
        ),
        *("{{sample.output_jsonx}}", "{{sample.choices}}", "{{ sample }}", "{{other.x}}"),
        "{{sample.output_text.x}}",
    ],
)
def test_a_template_that_no_row_can_fill_is_refused(template: str) -> None:
    with pytest.raises(TemplateError):
        check_template(template)
    with pytest.raises(GradeError):
        fill(template)


def test_item_paths_are_listed_once() -> None:
    assert item_paths("{{item.a.b}} {{item.x}}", "{{item.x}} {{sample.output_text}}") == ["a.b", "x"]
