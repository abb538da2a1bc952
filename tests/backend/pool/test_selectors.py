from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from backend.jobs.models import Attempt, Job
from backend.jobs.states import AttemptStatus, JobStatus
from backend.pool.allotments import Terms, device_allot
from backend.pool.models import Device, Placement
from backend.pool.selectors import (
    attempts_on_lost_devices,
    devices,
    job_timeline,
    pool_timeline,
    stale_placements,
)
from backend.pool.services import placements_open
from backend.pool.states import DeviceState
from scheduler.core.plan import plan
from scheduler.core.state import Policy, RefusalCode
from scheduler.shell.observe import observe
from tests import factories
from tests.backend.metering.conftest import at, finish, grant, make_device, ran
from tests.backend.pool.conftest import leaves, offer, over, start

DAY = timedelta(days=1)


def hold(attempt: Attempt, *devices: Device, seconds: float = 0) -> None:
    assert placements_open(attempt=attempt, devices=devices, reason="test", now=at(seconds))


@pytest.mark.parametrize(
    ("status", "stale"),
    [
        (AttemptStatus.RUNNING, False),
        (AttemptStatus.STOPPING, False),
        (AttemptStatus.FAILED, True),
        (AttemptStatus.LOST, True),
        (AttemptStatus.CANCELLED, True),
        (AttemptStatus.SUCCEEDED, True),
    ],
)
def test_a_hold_of_an_attempt_that_is_over_is_stale(device, ada, bob, status, stale):
    hold(ada, device)
    hold(bob, make_device("n/cpu1"))
    Attempt.objects.filter(pk=ada.pk).update(status=status)
    assert [p.attempt_id for p in stale_placements()] == ([ada.pk] if stale else [])


def test_attempts_on_lost_devices_are_those_that_live_and_hold_one(device, ada, bob):
    other, free = make_device("n/cpu1"), make_device("n/cpu2")
    hold(ada, device, free)
    hold(bob, other)
    assert list(attempts_on_lost_devices()) == []
    Device.objects.exclude(pk=other.pk).update(state=DeviceState.LOST)
    assert list(attempts_on_lost_devices()) == [ada]
    Attempt.objects.filter(pk=ada.pk).update(status=AttemptStatus.LOST)
    assert list(attempts_on_lost_devices()) == []


def test_attempts_that_run_something_on_a_lost_device_are_on_it_without_holding_it(device, ada, bob):
    other = make_device("n/cpu1")
    start(ada, device, "a", 0)
    start(bob, other, "b", 0)
    Device.objects.filter(pk=device.pk).update(state=DeviceState.LOST)
    assert list(attempts_on_lost_devices()) == [ada]
    leaves(ada, "a", 1)
    assert list(attempts_on_lost_devices()) == [ada]
    over(ada, "a", 0, 2)
    assert list(attempts_on_lost_devices()) == []


def lose(device: Device, since: datetime) -> None:
    Device.objects.filter(pk=device.pk).update(state=DeviceState.LOST, lost_at=since)


def test_devices_gone_for_longer_than_a_day_are_no_longer_of_the_pool(device, ada):
    names = ["n/cpu1", "n/cpu2", "n/cpu3", "n/cpu4"]
    lately, gone, held, running = (make_device(name) for name in names)
    now = timezone.now()
    lose(lately, now - DAY + timedelta(minutes=1))
    for other in (gone, held, running):
        lose(other, now - DAY - timedelta(minutes=1))
    Placement.objects.create(attempt=ada, device=held, worker=0, opened_at=now)
    granted = grant(ada, running, 0)
    assert [row.name for row in devices()] == ["n/cpu0", "n/cpu1", "n/cpu3", "n/cpu4"]
    Placement.objects.update(closed_at=now)
    finish(granted, 0, 1)
    assert [row.name for row in devices()] == ["n/cpu0", "n/cpu1"]


def test_a_job_that_needs_devices_which_are_gone_for_good_is_told_so(device, tmp_path):
    lost = make_device("n/cpu1")
    job = factories.job(factories.organization(), tmp_path, status=JobStatus.QUEUED)
    Job.objects.filter(pk=job.pk).update(devices=2, weights_bytes=1, run_bytes=1)

    def refusal() -> str:
        now = timezone.now()
        (refused,) = plan(observe(now).snapshot, Policy()).refusals
        return refused.code

    lose(lost, timezone.now() - DAY / 2)
    assert refusal() == RefusalCode.NO_DEVICES
    lose(lost, timezone.now() - 2 * DAY)
    assert refusal() == RefusalCode.NEVER_FITS_DEVICES


