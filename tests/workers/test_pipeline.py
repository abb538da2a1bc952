"""A whole attempt in one process: what it reports, how it ends, and what it leaves behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.workers.local import STOP, attempt, device, ends, of_kind, offers, part_by_part, run, same_weights
from workers.calls import Stuck
from workers.failures import failure_of
from workers.gathering import GraderFailed
from workers.protocol import (
    CheckpointSaved,
    Ended,
    FailureKind,
    Log,
    Offer,
    StepDone,
    SubStageKind,
)
from workers.residents.errors import ModelLoad
from workers.train.trainer import NotFinite


def test_an_attempt_from_start_to_end(start, cluster):
    reports = asyncio.run(run(start("out")))
    assert [report.seq for report in reports] == list(range(1, len(reports) + 1))
    assert of_kind(reports, Ended) == [Ended(outcome="succeeded")]
    assert sorted(offer.node for offer in offers(reports)) == sorted(end.node for end in ends(reports))
    steps = of_kind(reports, StepDone)
    assert [done.step for done in steps] == [0, 1]
    assert all(done.metrics["mismatch_max"] < 1e-3 for done in steps)
    assert all(len(done.samples) == 3 and done.samples[0].group == 0 for done in steps)
    assert [saved.final for saved in of_kind(reports, CheckpointSaved)] == [False, True]
    assert cluster.runs() == []


def test_a_batch_above_saturation_decodes_and_then_tails(start, cluster):
    """9 sequences on a device that is saturated by 4: decode until 3 are left, the rest is a tail."""
    made = start("out", {"steps": 1, "sampling": {"max_tokens": 100, "stop": list("abcd")}})
    cluster.may_step = part_by_part(made)
    reports = asyncio.run(run(made))
    kinds = Counter(offer.kind for offer in offers(reports))
    assert kinds[SubStageKind.DECODE] == 1
    tails = [offer for offer in offers(reports) if offer.kind is SubStageKind.TAIL]
    assert tails and all(0 < offer.sequences < 4 for offer in tails)


def test_log_probs_are_computed_only_where_they_are_used(start):
    for name, rl, wanted in (
        ("plain", {}, 0),
        ("updates", {"updates_per_step": 3}, 1),
        ("penalty", {"loss": {"kl_beta": 0.1}}, 1),
        ("both", {"updates_per_step": 3, "loss": {"kl_beta": 0.1}}, 1),
    ):
        reports = asyncio.run(run(start(name, {"steps": 1, **rl})))
        kinds = Counter(offer.kind for offer in offers(reports))
        assert kinds[SubStageKind.LOGPROB] == wanted
        assert of_kind(reports, Ended)[0].outcome == "succeeded"


@pytest.mark.parametrize("evicted", [True, False])
def test_moving_between_devices_changes_no_weight_and_leaves_nothing(start, cluster, tmp_path, evicted):
    """Each step on the other device, whose residents are still there or were evicted meanwhile."""

    def alternate(offer: Offer):
        name = f"local/cpu{offer.step % 2}"
        if evicted and offer.kind is SubStageKind.PREFILL and offer.step:
            cluster.evict(name)
        return device(name)

    steady = asyncio.run(run(start("steady", {"steps": 4})))
    moved = asyncio.run(run(start("moved", {"steps": 4}), place=alternate))
    assert same_weights(steady, moved)
    assert cluster.runs() == []
    assert not list((tmp_path / "moved").glob(".move-*"))


def test_full_fine_tuning_saves_a_model_and_resumes_to_the_same_weights(start, tiny_folder):
    rl = {"tuning": {"type": "full"}, "steps": 4}
    whole = asyncio.run(run(start("whole", rl, weights_key="ftjob-x")))
    half = asyncio.run(run(start("half", rl | {"steps": 2}, weights_key="ftjob-y")))
    resumed = start(
        "half",
        rl,
        weights_key="ftjob-z",
        resume_from=of_kind(half, CheckpointSaved)[-1].path,
        start_step=2,
        run_key="ftjob-x.2",
    )
    again = asyncio.run(run(resumed))
    folders = [Path(of_kind(reports, CheckpointSaved)[-1].path) for reports in (whole, again)]
    first, second = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(first[name], second[name]) for name in first)
    before = load_file(tiny_folder / "model.safetensors")
    assert any(not torch.equal(first[name], before[name]) for name in first)


def test_the_last_checkpoint_stays_until_its_successor_is_known(start, tmp_path):
    reports = asyncio.run(run(start("out", {"steps": 3, "keep_checkpoints": 1})))
    saved = of_kind(reports, CheckpointSaved)
    assert [[Path(path).name for path in one.removed] for one in saved] == [[], [], ["step-1"]]
    assert sorted(path.name for path in (tmp_path / "out").glob("step-*")) == ["step-2", "step-3"]


@pytest.mark.parametrize("kind", [SubStageKind.PREFILL, SubStageKind.GRADE, SubStageKind.UPDATE])
def test_stopping_twice_ends_once_and_leaves_nothing(start, cluster, kind):
    made = start("out")

    async def stop(report):
        if isinstance(report.body, Offer) and report.body.kind is kind:
            await made.stop(STOP)
            await made.stop(STOP)

    reports = asyncio.run(run(made, seen=stop))
    assert of_kind(reports, Ended) == [Ended(outcome="stopped")]
    assert cluster.runs() == []


def test_a_stop_after_the_last_step_does_not_swallow_the_end(start):
    made = start("out", {"steps": 1})

    async def stop_at_the_end(report):
        if isinstance(report.body, CheckpointSaved):
            await made.stop(STOP)

    reports = asyncio.run(run(made, seen=stop_at_the_end))
    assert len(of_kind(reports, Ended)) == 1


def test_a_grader_that_always_fails_ends_the_job_with_its_words(start):
    source = "def grade(sample, item):\n    raise ValueError('no\\0 \\ud800 luck')\n"
    grader = {"type": "python", "name": "bad", "source": source}
    reports = asyncio.run(run(start("out", spec={"grader": grader})))
    failure = of_kind(reports, Ended)[0].failure
    assert failure.kind is FailureKind.GRADER_FAILED
    assert "9 of 9 samples have no reward at step 1" in failure.message
    assert "\0" not in failure.message
    failure.model_dump_json()


def test_some_failed_grades_are_told_and_left_out(start):
    source = (
        "def grade(sample, item):\n    return {}[0] if item['messages'][0]['content'] == 'say 1' else 0.5\n"
    )
    grader = {"type": "python", "name": "some", "source": source}
    rl = {"steps": 1, "shuffle": False}
    reports = asyncio.run(run(start("out", rl, spec={"grader": grader})))
    done = of_kind(reports, StepDone)[0]
    assert done.metrics["grade_errors"] == pytest.approx(1 / 3)
    assert any("3 of 9 samples have no reward" in log.message for log in of_kind(reports, Log))


def test_a_bad_model_folder_and_a_bad_row_say_so(start, rows, tmp_path):
    (tmp_path / "empty").mkdir()
    reports = asyncio.run(run(attempt(tmp_path / "empty", rows, tmp_path / "out")))
    assert of_kind(reports, Ended)[0].failure.kind is FailureKind.MODEL_LOAD
    rows.write_text('{"messages": [{"role": "user", "content": "x"}]}\nnot json\n')
    reports = asyncio.run(run(start("out", {"shuffle": False})))
    failure = of_kind(reports, Ended)[0].failure
    assert failure.kind is FailureKind.BAD_DATA
    assert "line 2" in failure.message


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NotFinite("run", "the loss is nan"), FailureKind.NOT_FINITE),
        (GraderFailed("all"), FailureKind.GRADER_FAILED),
        (ModelLoad("gone"), FailureKind.MODEL_LOAD),
        (Stuck("long"), FailureKind.TIME_LIMIT),
        (MemoryError(), FailureKind.OUT_OF_MEMORY),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            FailureKind.OUT_OF_MEMORY,
        ),
        (OSError(28, "No space left on device", "/srv/secret/place"), FailureKind.INTERNAL),
        (KeyError("x"), FailureKind.INTERNAL),
    ],
)
def test_failures_are_values_that_tell_no_secrets(error, kind):
    failure = failure_of(error)
    assert failure.kind is kind
    assert "/srv" not in failure.message
