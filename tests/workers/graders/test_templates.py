import pytest

from workers.graders.templates import TemplateError, check_template, item_paths, render

ITEM = {
    "x": "four",
    "n": 4,
    "f": 0.5,
    "yes": True,
    "none": None,
    "a": {"b": "deep"},
    "list": ["p", {"q": "r"}],
}


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
def test_render(template, text):
    assert render(template, ITEM, "it says {{item.x}}") == text


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
def test_a_missing_field_is_named(template, message):
    with pytest.raises(TemplateError) as refused:
        render(template, ITEM, "")
    assert str(refused.value) == message


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
        ),
        *("{{sample.output_json.x}}", "{{sample.choices}}", "{{ sample }}", "{{other.x}}"),
    ],
)
def test_a_template_that_no_row_can_fill_is_refused(template):
    with pytest.raises(TemplateError):
        check_template(template)


def test_item_paths_are_listed_once():
    assert item_paths("{{item.a.b}} {{item.x}}", "{{item.x}} {{sample.output_text}}") == ["a.b", "x"]
