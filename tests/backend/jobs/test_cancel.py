"""Cancelling jobs and deleting the files they use."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.common.errors import Conflict, Forbidden, InvalidRequest, NotFound
from backend.jobs.access import job_access
from backend.jobs.models import Transition
from backend.jobs.services import file_delete, job_cancel
from backend.jobs.states import (
    ATTEMPT_TERMINAL,
    JOB_TERMINAL,
    AttemptStatus,
    JobStatus,
)
from tests import factories


@pytest.mark.parametrize("status", [status for status in JobStatus if status not in JOB_TERMINAL])
def test_every_unfinished_job_can_be_cancelled(status, acme, tmp_path):
    job = factories.job(acme.organization, tmp_path, status=status)
    assert job_cancel(actor=acme.member, job=job).status == JobStatus.CANCELLED
    assert job.finished_at is not None
    assert Transition.objects.get(job=job).actor == acme.member.label


@pytest.mark.parametrize("status", sorted(JOB_TERMINAL))
def test_a_finished_job_cannot(status, acme, tmp_path):
    job = factories.job(acme.organization, tmp_path, status=status)
    with pytest.raises(InvalidRequest) as caught:
        job_cancel(actor=acme.member, job=job)
    assert caught.value.code == "job_finished"
    assert not Transition.objects.exists()


@pytest.mark.parametrize("status", [AttemptStatus.STARTING, AttemptStatus.RUNNING])
def test_a_live_attempt_is_told_to_stop(status, acme, tmp_path):
    job = factories.job(acme.organization, tmp_path, status=JobStatus.RUNNING)
    attempt = factories.attempt(job, status)
    job_cancel(actor=acme.member, job=job, stimulus="req-1")
    attempt.refresh_from_db()
    assert attempt.status == AttemptStatus.STOPPING
    assert list(Transition.objects.filter(job=job).values_list("new", "stimulus").order_by("pk")) == [
        ("cancelled", "req-1"),
        ("stopping", "req-1"),
    ]


@pytest.mark.parametrize("status", sorted(ATTEMPT_TERMINAL))
def test_an_attempt_that_is_over_is_left_alone(status, acme, tmp_path):
    job = factories.job(acme.organization, tmp_path)
    attempt = factories.attempt(job, status)
    job_cancel(actor=acme.member, job=job)
    attempt.refresh_from_db()
    assert attempt.status == status


def test_a_job_read_before_it_finished_is_not_cancelled_after(acme, tmp_path):
    job = factories.job(acme.organization, tmp_path, status=JobStatus.RUNNING)
    seen = job_access(acme.member, job.public_id, write=True)
    job.status = JobStatus.SUCCEEDED
    job.save(update_fields=["status"])
    with pytest.raises(InvalidRequest):
        job_cancel(actor=acme.member, job=seen)


def test_an_attempt_opened_meanwhile_is_stopped_too(acme, tmp_path, monkeypatch):
    """Between the look for an attempt and the lock of the job the scheduler starts one."""
    from backend.jobs import services

    job = factories.job(acme.organization, tmp_path, status=JobStatus.RUNNING)
    look, opened = services._live_attempt, []

    def open_after_the_first_look(job_pk, *, lock):
        found = look(job_pk, lock=lock)
        if not opened:
            opened.append(factories.attempt(job))
        return found

    monkeypatch.setattr(services, "_live_attempt", open_after_the_first_look)
    job_cancel(actor=acme.member, job=job)
    opened[0].refresh_from_db()
    assert opened[0].status == AttemptStatus.STOPPING


def test_viewers_and_other_tenants_cancel_nothing(acme, northwind, tmp_path):
    job = factories.job(acme.organization, tmp_path)
    with pytest.raises(Forbidden):
        job_access(acme.viewer, job.public_id, write=True)
    with pytest.raises(Forbidden):
        job_cancel(actor=acme.viewer, job=job)
    with pytest.raises(NotFound):
        job_access(northwind.owner, job.public_id)


@pytest.mark.parametrize("status", list(JobStatus))
def test_a_file_goes_once_no_unfinished_job_needs_it(
    status, acme, tmp_path, django_capture_on_commit_callbacks
):
    job = factories.job(acme.organization, tmp_path, status=status)
    file = job.training_file
    with django_capture_on_commit_callbacks(execute=True):
        if status in JOB_TERMINAL:
            file_delete(actor=acme.member, file=file)
        else:
            with pytest.raises(Conflict, match=job.public_id):
                file_delete(actor=acme.member, file=file)
    assert Path(file.path).exists() == (status not in JOB_TERMINAL)


def test_a_file_is_deleted_once(acme, tmp_path):
    file = factories.file(acme.organization, tmp_path)
    file_delete(actor=acme.member, file=file)
    with pytest.raises(NotFound):
        file_delete(actor=acme.member, file=file)
