"""Jobs that start from a checkpoint: of whom, of what, and when."""

from __future__ import annotations

from typing import Any

import pytest
from django.utils import timezone

from backend.common.errors import InvalidRequest
from backend.jobs.models import Job
from backend.jobs.services import job_create
from backend.jobs.states import AttemptStatus, JobStatus
from tests import factories


@pytest.fixture
def model(db, tmp_path):
    return factories.base_model(tmp_path / "tiny", name="tiny")


def finished(organization, model, folder, **fields: Any) -> Job:
    """A job that is over, with checkpoints after steps 5 and 10."""
    job = factories.job(organization, folder, status=JobStatus.SUCCEEDED, model=model, **fields)
    attempt = factories.attempt(job, status=AttemptStatus.SUCCEEDED)
    for step in (5, 10):
        factories.checkpoint(attempt, folder, step=step)
    return job


def kept(job: Job, step: int):
    return job.job_checkpoints.get(checkpoint__step=step).checkpoint


def request(organization, folder, start: str, **fields: Any) -> dict[str, Any]:
    file = factories.file(organization, folder)
    return {
        "model": "tiny",
        "training_file": file.public_id,
        "grader": factories.GRADER,
        "start_from": start,
        **fields,
    }


def refusal(tenant, body) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        job_create(actor=tenant.member, request=body)
    return caught.value


def test_a_checkpoint_or_a_job_is_where_one_starts(acme, model, tmp_path):
    first = finished(acme.organization, model, tmp_path, rl={"tuning": {"type": "lora", "rank": 4}})
    for name, step in ((kept(first, 5).public_id, 5), (first.public_id, 10)):
        job = job_create(actor=acme.member, request=request(acme.organization, tmp_path, name))
        assert job.start == kept(first, step)
        assert job.spec["start_from"] == kept(first, step).public_id
        assert job.spec["rl"]["tuning"]["rank"] == 4
    again = job_create(actor=acme.member, request=job.spec)
    assert again.spec == job.spec


def test_a_checkpoint_that_is_gone_is_none(acme, model, tmp_path):
    first = finished(acme.organization, model, tmp_path)
    last = kept(first, 10)
    last.deleted_at = timezone.now()
    last.save()
    error = refusal(acme, request(acme.organization, tmp_path, last.public_id))
    assert (error.param, error.code) == ("start_from", "start_not_found")
    job = job_create(actor=acme.member, request=request(acme.organization, tmp_path, first.public_id))
    assert job.start == kept(first, 5)


def test_nobody_starts_from_anothers(acme, northwind, model, tmp_path):
    theirs = finished(northwind.organization, model, tmp_path)
    for name in (kept(theirs, 5).public_id, theirs.public_id, "ckpt-none", "ftjob-none", "a\0b", "x"):
        error = refusal(acme, request(acme.organization, tmp_path, name))
        assert error.param in {"start_from", None}
        assert error.code == "start_not_found" or "U+0000" in error.message


def test_another_model_is_no_start(acme, model, tmp_path):
    other = factories.base_model(tmp_path / "other", name="other")
    first = finished(acme.organization, other, tmp_path)
    error = refusal(acme, request(acme.organization, tmp_path, first.public_id))
    assert error.param == "start_from" and "of the model other, not of tiny" in error.message


@pytest.mark.parametrize(
    ("tuning", "param"),
    [
        ({"rank": 8}, "rl.tuning.rank"),
        ({"alpha": 16.0}, "rl.tuning.alpha"),
        ({"targets": ["q_proj"]}, "rl.tuning.targets"),
    ],
)
def test_another_shape_is_refused_by_its_name(acme, model, tmp_path, tuning, param):
    first = finished(acme.organization, model, tmp_path)
    error = refusal(acme, request(acme.organization, tmp_path, first.public_id, rl={"tuning": tuning}))
    assert error.param == param


def test_a_whole_model_is_no_start_for_an_adapter(acme, model, tmp_path):
    first = finished(acme.organization, model, tmp_path, rl={"tuning": {"type": "full"}})
    body = request(acme.organization, tmp_path, first.public_id, rl={"tuning": {"type": "lora"}})
    assert refusal(acme, body).param.startswith("rl.tuning.")
    assert job_create(actor=acme.member, request=request(acme.organization, tmp_path, first.public_id)).spec[
        "rl"
    ]["tuning"] == {"type": "full"}


def test_order_of_targets_and_dropout_make_no_other_shape(acme, model, tmp_path):
    first = finished(
        acme.organization, model, tmp_path, rl={"tuning": {"type": "lora", "targets": ["q_proj", "v_proj"]}}
    )
    tuning = {"targets": ["v_proj", "q_proj"], "dropout": 0.1}
    body = request(acme.organization, tmp_path, first.public_id, rl={"tuning": tuning})
    assert job_create(actor=acme.member, request=body).start == kept(first, 10)


@pytest.mark.parametrize(
    ("status", "attempt"),
    [(JobStatus.RUNNING, AttemptStatus.RUNNING), (JobStatus.CANCELLED, AttemptStatus.STOPPING)],
)
def test_a_job_that_may_still_replace_its_checkpoints_is_no_start(acme, model, tmp_path, status, attempt):
    first = finished(acme.organization, model, tmp_path)
    Job.objects.filter(pk=first.pk).update(status=status)
    factories.attempt(first, status=attempt)
    error = refusal(acme, request(acme.organization, tmp_path, first.public_id))
    assert error.param == "start_from" and "still runs" in error.message


def test_a_start_of_a_preference_job_is_a_copy_in_memory(acme, model, tmp_path):
    first = finished(acme.organization, model, tmp_path)
    rows = [factories.row("2 + 2 = ?", chosen="4", rejected="5")] * 4
    file = factories.file(acme.organization, tmp_path, rows=rows)
    body = {"model": "tiny", "training_file": file.public_id, "method": {"type": "dpo"}}
    plain = job_create(actor=acme.member, request=body)
    started = job_create(actor=acme.member, request={**body, "start_from": first.public_id})
    assert started.run_bytes > plain.run_bytes
