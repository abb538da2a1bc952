"""The node's grader pool, without the actor around it."""

from __future__ import annotations

import threading
import time

from workers.graders.pool import GraderPool
from workers.graders.run import ErrorType, GradeInput
from workers.spec import PythonGrader

ENDLESS = PythonGrader(
    type="python", source="def grade(sample, item):\n    while True: pass\n", timeout_s=60.0
)
ONE = PythonGrader(type="python", source="def grade(sample, item):\n    return 1\n")
SAMPLES = [GradeInput({}, "text")] * 8


def test_a_closed_owner_is_graded_no_more() -> None:
    pool = GraderPool()
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(pool.grade("run", ENDLESS, SAMPLES, {}, 1.0)))
    begun = time.monotonic()
    thread.start()
    pool.close("run")  # before its first call, amid it, or between: all the same
    thread.join(30)
    assert time.monotonic() - begun < 30
    late = pool.grade("run", ONE, SAMPLES, {}, 1.0)
    for ran in (*found, late):
        assert {result.error_type for result in ran.value} == {ErrorType.SANDBOX}  # type: ignore[attr-defined]
        assert len(ran.value) == 8  # type: ignore[attr-defined]
    assert [result.score for result in pool.grade("other", ONE, SAMPLES[:2], {}, 1.0).value] == [1.0, 1.0]
