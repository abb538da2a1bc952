"""Scores against numbers worked out by hand."""

import threading

import pytest

from workers.graders.run import ErrorType, GradeInput, check_grader, grade_batch
from workers.outside import Trouble
from workers.sandbox.pool import SandboxPool
from workers.sandbox.replies import FailureKind
from workers.spec import MathGrader, PythonGrader, StringCheckGrader, TextSimilarityGrader


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with SandboxPool(2, scratch_root=tmp_path_factory.mktemp("scratch")) as pool:
        yield pool


def score(grader, output_text, item, pool=None):
    return grade_batch(grader, [GradeInput(item, output_text)], pool=pool)[0].score


@pytest.mark.parametrize(
    ("operation", "text", "reference", "expected"),
    [
        ("eq", "Paris", "Paris", 1.0),
        ("eq", "paris", "Paris", 0.0),
        ("eq", "Paris ", "Paris", 0.0),
        ("ne", "London", "Paris", 1.0),
        ("ne", "Paris", "Paris", 0.0),
        ("like", "It is Paris.", "Paris", 1.0),
        ("like", "It is paris.", "Paris", 0.0),
        ("like", "Paris", "It is Paris.", 0.0),
        ("ilike", "It is PARIS.", "Paris", 1.0),
        ("ilike", "It is Rome.", "Paris", 0.0),
    ],
)
def test_string_check(operation, text, reference, expected):
    grader = StringCheckGrader(type="string_check", reference="{{item.answer}}", operation=operation)
    assert score(grader, text, {"answer": reference}) == expected


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        ("abcd", "abcd", 1.0),
        ("abcd", "abce", 0.75),  # one deletion, one insertion, eight characters: 1 - 2/8
        ("abc", "", 0.0),
        ("ab", "cd", 0.0),
        ("abcdef", "abc", 2 / 3),  # three deletions, nine characters
    ],
)
def test_text_similarity(text, reference, expected):
    grader = TextSimilarityGrader(type="text_similarity", reference="{{item.answer}}")
    assert score(grader, text, {"answer": reference}) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        ("The answer is 0.5", "1/2", 1.0),
        ("Answer: 12.", 12, 1.0),
        ("Answer: 13", 12, 0.0),
        ("$1 + 3x$", "3x+1", 1.0),
        (r"\boxed{\frac{3}{4}}", r"\frac{3}{4}", 1.0),
        ("I do not know", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_math(pool, text, reference, expected):
    grader = MathGrader(type="math", reference="{{item.answer}}")
    assert score(grader, text, {"answer": reference}, pool) == expected


def test_math_has_a_time_limit_outside_the_main_thread(pool, monkeypatch):
    monkeypatch.setattr("workers.graders.sandboxed.OWN_TIMEOUT_S", 1.0)
    grader = MathGrader(type="math", reference="1")
    texts = ["$9^{9^{9^{9^9}}}$", "1"]
    results = []
    thread = threading.Thread(
        target=lambda: results.extend(
            grade_batch(grader, [GradeInput({}, text) for text in texts], pool=pool)
        )
    )
    thread.start()
    thread.join(90)
    assert [(result.score, result.error_type) for result in results] == [
        (None, ErrorType.TIMEOUT),
        (1.0, None),
    ]


def test_math_without_an_answer_in_the_reference_is_an_error(pool):
    grader = MathGrader(type="math", reference="{{item.answer}}")
    samples = [GradeInput({"answer": ""}, "1"), GradeInput({}, "1"), GradeInput({"answer": 1}, "1")]
    results = grade_batch(grader, samples, pool=pool)
    assert [result.error_type for result in results] == [ErrorType.EXCEPTION, ErrorType.TEMPLATE, None]
    assert results[0].error.endswith("the reference '' holds no mathematical answer")
    assert results[2].score == 1.0


def test_a_missing_field_fails_its_own_sample_only():
    grader = StringCheckGrader(type="string_check", reference="{{item.answer}}")
    good, bad = grade_batch(grader, [GradeInput({"answer": "a"}, "a"), GradeInput({}, "a")])
    assert good.score == 1.0
    assert (bad.score, bad.error_type) == (None, ErrorType.TEMPLATE)
    assert bad.error == "{{item.answer}}: the row has no item.answer"


def test_python_gets_sample_and_item(pool):
    source = "def grade(sample, item):\n"
    source += "    return sample['output_json']['n'] + item['n'] + len(sample['output_text'])\n"
    grader = PythonGrader(type="python", source=source)
    assert score(grader, '{"n": 2}', {"n": 0.5}, pool) == 10.5


def test_output_json_is_absent_when_the_text_is_no_json(pool):
    grader = PythonGrader(
        type="python", source="def grade(sample, item):\n    return 'output_json' in sample\n"
    )
    assert score(grader, "no", {}, pool) == 0.0
    assert score(grader, "[" * 100_000, {}, pool) == 0.0
    assert score(grader, "3", {}, pool) == 1.0


def test_python_errors_have_types_and_no_score():
    source = "def grade(sample, item):\n    while item['how'] == 'loop': pass\n    return item['how']\n"
    grader = PythonGrader(type="python", source=source, timeout_s=0.3)
    results = grade_batch(grader, [GradeInput({"how": how}, "") for how in ("loop", "word", 1)])
    assert [result.error_type for result in results] == [ErrorType.TIMEOUT, ErrorType.BAD_SCORE, None]
    assert [result.score for result in results] == [None, None, 1.0]
    assert results[0].seconds >= 0.3


def test_a_score_beyond_a_million_is_an_error_that_says_so(pool):
    grader = PythonGrader(type="python", source="def grade(sample, item):\n    return item['score']\n")
    items = [{"score": score} for score in (1e6, -1e6, 1e308, -1000001.0)]
    results = grade_batch(grader, [GradeInput(item, "") for item in items], pool=pool)
    assert [result.score for result in results] == [1e6, -1e6, None, None]
    assert [result.error_type for result in results[2:]] == [ErrorType.BAD_SCORE] * 2
    assert results[2].error == "grade returned 1e+308: a score lies between -1,000,000 and 1,000,000"


def test_an_empty_batch_has_no_results():
    assert grade_batch(PythonGrader(type="python", source="def grade(s, i): return 1"), []) == []


def test_check_grader_says_why():
    check_grader(StringCheckGrader(type="string_check", reference="{{item.answer}}"))
    with pytest.raises(ValueError, match="expected item"):
        check_grader(MathGrader(type="math", reference="{{answer}}"))
    with pytest.raises(ValueError, match="line 2: "):
        check_grader(PythonGrader(type="python", source="def grade(sample, item):\n  return (\n"))


def test_every_failure_of_the_sandbox_and_of_requests_has_a_type_here():
    for kind in (*FailureKind, *Trouble):
        assert ErrorType(kind).value == kind.value
