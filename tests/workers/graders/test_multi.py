"""Several graders and a formula."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.workers.graders.servers import Answer, Asked, serving
from workers.graders.grades import ErrorType, GradeInput, GradeResult
from workers.graders.run import grade_batch
from workers.sandbox.pool import SandboxPool
from workers.spec import MultiGrader

RIGHT = {"type": "string_check", "reference": "{{item.answer}}", "operation": "ilike"}
CLOSE = {"type": "text_similarity", "reference": "{{item.answer}}"}
LENGTH = {"type": "python", "source": "def grade(sample, item):\n    return len(sample['output_text'])\n"}
SHAPE = {"type": "json_schema", "json_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxPool]:
    with SandboxPool(2, scratch_root=tmp_path_factory.mktemp("scratch")) as pool:
        yield pool


def multi(formula: str, **graders: Any) -> MultiGrader:
    return MultiGrader.model_validate({"type": "multi", "graders": graders, "calculate_output": formula})


def ask(
    grader: MultiGrader, *texts: str, pool: SandboxPool | None = None, **settings: Any
) -> list[GradeResult]:
    return grade_batch(
        grader, [GradeInput({"answer": "abcd"}, text) for text in texts], pool=pool, **settings
    )


def test_the_formula_gets_every_graders_score(pool: SandboxPool) -> None:
    grader = multi("right + 0.5 * close - 0.01 * (length > 4)", right=RIGHT, close=CLOSE, length=LENGTH)
    same, near, long = ask(grader, "abcd", "abce", "abcdabcd", pool=pool)
    assert same.parts == {"right": 1.0, "close": 1.0, "length": 4.0}
    assert (same.score, near.score) == (1.5, 0.375)
    assert long.score == pytest.approx(1 + 0.5 * (1 - 4 / 12) - 0.01)
    assert near.parts == {"right": 0.0, "close": 0.75, "length": 4.0}


def test_a_grader_that_fails_fails_the_whole_and_says_which(pool: SandboxPool) -> None:
    picky = {
        "type": "python",
        "source": "def grade(sample, item):\n    return 1 / len(sample['output_text'])\n",
    }
    empty, good = ask(multi("right or picky", right=RIGHT, picky=picky), "", "abcd", pool=pool)
    assert good.score == 1.0
    assert (empty.score, empty.error_type, empty.parts) == (None, ErrorType.EXCEPTION, {"right": 0.0})
    assert empty.error is not None
    assert empty.error.startswith("picky: ")
    assert "ZeroDivisionError" in empty.error


def test_a_formula_without_a_value_is_an_error_of_that_sample() -> None:
    none, half = ask(multi("1 / close", close=CLOSE), "xyz", "abcd")
    assert half.score == 1.0
    assert (none.score, none.error_type) == (None, ErrorType.FORMULA)
    assert none.error == "the formula divides by zero for close = 0"
    assert none.parts == {"close": 0.0}


def test_a_score_that_is_too_large_is_an_error() -> None:
    (result,) = ask(multi("close * 1e7", close=CLOSE), "abcd")
    assert (result.score, result.error_type) == (None, ErrorType.BAD_SCORE)
    assert result.error == "the formula gives 1e+07: a score lies between -1,000,000 and 1,000,000"


def test_graders_of_one_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JIGSAW_PRIVATE_URLS", "allow")
    both = threading.Barrier(2)

    def answer(asked: Asked) -> Answer:
        both.wait(30)  # one alone gets no answer
        return Answer(b'{"score": 2}')

    with serving(answer) as server:
        endpoint = {"type": "endpoint", "url": server.url, "secret": "signing"}
        secrets = {"signing": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}
        (result,) = ask(multi("one + other", one=endpoint, other=endpoint), "a", secrets=secrets)
    assert result.score == 4.0


def test_without_a_pool_the_sandboxed_ones_share_one_of_the_call() -> None:
    (result,) = ask(multi("length + 10 * shape", length=LENGTH, shape=SHAPE), "{}")
    assert result.score == 12.0


def test_an_empty_batch_has_no_results() -> None:
    assert ask(multi("right", right=RIGHT)) == []
