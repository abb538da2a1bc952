from __future__ import annotations

import math
import random
from dataclasses import astuple
from datetime import timedelta
from fractions import Fraction

import pytest
from django.db import IntegrityError, connection, transaction

from backend.jobs.models import Event, Job
from backend.jobs.states import AttemptStatus
from backend.metering.division import MICRO_USD
from backend.metering.models import AppendOnly, UsageRecord
from backend.metering.selectors import accounting
from backend.metering.services import attempt_credit, device_meter, pool_meter
from backend.metering.tasks import IDLE_EVERY
from backend.pool.models import Allotment, Device
from backend.pool.states import DeviceState, SubStageStatus
from backend.pool.substages import substage_leave
from tests import factories
from tests.backend.metering.conftest import allot, at, finish, grant, make_device, ran


def ledger() -> list[tuple[str, str, float, float, int]]:
    """Entry, organization, seconds from and to, micro-dollars; by time."""
    rows = UsageRecord.objects.select_related("organization").order_by("started_at", "entry", "pk")
    return [
        (
            row.entry,
            row.organization.slug if row.organization else "",
            (row.started_at - at(0)).total_seconds(),
            (row.ended_at - at(0)).total_seconds(),
            row.micro_usd,
        )
        for row in rows
    ]


def cost(attempt) -> int:
    return Job.objects.get(pk=attempt.job_id).cost_micro_usd


def costs_told(attempt) -> list[int]:
    events = Event.objects.filter(job=attempt.job_id, type=Event.Type.COST).order_by("seq")
    return [event.data["cost_micro_usd"] for event in events]


def test_two_tenants_take_turns(device, ada, bob, stranger):
    first, second = ran(ada, device, 1, 3), ran(bob, device, 4, 5)
    assert device_meter(device_id=device.pk, until=at(10)) == 5
    assert ledger() == [
        ("idle", "", 0, 1, 1000),
        ("usage", "ada", 1, 3, 2000),
        ("idle", "", 3, 4, 1000),
        ("usage", "bob", 4, 5, 1000),
        ("idle", "", 5, 10, 5000),
    ]
    device.refresh_from_db()
    assert device.metered_until == at(10)
    assert [cost(ada), cost(bob)] == [2000, 1000]
    assert [costs_told(ada), costs_told(bob)] == [[2000], [1000]]
    for substage in (first, second):
        substage.refresh_from_db()
        assert substage.metered
    assert not stranger.usage.exists()
    assert astuple(accounting()) == (10_000, 3000, 7000, 0, 0)


def test_reading_again_books_nothing(device, ada):
    ran(ada, device, 1, 3)
    device_meter(device_id=device.pk, until=at(10))
    before = ledger()
    assert device_meter(device_id=device.pk, until=at(10)) == 0
    assert device_meter(device_id=device.pk, until=at(6)) == 0
    assert ledger() == before
    assert costs_told(ada) == [2000]


def test_what_was_granted_and_has_not_reported_holds_the_reading_back(device, ada, bob):
    ran(ada, device, 1, 3)
    running = grant(bob, device, 3.5)
    device_meter(device_id=device.pk, until=at(10))
    device.refresh_from_db()
    assert device.metered_until == at(3.5)
    finish(running, 4, 9)
    device_meter(device_id=device.pk, until=at(12))
    assert ledger()[2:] == [
        ("idle", "", 3, 3.5, 500),
        ("idle", "", 3.5, 4, 500),
        ("usage", "bob", 4, 9, 5000),
        ("idle", "", 9, 12, 3000),
    ]
    assert accounting().difference_micro_usd == 0


def test_a_neighbour_that_still_runs_cuts_a_finished_one_and_its_bill_is_the_same(device, ada, bob):
    # Alone: 4 s x 0.6 x 1000 = 2400.
    done = ran(ada, device, 1, 5, share=0.6)
    running = grant(bob, device, 3, share=0.4)
    device_meter(device_id=device.pk, until=at(6))
    done.refresh_from_db()
    assert not done.metered
    assert cost(ada) == 1200
    finish(running, 3, 8)
    device_meter(device_id=device.pk, until=at(8))
    done.refresh_from_db()
    assert done.metered
    assert [cost(ada), cost(bob)] == [2400, 2000]
    assert astuple(accounting()) == (8000, 4400, 3600, 0, 0)


