"""Samples without a reward, completions that were cut, and steps that teach nothing."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.workers.local import of_kind, offers, run, same_weights, weights
from workers import gathering
from workers.graders.run import GradeResult
from workers.protocol import CheckpointSaved, Ended, FailureKind, Log, StepDone, SubStageKind

ONE = {"steps": 1, "sample_groups": 3}
#: Every completion differs from the others of its group.
LETTERS = "len(set(sample['output_text'])) / 16"


def grader(source: str) -> dict:
    return {"type": "python", "name": "g", "source": f"def grade(sample, item):\n{source}"}


def warnings(reports) -> list[str]:
    return [log.message for log in of_kind(reports, Log) if log.level == "warning"]


def only_some_fail(number: int) -> dict:
    """All samples of one row have no grade."""
    return grader(
        f"    if item['number'] == {number}:\n        raise ValueError('no luck')\n    return {LETTERS}\n"
    )


def test_errors_of_samples_are_typed_told_and_left_out(start):
    reports = asyncio.run(run(start("out", ONE, spec={"grader": only_some_fail(2)})))
    (done,) = of_kind(reports, StepDone)
    failed = [sample for sample in done.samples if sample.reward is None]
    graded = [sample for sample in done.samples if sample.reward is not None]
    rows = {sample.row for sample in failed}
    assert rows <= {2}
    for sample in failed:
        assert sample.error.startswith("grader: exception: ") and "no luck" in sample.error
        assert sample.advantage == 0 and not sample.parts
    for group in {sample.group for sample in graded}:
        own = [sample.advantage for sample in graded if sample.group == group]
        assert sum(own) == pytest.approx(0, abs=1e-9)
    assert done.metrics["grade_errors"] == pytest.approx(len(failed) / 9)
    if failed:
        assert any(f"{len(failed)} of 9 samples have no reward" in text for text in warnings(reports))
    assert 0 < done.metrics["grade_seconds"] <= done.metrics["grade_seconds_max"]


@pytest.mark.parametrize(("most", "outcome"), [(0.3, "failed"), (0.34, "succeeded")])
def test_the_job_fails_past_the_threshold_with_the_samples_own_words(start, monkeypatch, most, outcome):
    """A third of the grades are no numbers."""
    made = start("out", ONE | {"max_grade_errors": most})
    take = gathering.Gathering.take_grades

    def third_fails(self, groups, grades):
        cut = [
            GradeResult(float("nan")) if place % 3 == 0 else GradeResult(place / 10)
            for place in range(len(grades))
        ]
        take(self, groups, cut)

    monkeypatch.setattr(gathering.Gathering, "take_grades", third_fails)
    reports = asyncio.run(run(made))
    (ended,) = of_kind(reports, Ended)
    assert ended.outcome == outcome
    text = "3 of 9 samples have no reward"
    if outcome == "failed":
        assert ended.failure.kind is FailureKind.GRADER_FAILED
        assert text in ended.failure.message and "bad_score: the score is nan" in ended.failure.message
    else:
        assert any(text in told for told in warnings(reports))
        metrics = of_kind(reports, StepDone)[0].metrics
        assert metrics["grade_errors"] == pytest.approx(1 / 3)
        assert all(value == value for value in metrics.values()), "no NaN"


def cut_after(tokens: int, **more) -> dict:
    return ONE | {"sampling": {"max_tokens": tokens}} | more


def test_cut_completions_count_or_are_masked(start):
    """Of the tiny model's completions of 40 tokens, some end by themselves and some are cut."""
    rl = cut_after(40, group_size=8)
    counted = of_kind(asyncio.run(run(start("counted", rl))), StepDone)[0]
    reports = asyncio.run(run(start("masked", rl | {"mask_truncated": True})))
    masked = of_kind(reports, StepDone)[0]
    assert 0 < counted.metrics["truncated"] < 1
    assert "masked" not in counted.metrics
    assert masked.metrics["masked"] == masked.metrics["truncated"] == counted.metrics["truncated"]
    assert [s.completion for s in counted.samples] == [s.completion for s in masked.samples]
    # The mean over kept sequences is another number.
    assert masked.metrics["loss"] != counted.metrics["loss"]


