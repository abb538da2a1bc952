"""The pool: scores, owners and their turns, warm processes, cancelling and closing."""

import threading
import time

import pytest

from tests.workers.sandbox.helpers import (
    CALL,
    ENDLESS,
    LENGTH,
    WHO,
    members_of_session,
    one,
    pids,
    wait_until_started,
)
from workers.sandbox.pool import MAX_CALLS, SandboxPool
from workers.sandbox.replies import FailureKind


def test_scores_come_back_in_order(pool):
    calls = [({"output_text": "x" * n}, {"n": 4}) for n in range(50)]
    assert [result.score for result in pool.grade(LENGTH, calls, 5.0)] == [n / 4 for n in range(50)]


@pytest.mark.parametrize(("returned", "score"), [("True", 1.0), ("False", 0.0), ("3", 3.0), ("-0.5", -0.5)])
def test_numbers_are_scores(pool, returned, score):
    assert one(pool, f"def grade(sample, item):\n    return {returned}\n").score == score


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("float('nan')", "grade returned nan, not a finite number"),
        ("float('-inf')", "grade returned -inf, not a finite number"),
        ("None", "grade returned None, not a number"),
        ("'0.5'", "grade returned '0.5' (str), not a number"),
        ("10 ** 400", "grade returned a number that is no float: OverflowError"),
    ],
)
def test_what_is_no_finite_number_is_an_error_not_a_zero(pool, returned, message):
    result = one(pool, f"def grade(sample, item):\n    return {returned}\n")
    assert (result.score, result.kind, result.error) == (None, FailureKind.BAD_SCORE, message)


def test_an_exception_names_the_tenants_line(pool):
    source = "def helper(x):\n    return 1 / x\n\ndef grade(sample, item):\n    return helper(0)\n"
    result = one(pool, source)
    assert result.kind is FailureKind.EXCEPTION
    assert result.error == "line 2, in helper: ZeroDivisionError: division by zero"


def test_an_exception_inside_the_library_names_the_line_that_called_it(pool):
    result = one(pool, "import json\ndef grade(sample, item):\n    return json.loads('{')\n")
    assert result.error.startswith("line 3, in grade: JSONDecodeError: ")


def test_sys_exit_is_an_error_and_the_process_goes_on(pool):
    source = "import sys\ncount = 0\ndef grade(sample, item):\n    global count; count += 1\n"
    source += "    if count == 1: sys.exit()\n    return count\n"
    assert one(pool, source, owner="a").kind is FailureKind.EXCEPTION
    assert one(pool, source, owner="a").score == 2.0


def test_the_clock_starts_with_the_execution_not_with_the_queueing(pool):
    """Sixteen calls of 0.2 s on two processes queue for 1.4 s, each under its own limit of 1 s."""
    source = "import time\ndef grade(sample, item):\n    time.sleep(0.2)\n    return 1\n"
    assert [result.score for result in pool.grade(source, [CALL] * 16, 1.0)] == [1.0] * 16


def test_output_belongs_to_its_own_call(pool):
    source = "def grade(sample, item):\n    print(item['n'])\n    return 1\n"
    results = pool.grade(source, [({}, {"n": n}) for n in range(6)], 5.0)
    assert [result.output for result in results] == [f"{n}\n" for n in range(6)]


def test_an_owner_whose_calls_hang_leaves_the_others_their_part(isolation, tmp_path):
    """On two processes the hanging owner has both, and gives one up as soon as another owner asks."""
    with SandboxPool(2, scratch_root=tmp_path) as pool:
        thread = threading.Thread(target=lambda: pool.grade(ENDLESS, [CALL] * 50, 1.0, owner="a"))
        thread.start()
        wait_until_started(pool)
        begun = time.monotonic()
        assert [result.score for result in pool.grade(LENGTH, [CALL] * 40, 5.0, owner="b")] == [0.75] * 40
        # One wait of at most a second for a place; taking turns would have cost about twenty.
        assert time.monotonic() - begun < 10
        pool.cancel("a")
        thread.join(20)


@pytest.mark.parametrize("shared", [None, "math"])
def test_cancel_ends_an_owners_grades_and_no_one_elses(isolation, tmp_path, shared):
    results = []
    with SandboxPool(2, scratch_root=tmp_path) as pool:
        one(pool, LENGTH, owner="a")
        [own] = pids(pool)
        one(pool, LENGTH, owner="b")
        [other] = set(pids(pool)) - {own}
        begun = time.monotonic()
        thread = threading.Thread(
            target=lambda: results.extend(pool.grade(ENDLESS, [CALL] * 50, 60.0, owner="a", shared=shared))
        )
        thread.start()
        wait_until_started(pool)
        pool.cancel("a")
        thread.join(30)
        assert time.monotonic() - begun < 30
        assert [(result.score, result.error) for result in results] == [
            (None, "the grading was cancelled")
        ] * 50
        assert members_of_session(own) == []
        assert other in members_of_session(other)
        # One that all owners share may have been loaded and not been called yet: it stays for the next.
        assert pids(pool) == [other] if shared is None else other in pids(pool)
        assert one(pool, LENGTH, owner="b").score == 0.75
        pool.cancel("nobody")


def test_a_cancelled_owner_gets_no_further_call(pool):
    pool.cancel("gone")
    assert one(pool, LENGTH, owner="gone").error == "the grading was cancelled"
    assert one(pool, LENGTH, owner="b").score == 0.75


def test_close_ends_a_grade_in_progress(isolation, tmp_path):
    pool = SandboxPool(1, scratch_root=tmp_path)
    results = []
    thread = threading.Thread(target=lambda: results.extend(pool.grade(ENDLESS, [CALL] * 3, 60.0)))
    thread.start()
    wait_until_started(pool)
    pool.close()
    thread.join(20)
    assert [result.score for result in results] == [None] * 3
    assert results[-1].kind is FailureKind.SANDBOX


def test_a_process_serves_one_owner_only(pool):
    first, again = one(pool, WHO, owner="a").score, one(pool, WHO, owner="a").score
    other = one(pool, WHO, owner="b").score
    assert first == again
    assert other != first


def test_without_an_owner_the_process_ends_with_the_batch(isolation, tmp_path):
    with SandboxPool(1, scratch_root=tmp_path) as pool:
        one(pool, LENGTH)
        assert pids(pool) == []
        assert one(pool, WHO).score != one(pool, WHO).score


def test_a_process_is_replaced_after_its_share_of_calls(isolation, tmp_path):
    source = "count = 0\ndef grade(sample, item):\n    global count; count += 1\n    return count\n"
    with SandboxPool(1, scratch_root=tmp_path) as pool:
        scores = [result.score for result in pool.grade(source, [CALL] * (MAX_CALLS + 1), 5.0, owner="a")]
    assert scores == [*range(1, MAX_CALLS + 1), 1]


def test_a_slow_batch_does_not_starve_another(isolation, tmp_path):
    """On one process a batch of 40 slow calls and one of 2 take turns."""
    slow = "import time\ndef grade(sample, item):\n    time.sleep(0.05)\n    return time.monotonic()\n"
    with SandboxPool(1, scratch_root=tmp_path) as pool:
        results = []
        thread = threading.Thread(
            target=lambda: results.extend(pool.grade(slow, [CALL] * 40, 5.0, owner="a"))
        )
        thread.start()
        quick = pool.grade(slow, [CALL] * 2, 5.0, owner="b")
        thread.join(60)
    assert quick[-1].score < results[-1].score


def test_a_pool_needs_a_process():
    with pytest.raises(ValueError, match="at least one process"):
        SandboxPool(0)
