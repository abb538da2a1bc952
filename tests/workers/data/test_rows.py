"""Each way a training file can be wrong, with its exact place."""

import io
import json
import tracemalloc

import pytest

from workers.data.fits import check_grader_fields, check_prompt_lengths
from workers.data.rows import BOM, MAX_ERRORS, RowIndex, check_jsonl, iter_rows
from workers.spec import MathGrader, PythonGrader, StringCheckGrader


def row(text="hi", **fields):
    return {"messages": [{"role": "user", "content": text}], **fields}


def jsonl(*rows):
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in rows)


def check(data, **keywords):
    return check_jsonl(io.BytesIO(data), **keywords)


def only_error(data, **keywords):
    report = check(data, **keywords)
    assert (report.error_count, len(report.errors)) == (1, 1)
    error = report.errors[0]
    return error.line, error.column, error.field, error.message


GOOD = json.dumps(row(answer=1)).encode()


@pytest.mark.parametrize(
    "data",
    [
        GOOD + b"\n" + GOOD + b"\n",
        GOOD + b"\n" + GOOD,
        BOM + GOOD + b"\r\n" + GOOD + b"\r\n",
        GOOD + b"\n" + GOOD + b"\n\n",
        GOOD + b"\r\n" + GOOD + b"\r\n\r\n \n",
    ],
)
def test_accepted_shapes(data):
    report = check(data)
    assert report.ok
    assert (report.rows, report.bytes) == (2, len(data))
    assert report.fields == {"messages": 2, "answer": 2}


@pytest.mark.parametrize("data", [b"", b"\n", BOM, b" \r\n\r\n"])
def test_an_empty_file_is_refused(data):
    assert only_error(data) == (1, None, None, "the file is empty: it must hold at least one row")


def test_not_json_at_line_143():
    data = (GOOD + b"\n") * 142 + b'{"a": }\n' + GOOD
    assert only_error(data) == (143, 7, None, "not JSON at line 143 column 7: Expecting value")


@pytest.mark.parametrize(
    ("line", "place", "message"),
    [
        (b"{", (2, None), "not JSON at line 1 column 2: Expecting property name enclosed in double quotes"),
        (GOOD + GOOD, (len(GOOD) + 1, None), f"not JSON at line 1 column {len(GOOD) + 1}: Extra data"),
        (b'{"a": NaN}', (7, None), "not JSON at line 1 column 7: NaN is not a JSON number"),
        (b'{"NaN": "a \\" NaN", "b": -Infinity}', (26, None), None),
        (b'{"a": 1e999}', (None, None), "not JSON at line 1: the number 1e999 is too large"),
        (b'{"a": ' + b"1" * 5000 + b"}", (None, None), "not JSON at line 1: a number has too many digits"),
        (b"[" * 50_000, (None, None), "not JSON at line 1: nested too deeply"),
        (
            b'{"a": {"k": 1, "k": 2}}',
            (None, "k"),
            'not JSON at line 1: the key "k" appears twice in one object',
        ),
        (b"[1]", (1, None), "line 1 is not a JSON object but a list"),
        (b'"text"', (1, None), "line 1 is not a JSON object but a string"),
        (b"null", (1, None), "line 1 is not a JSON object but null"),
        ('{"é": "'.encode() + b"\xff", (8, None), "not UTF-8 at line 1 column 8: byte 0xff"),
        (GOOD[:-1] + b', "s": "\\ud800"}', (None, None), None),
    ],
)
def test_a_line_that_is_no_json_object(line, place, message):
    number, column, field, text = only_error(line)
    assert (number, (column, field)) == (1, place)
    assert message is None or text == message


def test_a_surrogate_pair_is_a_character():
    assert check(GOOD[:-1] + b', "s": "\\ud83d\\ude00"}').ok


@pytest.mark.parametrize(
    ("entry", "field", "reason"),
    [
        ({"answer": 1}, "messages", "row 2 has no field messages"),
        ({"messages": "hi"}, "messages", "row 2: messages must be a list, not a string"),
        ({"messages": []}, "messages", "row 2: messages must hold at least one message"),
        ({"messages": ["hi"]}, "messages[0]", "row 2: messages[0] must be an object, not a string"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "row 2: messages[0].role is missing"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "row 2: messages[0].content is missing"),
        (
            {"messages": [{"role": "tool", "content": "hi"}]},
            "messages[0].role",
            'row 2: messages[0].role must be one of system, developer, user, assistant, not "tool"',
        ),
        (row(""), "messages[0].content", "row 2: messages[0].content must not be empty"),
        (row(7), "messages[0].content", "row 2: messages[0].content must be a string, not a number"),
        (row("a\0b"), "messages[0].content", "row 2: messages[0].content holds the character U+0000"),
        (
            {"messages": [{"role": "user", "content": "hi"}, {"role": "system", "content": "ho"}]},
            "messages[1].role",
            "row 2: messages[1].role must be user or assistant in the last message, not system",
        ),
        (
            {"messages": [{"role": "user", "content": "hi", "weight": 1}]},
            "messages[0].weight",
            "row 2: messages[0].weight is not supported: it would have no effect",
        ),
    ],
)
def test_a_row_without_a_usable_prompt(entry, field, reason):
    assert only_error(jsonl(row(), entry, row())) == (2, None, field, reason)