def test_each_allotment_is_billed_at_its_part_and_what_had_no_pause_is_one_row(device, ada, bob):
    running = grant(ada, device, 1)
    allot(running, 3, share=1.0, part=0.25)
    allot(running, 5, share=1.0, part=0.25)
    allot(running, 7, share=0.5)
    finish(running, 2, 9)
    device_meter(device_id=device.pk, until=at(10))
    # 1 s whole, 4 s of a quarter, 2 s of a half.
    assert ledger() == [
        ("idle", "", 0, 2, 2000),
        ("idle", "", 2, 9, 4000),
        ("usage", "ada", 2, 9, 3000),
        ("idle", "", 9, 10, 1000),
    ]
    assert UsageRecord.objects.get(entry="usage").device_microseconds == 3_000_000


def test_what_had_a_pause_has_two_rows_and_is_not_billed_for_it(device, ada):
    running = grant(ada, device, 1)
    running.allotments.update(end=at(2))
    Allotment.objects.create(substage=running, device=device, start=at(4), share=1.0, part_ppm=1_000_000)
    finish(running, 1, 5)
    device_meter(device_id=device.pk, until=at(5))
    assert [row[:4] for row in ledger()] == [
        ("idle", "", 0, 1),
        ("usage", "ada", 1, 2),
        ("idle", "", 2, 4),
        ("usage", "ada", 4, 5),
    ]
    assert accounting().difference_micro_usd == 0


def test_who_was_told_to_leave_holds_the_reading_back_until_it_reports(device, ada, bob):
    leaving = grant(ada, device, 1)
    assert substage_leave(attempt_id=ada.pk, node=leaving.node, moves_to="", now=at(3))
    ran(bob, device, 3, 5)
    device_meter(device_id=device.pk, until=at(6))
    assert [row[:4] for row in ledger()] == [("idle", "", 0, 1)]
    finish(leaving, 1, 4)
    device_meter(device_id=device.pk, until=at(6))
    # It computed until 4, and pays until it was told to leave.
    assert [cost(ada), cost(bob)] == [2000, 2000]
    assert accounting().difference_micro_usd == 0


def test_lost_work_with_shares_that_changed_is_given_back_whole(device, ada):
    running = grant(ada, device, 0, step=1)
    allot(running, 1.0005, share=0.3)
    finish(running, 0, 2)
    device_meter(device_id=device.pk, until=at(3))
    before = cost(ada)
    assert before == 1000 + 300
    assert attempt_credit(attempt=ada, since_step=1) == before
    assert [cost(ada), rest(ada)] == [0, 0]
    assert accounting().difference_micro_usd == 0


def test_a_lost_sub_stage_is_not_billed_and_holds_nothing_back(device, ada):
    lost = grant(ada, device, 2)
    lost.status = SubStageStatus.LOST
    lost.save()
    device_meter(device_id=device.pk, until=at(5))
    lost.refresh_from_db()
    assert ledger() == [("idle", "", 0, 5, 5000)]
    assert lost.metered
    assert costs_told(ada) == []


def test_a_sub_stage_too_short_to_cost_anything(device, ada):
    done = ran(ada, device, 2, 2)
    device_meter(device_id=device.pk, until=at(5))
    done.refresh_from_db()
    assert done.metered
    assert [row[0] for row in ledger()] == ["idle"]


@pytest.mark.parametrize(("end", "billed"), [(9, 0), (12, 2000)])
def test_what_comes_too_late_is_never_billed_twice(device, ada, caplog, end, billed):
    device_meter(device_id=device.pk, until=at(10))
    late = ran(ada, device, 8, end)
    device_meter(device_id=device.pk, until=at(15))
    late.refresh_from_db()
    assert late.metered
    assert cost(ada) == billed
    assert "the ledger is closed" in caplog.text
    assert astuple(accounting()) == (15_000, billed, 15_000 - billed, 0, 0)


def test_who_does_not_fit_on_the_device_is_not_billed(device, ada, bob, caplog):
    ran(ada, device, 1, 4)
    over = ran(bob, device, 2, 5, share=0.5)
    device_meter(device_id=device.pk, until=at(6))
    over.refresh_from_db()
    assert over.metered
    assert [cost(ada), cost(bob)] == [3000, 0]
    assert f"sub-stage {over.pk} did not fit" in caplog.text
    assert accounting().difference_micro_usd == 0


