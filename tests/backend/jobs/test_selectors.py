"""Pages and curves: what they hold, in which order, and at how many queries."""

from __future__ import annotations

import pytest

from backend.api import shapes
from backend.common.errors import InvalidRequest
from backend.jobs import selectors
from backend.jobs.events import event_add
from backend.jobs.models import Event, Sample, StepMetrics
from backend.jobs.states import JobStatus
from tests import factories


@pytest.fixture
def job(acme, tmp_path):
    return factories.job(acme.organization, tmp_path, status=JobStatus.RUNNING)


@pytest.fixture
def trained(job):
    attempt = factories.attempt(job)
    StepMetrics.objects.bulk_create(
        StepMetrics(job=job, attempt=attempt, step=step, values={"reward": step / 100, "loss": 1.0})
        for step in range(100)
    )
    return job


def test_jobs_come_newest_first_and_continue_after_the_last_seen(acme, northwind, tmp_path):
    jobs = [factories.job(acme.organization, tmp_path) for _ in range(5)]
    factories.job(northwind.organization, tmp_path)
    first = selectors.jobs_page(acme.organization, limit=3)
    assert first.items == jobs[4:1:-1] and first.has_more
    factories.job(acme.organization, tmp_path)  # comes before the page, and shifts nothing
    rest = selectors.jobs_page(acme.organization, limit=3, after=first.items[-1].public_id)
    assert rest.items == jobs[1::-1] and not rest.has_more


@pytest.mark.parametrize("number", [1, 6])
def test_a_page_of_jobs_is_one_query_to_show(number, acme, tmp_path, django_assert_num_queries):
    for _ in range(number):
        factories.job(acme.organization, tmp_path)
    with django_assert_num_queries(1):
        assert len([shapes.job(job) for job in selectors.jobs_page(acme.organization).items]) == number


def test_another_tenants_job_is_no_cursor(acme, northwind, tmp_path):
    theirs = factories.job(northwind.organization, tmp_path)
    with pytest.raises(InvalidRequest):
        selectors.jobs_page(acme.organization, after=theirs.public_id)


@pytest.mark.parametrize("limit", [0, 101])
def test_a_page_has_a_size(limit, acme):
    with pytest.raises(InvalidRequest) as caught:
        selectors.jobs_page(acme.organization, limit=limit)
    assert caught.value.param == "limit"


def test_events_read_backwards_or_follow(job, django_assert_num_queries):
    for number in range(1, 6):
        event_add(job=job, type=Event.Type.MESSAGE, message=str(number))
    with django_assert_num_queries(3):
        newest = selectors.job_events_page(job, limit=2)
        older = selectors.job_events_page(job, limit=2, before=newest.items[-1].seq)
        follow = selectors.job_events_page(job, limit=3, after=2)
    assert [event.seq for event in newest.items] == [5, 4]
    assert [event.seq for event in older.items] == [3, 2] and older.has_more
    assert [event.seq for event in follow.items] == [3, 4, 5] and not follow.has_more


def test_metrics_are_thinned_evenly_and_keep_the_newest(trained, django_assert_num_queries):
    with django_assert_num_queries(3):
        rows = selectors.job_metrics(trained, max_points=10)
    assert [row.step for row in rows] == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 99]


def test_metrics_by_name_and_after_a_step(trained):
    rows = selectors.job_metrics(trained, names=["reward", "kl"], after_step=97)
    assert [(row.step, row.values) for row in rows] == [(98, {"reward": 0.98}), (99, {"reward": 0.99})]


def test_a_job_without_steps_has_no_metrics(job):
    assert selectors.job_metrics(job) == []


def test_the_share_of_waiting_is_over_all_steps_that_know_it(job):
    attempt = factories.attempt(job)
    assert selectors.job_waiting(job) is None
    steps = [{"seconds": 30.0, "waiting": 0.5}, {"seconds": 10.0, "waiting": 0.1}, {"seconds": 99.0}]
    StepMetrics.objects.bulk_create(
        StepMetrics(job=job, attempt=attempt, step=step, values=values) for step, values in enumerate(steps)
    )
    assert selectors.job_waiting(job) == pytest.approx(16 / 40)


def test_samples_of_the_newest_step_unless_one_is_asked_for(job):
    Sample.objects.bulk_create(
        Sample(
            job=job,
            step=step,
            group=0,
            index=index,
            row=0,
            prompt="p",
            completion="c",
            tokens=1,
            reward=1.0,
            advantage=0.0,
            finish="stop",
        )
        for step in (0, 3)
        for index in (1, 0)
    )
    assert [(row.step, row.index) for row in selectors.job_samples_page(job).items] == [(3, 0), (3, 1)]
    assert [row.step for row in selectors.job_samples_page(job, step=0).items] == [0, 0]
    assert selectors.job_samples_page(job, step=2).items == []


def test_checkpoints_newest_first_without_those_removed(job, tmp_path, django_assert_num_queries):
    attempt = factories.attempt(job)
    kept = [factories.checkpoint(attempt, tmp_path, step) for step in (5, 10, 15)]
    kept[0].deleted_at = kept[0].created_at
    kept[0].save()
    with django_assert_num_queries(1):
        rows = [shapes.checkpoint(row, job) for row in selectors.job_checkpoints(job)]
    assert [row["step_number"] for row in rows] == [15, 10]
