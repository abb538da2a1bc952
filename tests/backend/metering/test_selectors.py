from __future__ import annotations

from dataclasses import astuple

from backend.metering.selectors import accounting, job_alone_micro_usd, job_cost, job_live_cost
from backend.metering.services import attempt_credit, device_meter, pool_meter
from backend.pool.models import Device
from backend.pool.substages import substage_leave
from tests.backend.metering.conftest import allot, at, finish, grant, make_device, ran


def amounts(micro_usd: int, device_seconds: float, credit: int = 0) -> dict[str, float | int]:
    return {"micro_usd": micro_usd, "device_seconds": device_seconds, "credit_micro_usd": credit}


def test_a_jobs_cost_by_kind_and_net_of_credits(device, ada, bob):
    ran(ada, device, 0, 2, step=0, kind="decode")
    ran(ada, device, 2, 3, step=0, kind="update")
    ran(ada, device, 3, 7, step=1, kind="decode", share=0.25)
    ran(bob, device, 7, 9)
    device_meter(device_id=device.pk, until=at(10))
    assert job_cost(ada.job) == {
        "decode": amounts(3000, 3.0),
        "update": amounts(1000, 1.0),
        "total": amounts(4000, 4.0),
    }
    attempt_credit(attempt=ada, since_step=1)
    assert job_cost(ada.job) == {
        "decode": amounts(2000, 2.0, 1000),
        "update": amounts(1000, 1.0),
        "total": amounts(3000, 3.0, 1000),
    }
    ada.job.refresh_from_db()
    assert ada.job.cost_micro_usd == 3000


def test_a_job_that_has_not_run_costs_nothing(ada):
    assert job_cost(ada.job) == {"total": amounts(0, 0)}


def test_live_cost_is_the_ledger_and_what_runs(device, ada, bob):
    ran(ada, device, 0, 2)
    device_meter(device_id=device.pk, until=at(2))
    ran(ada, device, 2, 6, share=0.5)
    grant(bob, device, 3, share=0.5)
    device_meter(device_id=device.pk, until=at(7))
    # Booked: 2 s whole and 1 s of the half. Finished and not booked: 3 s of the half. Bob: 4 s of a half.
    assert job_live_cost(ada.job, at(7)) == {
        "ledger_micro_usd": 2500,
        "estimate_micro_usd": 1500,
        "total_micro_usd": 4000,
    }
    assert job_live_cost(bob.job, at(7)) == {
        "ledger_micro_usd": 0,
        "estimate_micro_usd": 2000,
        "total_micro_usd": 2000,
    }
    attempt_credit(attempt=ada, since_step=0)
    assert job_live_cost(ada.job, at(7))["total_micro_usd"] == 0


def test_live_cost_is_by_what_was_allotted_and_ends_when_it_was_told_to_make_room(device, ada):
    running = grant(ada, device, 0)
    allot(running, 4, share=0.5, part=0.125)
    # 4 s whole, 4 s of an eighth.
    assert job_live_cost(ada.job, at(8))["total_micro_usd"] == 4500
    assert substage_leave(attempt_id=ada.pk, node=running.node, moves_to="", now=at(8))
    device_meter(device_id=device.pk, until=at(9))
    assert job_live_cost(ada.job, at(20))["total_micro_usd"] == 4500
    running.refresh_from_db()
    finish(running, 2, 9)
    device_meter(device_id=device.pk, until=at(20))
    assert job_live_cost(ada.job, at(20)) == {
        "ledger_micro_usd": 2500,
        "estimate_micro_usd": 0,
        "total_micro_usd": 2500,
    }


def test_live_cost_begins_with_the_rest_that_the_ledger_carries(ada):
    # 0.05 dollars an hour: 5/18 of a micro-dollar for 20 ms, so 15/18 booked as 0, and 20/18 with the fourth.
    cheap = make_device(price=50_000)
    for start in (0, 0.02, 0.04):
        ran(ada, cheap, start, start + 0.02)
    device_meter(device_id=cheap.pk, until=at(0.06))
    running = grant(ada, cheap, 0.06)
    live = {"ledger_micro_usd": 0, "estimate_micro_usd": 1, "total_micro_usd": 1}
    assert job_live_cost(ada.job, at(0.07))["total_micro_usd"] == 0
    assert job_live_cost(ada.job, at(0.08)) == live
    finish(running, 0.06, 0.08)
    # Its first half is booked, 17.5/18, and its second is not.
    device_meter(device_id=cheap.pk, until=at(0.07))
    assert job_live_cost(ada.job, at(0.08)) == live
    device_meter(device_id=cheap.pk, until=at(0.08))
    booked = {"ledger_micro_usd": 1, "estimate_micro_usd": 0, "total_micro_usd": 1}
    assert job_live_cost(ada.job, at(0.08)) == booked


def test_the_books_of_a_period_hold_whole_rows(device, ada, bob):
    make_device("n/cpu1")
    ran(ada, device, 1, 5, share=0.5)
    ran(bob, device, 4, 8, share=0.5)
    pool_meter(at(10))
    # On the first device 2..6 falls into the stretch 1..8; the second one was read once, from 0 to 10.
    assert astuple(accounting(at(2), at(6))) == (17_000, 4000, 13_000, 0, 0)
    assert astuple(accounting(at(8), at(9))) == (12_000, 0, 12_000, 0, 0)
    assert astuple(accounting(at(10), at(20))) == (0, 0, 0, 0, 0)
    pool_meter(at(20))
    assert astuple(accounting(at(10), at(20))) == (20_000, 0, 20_000, 0, 0)
    assert astuple(accounting(at(-10), at(99))) == (40_000, 4000, 36_000, 0, 0)


def test_a_hole_in_the_ledger_shows(device, ada):
    ran(ada, device, 1, 3)
    device_meter(device_id=device.pk, until=at(5))
    Device.objects.update(metered_until=at(6))
    assert accounting().difference_micro_usd == 1000


def test_what_the_work_would_cost_alone_is_by_the_speed_it_had_beside_others(device, ada, bob):
    mine = grant(ada, device, 0, share=0.5)
    mine.allotments.update(speed=0.8)
    finish(mine, 2, 12)
    finish(grant(bob, device, 0, share=0.5), 0, 12)
    # Ten seconds of computing at 0.8 are eight seconds alone, at 1,000 micro-dollars a second.
    assert job_alone_micro_usd(ada.job) == 8_000
    device_meter(device_id=device.pk, until=at(12))
    assert job_cost(ada.job)["total"]["micro_usd"] == 5_000
    assert job_alone_micro_usd(bob.job) == 12_000