def test_lost_work_is_given_back_and_booked_to_the_operator(device, ada, bob):
    for step in range(3):
        ran(ada, device, 2 * step, 2 * step + 1, step=step)
    ran(bob, device, 7, 8)
    device_meter(device_id=device.pk, until=at(10))
    before = accounting()
    assert attempt_credit(attempt=ada, since_step=1) == 2000
    after = accounting()
    assert astuple(before) == (10_000, 4000, 6000, 0, 0)
    assert astuple(after) == (10_000, 2000, 6000, 2000, 0)
    assert [cost(ada), cost(bob)] == [1000, 1000]
    assert costs_told(ada) == [3000, 1000]
    assert attempt_credit(attempt=ada, since_step=1) == 0
    assert attempt_credit(attempt=ada, since_step=2) == 0
    assert attempt_credit(attempt=ada, since_step=0) == 1000
    assert cost(ada) == 0
    assert accounting().difference_micro_usd == 0


def test_lost_work_that_reaches_the_ledger_later_is_given_back_there(device, ada, bob):
    ran(ada, device, 0, 4, share=0.5, step=0)
    ran(ada, device, 4, 8, share=0.5, step=1)
    neighbour = grant(bob, device, 2, share=0.5)
    device_meter(device_id=device.pk, until=at(8))
    assert cost(ada) == 1000
    assert attempt_credit(attempt=ada, since_step=1) == 0
    finish(neighbour, 2, 9)
    device_meter(device_id=device.pk, until=at(10))
    assert [cost(ada), cost(bob)] == [2000, 3500]
    assert astuple(accounting()) == (10_000, 5500, 2500, 2000, 0)
    # The step is billed and given back at once: the tenant sees one cost.
    assert costs_told(ada) == [1000, 2000]


def test_the_ledger_refuses_changes(device, ada):
    ran(ada, device, 1, 3)
    device_meter(device_id=device.pk, until=at(10))
    record = UsageRecord.objects.get(entry="usage")
    record.micro_usd = 1
    with pytest.raises(AppendOnly):
        record.save()
    with pytest.raises(AppendOnly):
        record.delete()
    with pytest.raises(IntegrityError, match="append-only"), transaction.atomic():
        UsageRecord.objects.update(micro_usd=1)
    with pytest.raises(IntegrityError, match="append-only"), transaction.atomic():
        connection.cursor().execute("DELETE FROM metering_usagerecord")


def test_the_pool_books_idle_devices_too(device, ada):
    make_device("n/cpu1", price=7200)
    ran(ada, device, 1, 3)
    assert pool_meter(at(5)) == 4
    assert astuple(accounting()) == (5000 + 10, 2000, 3000 + 10, 0, 0)


def test_a_lost_device_costs_nothing_beyond_what_it_finished(device, ada):
    ran(ada, device, 1, 3)
    Device.objects.update(state=DeviceState.LOST)
    pool_meter(at(60))
    assert astuple(accounting()) == (3000, 2000, 1000, 0, 0)
    assert pool_meter(at(90)) == 0


def test_devices_that_are_gone_cost_no_queries(device, ada, django_assert_num_queries):
    for number in range(20):
        gone = make_device(f"n/gone{number}")
        grant(ada, gone, 1)
        finish(grant(ada, gone, 1), 1, 2)
    Device.objects.update(state=DeviceState.LOST)
    ada.substages.filter(status=SubStageStatus.GRANTED).update(status=SubStageStatus.LOST)
    # For each of them: idle, usage.
    assert pool_meter(at(60)) == 40
    with django_assert_num_queries(1):
        assert pool_meter(at(90)) == 0


def short(attempt, device, number: int, step: int = 0):
    """20 ms at 0.05 dollars an hour: 5/18 of a micro-dollar. The ``number``-th begins after so many 20 ms."""
    return ran(attempt, device, 0.02 * number, 0.02 * (number + 1), step=step)


def booked() -> list[int]:
    """Micro-dollars of the usage rows as they were booked."""
    usage = UsageRecord.objects.filter(entry="usage").order_by("pk")
    return list(usage.values_list("micro_usd", flat=True))


def rest(attempt) -> Fraction:
    return Fraction(Job.objects.get(pk=attempt.job_id).cost_fraction, MICRO_USD)