def test_when_all_are_masked_nothing_is_trained_and_it_is_said_why(start):
    rl = cut_after(2, mask_truncated=True)
    reports = asyncio.run(run(start("out", rl)))
    assert of_kind(reports, Ended)[0].outcome == "succeeded"
    (done,) = of_kind(reports, StepDone)
    assert (done.metrics["masked"], done.metrics["loss"]) == (1, 0)
    assert "grad_norm" not in done.metrics
    assert SubStageKind.UPDATE not in {offer.kind for offer in offers(reports)}
    assert warnings(reports) == [
        "Step 1 teaches nothing: every completion with a reward hit max_tokens and is left out "
        "(rl.mask_truncated)."
    ]
    untrained = weights(reports)
    assert all(not tensor.any() for name, tensor in untrained.items() if "lora_B" in name)


def test_the_overlong_penalty_shapes_the_reward_and_is_told_apart(start):
    """Of 8 tokens at most the last 4 cost up to 1: a completion that was cut loses all of it."""
    rl = cut_after(8, overlong_buffer=4, overlong_penalty=1.0, group_size=8)
    reports = asyncio.run(run(start("out", rl)))
    (done,) = of_kind(reports, StepDone)
    for sample in done.samples:
        over = max(0, sample.tokens - 4) / 4
        assert sample.parts["overlong"] == pytest.approx(-over)
    cut = [sample for sample in done.samples if sample.finish == "length"]
    assert cut and all(sample.parts["overlong"] == -1 for sample in cut)
    assert done.metrics["reward.overlong"] == pytest.approx(
        sum(sample.parts["overlong"] for sample in done.samples) / len(done.samples)
    )


EQUAL = {"grader": grader("    return 0.97\n")}


def test_steps_that_teach_nothing_warn_with_the_cause(start):
    reports = asyncio.run(run(start("out", {"steps": 2}, spec=EQUAL)))
    assert of_kind(reports, Ended)[0].outcome == "succeeded"
    assert warnings(reports) == [
        f"Step {number} teaches nothing: in every group all rewards are equal." for number in (1, 2)
    ]
    for done in of_kind(reports, StepDone):
        assert done.metrics["grad_norm"] == 0
        assert all(sample.advantage == 0 for sample in done.samples)


def test_a_job_stops_after_so_many_idle_steps_also_across_a_resume(start, tmp_path):
    rl = {"steps": 6, "max_idle_steps": 3, "keep_checkpoints": 9}
    reports = asyncio.run(run(start("out", rl, spec=EQUAL)))
    (ended,) = of_kind(reports, Ended)
    assert ended.failure.kind is FailureKind.NOTHING_LEARNED
    assert ended.failure.message == (
        "3 steps in a row taught nothing (rl.max_idle_steps): in every group all rewards are equal"
    )
    assert [done.step for done in of_kind(reports, StepDone)] == [0, 1, 2]
    saved = of_kind(reports, CheckpointSaved)[1]
    assert json.loads((tmp_path / "out/step-2/state.json").read_text())["idle_steps"] == 2
    again = asyncio.run(
        run(start("again", rl, spec=EQUAL, resume_from=saved.path, start_step=2, run_key="again.2"))
    )
    assert [done.step for done in of_kind(again, StepDone)] == [2]
    assert of_kind(again, Ended)[0].failure == ended.failure


def test_a_step_that_teaches_begins_the_count_anew(start):
    """Rows 0 to 3 give equal rewards: of every five prompts one teaches."""
    source = f"    return 0.5 if item['number'] < 4 else {LETTERS}\n"
    rl = {"steps": 10, "prompts_per_step": 1, "max_idle_steps": 9, "sampling": {"max_tokens": 16}}
    reports = asyncio.run(run(start("out", rl, spec={"grader": grader(source)})))
    assert of_kind(reports, Ended)[0].outcome == "succeeded"
    assert len(warnings(reports)) == 8


def test_masking_is_the_same_whoever_computes(start):
    """Two workers, micro-batches of other sizes: the same update."""
    rl = cut_after(40, mask_truncated=True, prompts_per_step=4, group_size=4)
    one = asyncio.run(run(start("one", rl)))
    two = asyncio.run(run(start("two", rl | {"micro_batch_size": 3})))
    assert same_weights(one, two, tolerance=5e-6)