def test_a_timeline_shows_neighbours_and_reads_no_further_back_than_they_can_reach(device, ada, bob):
    first, hour = 10 * 3600, 3600
    ran(bob, device, 1, first + 5, share=0.1)
    neighbour = ran(bob, device, first - hour + 1, first + 5, share=0.4)
    mine = ran(ada, device, first, first + 10, share=0.5)
    ran(bob, device, first + 11, first + 12)
    with CaptureQueriesContext(connection) as captured:
        rows = job_timeline(ada.job)
    assert [(row["started_at"], row["mine"]) for row in rows] == [
        (neighbour.started_at, False),
        (mine.started_at, True),
    ]
    # Both ends of the index scan are bounded, so that it does not walk through the device's history.
    sql = captured.captured_queries[-2]["sql"]
    assert '"started_at" >= ' in sql
    assert '"started_at" <= ' in sql


def share(start: float, end: float, part: float) -> dict[str, object]:
    return {"from": at(start), "to": at(end), "share": part}


def test_a_timeline_shows_the_shares_over_time_and_what_was_merged(device, ada, bob):
    mine = start(ada, device, "a", 1, slot="rollout", rows=1)
    start(bob, device, "b", 3, slot="rollout", rows=3)
    device_allot(device_id=device.pk, terms={mine.pk: Terms(1.0, 0.5, "slower")}, now=at(4))
    leaves(ada, "a", 6, moves_to="elsewhere")
    over(bob, "b", 3, 10)
    over(ada, "a", 2, 6)
    own, other = job_timeline(ada.job)
    assert own["shares"] == [share(2, 3, 1.0), share(3, 6, 0.25)]
    assert own["share"] == (1 + 3 * 0.25) / 4
    assert (own["mine"], own["moves_to"]) == (True, "elsewhere")
    assert other["shares"] == [share(3, 6, 0.75), share(6, 10, 1.0)]
    told = {name for name, value in other.items() if value is not None}
    assert told == {"device", "kind", "started_at", "ended_at", "share", "shares", "mine"}


def test_what_needs_no_device_has_no_share(ada):
    offer(ada, "a", 1, kind="grade")
    over(ada, "a", 1, 3)
    (row,) = job_timeline(ada.job)
    assert (row["device"], row["share"], row["shares"]) == (None, None, [])


def test_operators_see_who_has_what_of_a_device_and_why(device, ada, bob, django_assert_num_queries):
    other = make_device("n/cpu1")
    first = start(ada, device, "a", 1, share=0.5, slot="train")
    start(bob, device, "b", 3, share=0.5)
    start(bob, other, "c", 3)
    device_allot(device_id=device.pk, terms={first.pk: Terms(0.25, 1.0, "b is late")}, now=at(4))
    leaves(ada, "a", 6, moves_to="elsewhere")
    over(ada, "a", 1, 7)
    with django_assert_num_queries(3):
        mine, theirs = pool_timeline([device], since=at(0), until=at(10))
    assert mine == {
        "device": "n/cpu0",
        "tenant": ada.job.organization_id,
        "organization": "ada",
        "job": ada.job.public_id,
        "name": ada.job.name,
        "kind": "tail",
        "step": 0,
        "worker": 0,
        "sequences": 4,
        "slot": "train",
        "start": at(1),
        "end": at(7),
        "reason": "it was its turn",
        "attempt": ada.pk,
        "node": "a",
        "moves_to": "elsewhere",
        "allotments": [
            {"start": at(1), "end": at(4), "share": 0.5, "part": 0.5, "reason": "it was its turn"},
            {"start": at(4), "end": at(6), "share": 0.25, "part": 0.25, "reason": "b is late"},
        ],
    }
    assert (theirs["organization"], theirs["start"], theirs["end"]) == ("bob", at(3), None)
    assert [row["end"] for row in theirs["allotments"]] == [None]


def test_operators_see_an_interval_and_no_more_rows_than_asked_for(device, ada):
    for number in range(5):
        ran(ada, device, 10 * number, 10 * number + 5)

    def starts(**asked: object) -> list[datetime]:
        return [row["start"] for row in pool_timeline([device], **asked)]

    assert starts(since=at(12), until=at(31)) == [at(10), at(20), at(30)]
    assert starts(since=at(0), until=at(99), limit=2) == [at(30), at(40)]
    assert starts(since=at(7200), until=at(9000)) == []