def test_many_sub_stages_too_short_to_cost_anything_cost_what_they_do_together(ada):
    cheap = make_device(price=50_000)
    for number in range(36):
        short(ada, cheap, number)
        device_meter(device_id=cheap.pk, until=at(0.02 * (number + 1)))
        if number == 2:
            assert [cost(ada), rest(ada)] == [0, Fraction(15, 18)]
    # 5/18, 10/18, 15/18, 20/18: the fourth makes it whole.
    assert booked()[:4] == [0, 0, 0, 1]
    assert [cost(ada), rest(ada)] == [10, 0]
    assert costs_told(ada) == list(range(1, 11))
    # 0.72 s of the device cost 10.
    assert astuple(accounting()) == (10, 10, 0, 0, 0)


def test_a_jobs_rest_goes_with_it_to_the_next_device_and_to_nobody_else(ada, bob):
    cheap, dear = make_device(price=50_000), make_device("n/cpu1", price=200_000)
    short(ada, cheap, 0)
    short(bob, cheap, 1)
    ran(ada, dear, 1, 1.013)
    pool_meter(at(2))
    # 0.277... and 0.722... are 1.
    assert [cost(ada), rest(ada)] == [1, 0]
    assert [cost(bob), rest(bob)] == [0, Fraction(5, 18)]
    assert accounting().difference_micro_usd == 0


def test_lost_work_is_given_back_with_its_rest(ada):
    cheap = make_device(price=50_000)
    for number, step in enumerate([0, 0, 0, 1, 1]):
        short(ada, cheap, number, step)
    device_meter(device_id=cheap.pk, until=at(0.1))
    assert booked() == [0, 0, 0, 1, 0]
    assert attempt_credit(attempt=ada, since_step=1) == 1
    # As before the lost step: 15/18. The first of the next attempt makes it whole again.
    assert [cost(ada), rest(ada)] == [0, Fraction(15, 18)]
    again = factories.attempt(ada.job, status=AttemptStatus.SUCCEEDED)
    short(again, cheap, 5, step=1)
    device_meter(device_id=cheap.pk, until=at(0.12))
    assert [cost(ada), rest(ada)] == [1, Fraction(2, 18)]
    assert accounting().difference_micro_usd == 0
    attempt_credit(attempt=again, since_step=0)
    attempt_credit(attempt=ada, since_step=0)
    assert [cost(ada), rest(ada)] == [0, 0]
    assert accounting().difference_micro_usd == 0


@pytest.mark.parametrize("seed", range(3))
def test_the_books_add_up_after_every_reading_of_a_random_history(ada, bob, seed):
    rng = random.Random(seed)
    dear, cheap = make_device(price=1_234_567_891), make_device("n/cpu1", price=50_003)
    exact = {ada.pk: Fraction(0), bob.pk: Fraction(0)}
    for device, attempt, tenths in ((dear, ada, 7), (dear, bob, 3), (cheap, ada, 4), (cheap, bob, 6)):
        clock = 0.0
        for _ in range(8):
            start = clock + rng.random()
            clock = start + rng.random()
            done = ran(attempt, device, start, clock, share=tenths / 10)
            microseconds = (done.ended_at - done.started_at) // timedelta(microseconds=1)
            hours = Fraction(microseconds, 3_600_000_000)
            exact[attempt.pk] += device.price_micro_usd_hour * Fraction(tenths, 10) * hours
    readings = [(rng.choice((dear, cheap)), rng.uniform(0, 16)) for _ in range(10)]
    for device, until in [*readings, (cheap, 20), (dear, 20)]:
        device_meter(device_id=device.pk, until=at(until))
        assert accounting().difference_micro_usd == 0
    for attempt in (ada, bob):
        assert cost(attempt) == math.floor(exact[attempt.pk])
        assert rest(attempt) == exact[attempt.pk] % 1


def test_an_idle_device_is_booked_in_rows_of_ten_minutes_or_up_to_its_next_work(device, ada):
    for half_minutes in range(1, 61):
        now = 30 * half_minutes
        if now == 1500:
            ran(ada, device, 1470, 1490)
        pool_meter(at(now), idle_every=IDLE_EVERY)
    assert [row[:4] for row in ledger()] == [
        ("idle", "", 0, 600),
        ("idle", "", 600, 1200),
        ("idle", "", 1200, 1470),
        ("usage", "ada", 1470, 1490),
        ("idle", "", 1490, 1500),
    ]
    # Whoever asks for the books reads all meters first.
    pool_meter(at(1800))
    assert astuple(accounting()) == (1_800_000, 20_000, 1_780_000, 0, 0)
