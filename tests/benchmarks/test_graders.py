"""The benchmark measures what it says: a few batches, with no bound on any time."""

from __future__ import annotations

import json
from pathlib import Path

from tests.benchmarks.graders import GRADERS, in_a_loop, main, samples
from workers.graders.run import grade_batch
from workers.spec import PythonGrader


def test_the_loop_and_the_sandbox_grade_the_same_samples() -> None:
    given = samples(4)
    grader = PythonGrader.model_validate(GRADERS["python"])
    assert [result.score for result in grade_batch(grader, given)] == [1.0, 0.0, 1.0, 0.0]
    assert len(in_a_loop(given)()) == 4


def test_every_grader_has_a_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    assert main(["--batches", "1", "--size", "8", "--processes", "2", "--json", str(file)]) in (0, 1)
    report = json.loads(file.read_text())
    assert {row["grader"] for row in report["rows"]} == {"loop", "python, 4 owners", *GRADERS}
    for row in report["rows"]:
        assert row["grades"] == 8
        assert row["per_s"] > 0
        assert 0 < row["p50_ms"] <= row["p99_ms"]
