"""What rows can be learned from, and the exact place of what is wrong with one."""

from __future__ import annotations

from typing import Any

import pytest

from workers.data.problems import RowProblem
from workers.data.rows import check_corpus, check_jsonl
from workers.data.shapes import check_passage, check_row

USER = {"role": "user", "content": "2 + 2 = ?"}
RIGHT, WRONG = ({"role": "assistant", "content": text} for text in ("4", "5"))
OPENAI = {
    "input": {"messages": [USER], "tools": [], "parallel_tool_calls": True},
    "preferred_output": [RIGHT],
    "non_preferred_output": [WRONG],
}


@pytest.mark.parametrize(
    ("row", "kinds"),
    [
        ({"messages": [USER], "answer": 4}, {"prompt"}),
        ({"messages": [USER], "input": "what the grader reads"}, {"prompt"}),
        ({"messages": [USER, RIGHT]}, {"completion"}),
        ({"messages": [USER, RIGHT, USER, RIGHT]}, {"completion"}),
        ({"messages": [USER], "chosen": [RIGHT], "rejected": [WRONG]}, {"prompt", "preference"}),
        ({"messages": [USER], "chosen": RIGHT, "rejected": "5"}, {"prompt", "preference"}),
        ({"messages": [USER], "chosen": RIGHT}, {"prompt"}),
        (OPENAI, {"preference"}),
    ],
)
def test_what_a_row_can_be_used_as(row, kinds):
    assert check_row(row, 1) == kinds


@pytest.mark.parametrize(
    ("row", "field", "reason"),
    [
        ({}, "messages", "row 3 has no field messages"),
        (
            {"messages": [RIGHT]},
            "messages[0].role",
            "row 3: messages[0].role must not be assistant: there is nothing to answer",
        ),
        (
            {"messages": [USER, {"role": "system", "content": "x"}]},
            "messages[1].role",
            "row 3: messages[1].role must be user or assistant in the last message, not system",
        ),
        ({**OPENAI, "input": [USER]}, "input", "row 3: input must be an object, not a list"),
        ({**OPENAI, "input": {}}, "input.messages", "row 3: input.messages is missing"),
        (
            {**OPENAI, "input": {"messages": [USER, RIGHT]}},
            "input.messages[1].role",
            "row 3: input.messages[1].role must be user in the last message, not assistant",
        ),
        (
            {**OPENAI, "input": {"messages": [USER], "tools": [{"type": "function"}]}},
            "input.tools",
            "row 3: input.tools is not supported",
        ),
        (
            {**OPENAI, "preferred_output": [USER]},
            "preferred_output[0].role",
            "row 3: preferred_output[0].role must be assistant, not user",
        ),
        (
            {**OPENAI, "preferred_output": []},
            "preferred_output",
            "row 3: preferred_output must hold at least one message",
        ),
        (
            {"input": {"messages": [USER]}, "preferred_output": [RIGHT]},
            "non_preferred_output",
            "row 3 has no field non_preferred_output",
        ),
        (
            {"messages": [USER], "chosen": "4", "rejected": " "},
            "rejected",
            "row 3: rejected must not be empty",
        ),
        (
            {"messages": [USER], "chosen": "4", "rejected": 5},
            "rejected",
            "row 3: rejected must be a list, not a number",
        ),
    ],
)
def test_a_row_of_no_use_is_refused_by_its_place(row: dict[str, Any], field: str, reason: str):
    with pytest.raises(RowProblem) as caught:
        check_row(row, 3)
    assert (caught.value.error.line, caught.value.error.field) == (3, field)
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"title": "a"}, "row 1 has no field text"),
        ({"text": "a"}, "row 1 has no field title"),
        ({"title": "a", "text": ["b"]}, "row 1: text must be a string, not a list"),
        ({"title": "a", "text": " "}, "row 1: text must not be empty"),
    ],
)
def test_a_passage_has_a_title_and_a_text(row, reason):
    with pytest.raises(RowProblem, match=reason):
        check_passage(row, 1)
    assert check_passage({"title": "", "text": "b", "source": "c"}, 1) == frozenset()


def test_a_file_counts_its_kinds_and_a_corpus_is_no_training_file(tmp_path):
    path = tmp_path / "mixed.jsonl"
    lines = [
        '{"messages": [{"role": "user", "content": "a"}]}',
        '{"messages": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c"}',
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
    ]
    path.write_text("\n".join(lines))
    assert check_jsonl(path).kinds == {"prompt": 2, "preference": 1, "completion": 1}
    assert check_corpus(path).error_count == 3
    path.write_text('{"title": "a", "text": "b"}\n')
    assert check_corpus(path).ok
    assert check_jsonl(path).errors[0].message == "row 1 has no field messages"