def test_roles_of_a_conversation_are_accepted():
    roles = ("system", "developer", "user", "assistant", "user")
    assert check(jsonl({"messages": [{"role": role, "content": "x"} for role in roles]})).ok


def test_an_empty_line_between_rows():
    assert only_error(GOOD + b"\n\n\n" + GOOD) == (2, None, None, "line 2 is empty")


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
@pytest.mark.parametrize("start", [b"", BOM])
def test_the_line_length_is_capped_exactly(start, end):
    assert check(start + GOOD + end, max_line_bytes=len(GOOD)).ok
    number, _, _, message = only_error(start + GOOD + end, max_line_bytes=len(GOOD) - 1)
    assert (number, message) == (1, f"line 1 is longer than {len(GOOD) - 1:,} bytes")


def test_the_line_after_a_long_one_is_read_again():
    long = json.dumps(row("x" * 5000)).encode()
    report = check(GOOD + b"\n" + long + b"\n" + GOOD + b"\n", max_line_bytes=200)
    assert [error.line for error in report.errors] == [2]
    assert (report.rows, report.fields) == (3, {"messages": 2, "answer": 2})


def test_only_the_first_errors_are_kept_and_all_are_counted():
    report = check(b"x\n" * 100)
    assert [error.line for error in report.errors] == list(range(1, MAX_ERRORS + 1))
    assert (report.error_count, report.rows) == (100, 100)


def test_a_file_may_not_have_endless_different_fields():
    report = check(jsonl(*(row(**{f"f{n}": 1}) for n in range(1005))))
    assert report.error_count == 6  # messages and 999 others fit
    assert report.errors[0].field == "f999"


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = tmp_path / "large.jsonl"
    line = jsonl(row("x" * 1000, answer=1))
    with path.open("wb") as file:
        for _ in range(8_000):
            file.write(line)
    tracemalloc.start()
    report = check_jsonl(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.ok
    assert (report.rows, report.bytes) == (8_000, path.stat().st_size)
    assert peak < 1 << 20 < report.bytes


def test_the_seventh_row_lacks_the_graders_field(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(jsonl(*[row(answer=1)] * 6, row(), *[row(answer=1)] * 3))
    grader = MathGrader(type="math", reference="{{item.answer}}")
    (error,) = check_grader_fields(path, grader)
    assert (error.line, error.field) == (7, "answer")
    assert error.message == "row 7: the grader's {{item.answer}}: the row has no item.answer"


def test_nested_grader_fields_and_the_cap():
    grader = StringCheckGrader(type="string_check", input="{{item.a.b}}", reference="{{item.list[1]}}")
    good, bad = row(a={"b": 1}, list=[1, 2]), row(a={}, list=[1])
    errors = check_grader_fields(io.BytesIO(jsonl(good, bad)), grader)
    assert [(error.line, error.field) for error in errors] == [(2, "a.b"), (2, "list[1]")]
    assert len(check_grader_fields(io.BytesIO(jsonl(*[bad] * 50)), grader)) == MAX_ERRORS


def test_a_python_grader_names_no_fields():
    grader = PythonGrader(type="python", source="def grade(sample, item): return item['x']")
    assert check_grader_fields(io.BytesIO(jsonl(row())), grader) == []


def test_prompt_lengths():
    rows = [row("x" * n) for n in (3, 1200, 5, 1001, 1000)]
    errors = check_prompt_lengths(
        io.BytesIO(jsonl(*rows)), lambda messages: len(messages[0]["content"]), 1000
    )
    assert [(error.line, error.field) for error in errors] == [(2, "messages"), (4, "messages")]
    assert errors[0].message == "row 2: the prompt has 1,200 tokens, the limit is 1,000"


def test_rows_by_iteration_and_by_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [row("é" * n, n=n) for n in range(1, 6)]
    lines = [json.dumps(entry, ensure_ascii=False).encode() for entry in rows]
    path.write_bytes(BOM + b"\r\n".join(lines) + b"\r\n\r\n")
    index = RowIndex(path)
    assert list(iter_rows(path)) == rows
    assert len(index) == 5
    assert [index[n] for n in (4, 0, 2)] == [rows[4], rows[0], rows[2]]
    for outside in (5, -1):
        with pytest.raises(IndexError):
            index[outside]


def test_iter_rows_refuses_what_is_no_row():
    rows = iter_rows(io.BytesIO(jsonl(row()) + b"{"))
    assert next(rows) == row()
    with pytest.raises(ValueError, match="not JSON at line 2 column 2"):
        next(rows)
