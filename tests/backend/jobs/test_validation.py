"""The check of the rows, as Celery runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.db import connection
from django.utils import timezone

from backend.jobs import sizing, tasks
from backend.jobs.models import Job, Transition
from backend.jobs.states import JobStatus, Reason
from tests import factories
from workers.models.chat import ChatTokenizer
from workers.models.config import read_config
from workers.spec import JobSpec

ROWS = factories.rows_with_answers(8)


def validating(acme, tmp_path, rows=None, **fields) -> Job:
    file = factories.file(acme.organization, tmp_path, rows=rows or ROWS)
    return factories.job(
        acme.organization, tmp_path, status=JobStatus.VALIDATING, training_file=file, **fields
    )


def checked(job: Job) -> Job:
    tasks.validate_job(job.pk)
    job.refresh_from_db()
    return job


def test_good_data_queue_the_job(acme, tmp_path):
    job = checked(validating(acme, tmp_path))
    assert (job.status, job.reason) == (JobStatus.QUEUED, Reason.DATA_ACCEPTED)
    assert job.queued_at is not None
    assert Transition.objects.get(job=job).actor == "validator"


def test_a_field_missing_in_row_7_fails_it(acme, tmp_path):
    rows = [dict(row) for row in ROWS]
    del rows[6]["answer"]
    job = checked(validating(acme, tmp_path, rows))
    assert (job.status, job.reason, job.error_param) == ("failed", "invalid_data", "training_file")
    assert job.detail.startswith("row 7: ") and "item.answer" in job.detail


def test_a_prompt_longer_than_the_context_fails_it(acme, tmp_path):
    # A token a character, a context of 128, 64 of them for the completion.
    rows = [*ROWS[:2], factories.row("x" * 65, answer="1")]
    job = checked(validating(acme, tmp_path, rows))
    assert job.detail == (
        "row 3: the prompt has 65 tokens, the limit is 64"
        " (the model's context of 128 tokens less max_tokens of 64)"
    )


def test_a_prompt_that_just_fits_is_fine(acme, tmp_path):
    assert checked(validating(acme, tmp_path, [factories.row("x" * 64, answer="1")])).status == "queued"


def test_the_size_of_the_run_follows_the_longest_prompt(acme, tmp_path):
    sizes = []
    for longest in (10, 40):
        rows = [factories.row("x" * length, answer="1") for length in (5, longest)]
        job = validating(acme, tmp_path, rows)
        spec, config = JobSpec.model_validate(job.spec), read_config(Path(job.base_model.path))
        wanted = sizing.run_bytes(model=config, parameters=20_000, rl=spec.rl, prompt_tokens=longest)
        assert checked(job).run_bytes == wanted
        sizes.append(wanted)
    assert sizes[0] < sizes[1]


def test_a_prompt_that_the_template_refuses_fails_it_by_row(acme, tmp_path):
    job = validating(acme, tmp_path, [*ROWS[:2], factories.row("never", answer="1")])
    template = "{% if messages[0].content == 'never' %}{{ raise_exception('not that') }}{% endif %}x"
    (Path(job.base_model.path) / "chat_template.jinja").write_text(template)
    assert checked(job).detail == "row 3: the chat template refused the messages: not that"


def test_a_model_that_cannot_be_read_is_an_error_of_ours(acme, tmp_path):
    job = validating(acme, tmp_path)
    (Path(job.base_model.path) / "tokenizer.json").unlink()
    job = checked(job)
    assert job.reason == Reason.INTERNAL
    assert str(tmp_path) not in job.detail


def test_content_that_is_gone_fails_it(acme, tmp_path):
    job = validating(acme, tmp_path)
    (tmp_path / job.training_file.filename).unlink()
    assert checked(job).detail == "the file's content is gone"


def test_an_error_of_ours_is_told_as_one(acme, tmp_path, monkeypatch):
    def broken(job):
        raise RuntimeError("boom")

    monkeypatch.setattr(tasks, "data_check", broken)
    job = checked(validating(acme, tmp_path))
    assert (job.status, job.reason) == ("failed", "internal")
    assert "boom" not in job.detail


def test_checked_twice_is_checked_once(acme, tmp_path):
    job = validating(acme, tmp_path)
    checked(job)
    checked(job)
    assert Transition.objects.filter(job=job).count() == 1


def test_a_job_cancelled_during_the_check_stays_cancelled(acme, tmp_path, monkeypatch):
    job = validating(acme, tmp_path)

    def cancelled_meanwhile(row):
        Job.objects.filter(pk=job.pk).update(status=JobStatus.CANCELLED)

    monkeypatch.setattr(tasks, "data_check", cancelled_meanwhile)
    assert checked(job).status == JobStatus.CANCELLED
    assert not Transition.objects.exists()


@contextmanager
def being_checked(organization) -> Iterator[None]:
    """Another connection checks a job of the organization."""
    parameters = connection.get_connection_params()
    names = ("host", "port", "dbname", "user", "password")
    with psycopg.connect(**{name: parameters[name] for name in names if name in parameters}) as other:
        other.execute("SELECT pg_advisory_lock(%s, %s)", [tasks.LOCK_CLASS, organization.pk])
        yield
        other.execute("SELECT pg_advisory_unlock(%s, %s)", [tasks.LOCK_CLASS, organization.pk])


@pytest.fixture
def sent(monkeypatch) -> list[int]:
    """Primary keys of the jobs that tasks were sent for."""
    found: list[int] = []
    monkeypatch.setattr(tasks.validate_job, "delay", found.append)
    monkeypatch.setattr(
        tasks.validate_job, "apply_async", lambda args, expires: found.append(args[0]) if expires == 60 else 0
    )
    return found


def test_one_check_of_an_organization_at_a_time(acme, northwind, tmp_path, sent):
    job, theirs = validating(acme, tmp_path), validating(northwind, tmp_path)
    with being_checked(acme.organization):
        assert checked(job).status == JobStatus.VALIDATING
        assert checked(theirs).status == JobStatus.QUEUED
    assert (job.checks, sent) == (0, [])
    assert checked(job).status == JobStatus.QUEUED


def test_who_has_checked_sends_the_organizations_next(acme, northwind, tmp_path, sent):
    first, second, third = (validating(acme, tmp_path) for _ in range(3))
    validating(northwind, tmp_path)
    checked(first)
    # A copy of the first one's message must not break the chain, and neither does one for the third.
    checked(first)
    checked(third)
    assert sent == [second.pk] * 3
    checked(second)
    assert len(sent) == 3


def test_a_check_that_takes_too_long_says_so(acme, tmp_path, monkeypatch):
    def slow(job):
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(tasks, "data_check", slow)
    job = checked(validating(acme, tmp_path))
    assert (job.reason, job.error_param) == (Reason.INVALID_DATA, "training_file")
    assert job.detail == "checking the rows took more than 30 minutes; send fewer or shorter ones"


def test_a_check_that_kills_its_process_is_not_begun_for_ever(acme, tmp_path, monkeypatch):
    def killed(job):
        raise SystemExit

    monkeypatch.setattr(tasks, "data_check", killed)
    job = validating(acme, tmp_path)
    for _ in range(tasks.MAX_CHECKS):
        with pytest.raises(SystemExit):
            tasks.validate_job(job.pk)
    assert Job.objects.get(pk=job.pk).status == JobStatus.VALIDATING
    job = checked(job)
    assert (job.reason, job.detail) == (Reason.INTERNAL, "the check of the data broke off 5 times")


def test_the_prompts_of_a_file_are_counted_once(acme, tmp_path, monkeypatch):
    counted = []
    count = ChatTokenizer.encode_chat
    monkeypatch.setattr(
        ChatTokenizer, "encode_chat", lambda self, messages: counted.append(1) or count(self, messages)
    )
    first = validating(acme, tmp_path)
    again = {"model": first.base_model, "training_file": first.training_file, "status": JobStatus.VALIDATING}
    second = factories.job(acme.organization, tmp_path, rl={"group_size": 4}, **again)
    monkeypatch.setattr(tasks.validate_job, "delay", lambda pk: None)
    assert checked(first).status == checked(second).status == JobStatus.QUEUED
    assert len(counted) == len(ROWS)
    other_limit = factories.job(acme.organization, tmp_path, rl={"sampling": {"max_tokens": 120}}, **again)
    assert checked(other_limit).detail.startswith("row 1: the prompt has 9 tokens, the limit is 8")
    factories.write_rows(tmp_path / first.training_file.filename, [factories.row("x" * 65, answer="1")])
    changed = factories.job(acme.organization, tmp_path, **again)
    assert checked(changed).detail.startswith("row 1: the prompt has 65 tokens")


@pytest.mark.parametrize(
    ("age", "status", "is_sent"),
    [
        (timedelta(seconds=30), JobStatus.VALIDATING, False),
        (timedelta(seconds=90), JobStatus.VALIDATING, True),
        (timedelta(hours=9), JobStatus.VALIDATING, True),
        (timedelta(seconds=90), JobStatus.QUEUED, False),
    ],
)
def test_the_sweep_sends_what_the_broker_lost(age, status, is_sent, acme, tmp_path, sent):
    job = factories.job(acme.organization, tmp_path, status=status)
    Job.objects.filter(pk=job.pk).update(created_at=timezone.now() - age)
    tasks.validations_sweep()
    assert sent == ([job.pk] if is_sent else [])


def test_the_sweep_sends_one_job_of_each_organization_that_has_no_check(acme, northwind, tmp_path, sent):
    jobs = [
        factories.job(tenant.organization, tmp_path, status=JobStatus.VALIDATING)
        for tenant in (acme, acme, northwind, northwind)
    ]
    Job.objects.update(created_at=timezone.now() - timedelta(hours=2))
    with being_checked(acme.organization):
        tasks.validations_sweep()
        assert sent == [jobs[2].pk]
    tasks.validations_sweep()
    assert sent[1:] == [jobs[0].pk, jobs[2].pk]
    # Waiting behind others is no fault of the job's, however long it takes.
    assert not Job.objects.exclude(status=JobStatus.VALIDATING).exists()
