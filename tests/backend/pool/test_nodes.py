"""Machines come, go, restart and shrink: what is in service, and what that costs."""

from __future__ import annotations

import random
from dataclasses import astuple

import pytest
from django.core.management import CommandError, call_command

from backend.jobs.models import Attempt, Job
from backend.metering.models import UsageRecord
from backend.metering.selectors import Accounting, accounting
from backend.metering.services import pool_meter
from backend.pool.models import Device, Node
from backend.pool.services import (
    DeviceSeen,
    device_drain,
    device_return,
    node_gone,
    node_seen,
    placements_close,
    placements_open,
)
from backend.pool.states import SubStageStatus
from backend.tenants.models import Organization
from tests.backend.metering.conftest import at, finish, grant, ran

HOUR = 3600
#: Micro-dollars an hour: a price at which no second is a whole number of micro-dollars.
PRICE = 1_234_567_891


@pytest.fixture(autouse=True)
def prices(settings, db):
    settings.DEVICE_PRICE_MICRO_USD_PER_HOUR = {"cpu": PRICE, "gpu": PRICE}


def see(seconds: float, *, devices: int = 1, ray: str = "a") -> list[Device]:
    seen = [DeviceSeen(index, "cpu", "x", 1, 8 << 30, 16) for index in range(devices)]
    node = node_seen(name="n", ray_node_id=ray * 56, address="10.0.0.1", devices=seen, now=at(seconds))
    return list(node.devices.order_by("index"))


def intervals(device: Device) -> list[tuple[float, float | None]]:
    return [
        (
            (service.start - at(0)).total_seconds(),
            (service.end - at(0)).total_seconds() if service.end else None,
        )
        for service in device.service_intervals.order_by("start")
    ]


def books() -> Accounting:
    found = accounting()
    assert found.difference_micro_usd == 0
    return found


def price(seconds: float) -> int:
    return PRICE * round(seconds * 1e6) // (HOUR * 1_000_000)


def test_a_device_lost_for_ten_hours_costs_nothing_meanwhile(ada):
    (device,) = see(0)
    ran(ada, device, 1, 3)
    pool_meter(at(10))
    node_gone(node=Node.objects.get())
    pool_meter(at(60))
    see(10 * HOUR)
    pool_meter(at(10 * HOUR + 7))
    assert intervals(device) == [(0, 10), (10 * HOUR, None)]
    assert astuple(books()) == (price(10) + price(7), price(2), price(10) + price(7) - price(2), 0, 0)
    assert not UsageRecord.objects.filter(started_at__lt=at(10 * HOUR), ended_at__gt=at(10)).exists()


def test_a_machine_off_overnight_costs_nothing_meanwhile(ada):
    (device,) = see(0)
    pool_meter(at(30))
    see(10 * HOUR, ray="b")
    pool_meter(at(10 * HOUR + 1))
    assert intervals(device) == [(0, 30), (10 * HOUR, None)]
    assert books().capacity_micro_usd == price(30) + price(1)


def test_a_node_that_is_merely_seen_again_goes_on(ada):
    (device,) = see(0)
    see(100)
    pool_meter(at(200))
    assert intervals(device) == [(0, None)]
    assert books().capacity_micro_usd == price(200)


def test_a_device_drains_until_it_is_returned_whatever_its_node_says(db):
    see(0)
    assert device_drain("n/cpu0")
    assert not device_drain("n/cpu0")
    see(5)
    node_gone(node=Node.objects.get())
    (device,) = see(9, ray="b")
    assert device.draining
    assert device_return("n/cpu0")
    assert not device_return("n/cpu0")
    device.refresh_from_db()
    assert not device.draining


@pytest.mark.parametrize("change", [device_drain, device_return])
def test_a_device_that_is_not_there_cannot_be_drained(db, change):
    with pytest.raises(LookupError, match="no device 'n/cpu7'"):
        change("n/cpu7")


def test_the_command_drains_and_returns(capsys, db):
    see(0)
    for options in ([], [], ["--return"]):
        call_command("drain_device", "n/cpu0", *options)
    assert capsys.readouterr().out.splitlines() == [
        "n/cpu0 drains: no new work begins there",
        "n/cpu0 already drains: no new work begins there",
        "n/cpu0 takes work",
    ]
    with pytest.raises(CommandError, match="no device 'n/cpu7'"):
        call_command("drain_device", "n/cpu7")


def test_what_finished_before_the_loss_is_billed_though_it_is_metered_after_the_return(ada, bob):
    (device,) = see(0)
    running = grant(ada, device, 5, share=0.5)
    pool_meter(at(10))
    finished = ran(bob, device, 6, 20, share=0.5)
    see(1000, ray="b")
    running.status = SubStageStatus.LOST
    running.save()
    pool_meter(at(1010))
    finished.refresh_from_db()
    assert finished.metered
    assert intervals(device) == [(0, 20), (1000, None)]
    assert Job.objects.get(pk=bob.job_id).cost_micro_usd == price(7)
    assert books().capacity_micro_usd == price(20) + price(10)


def test_what_claims_to_have_run_while_the_device_was_away_is_billed_for_the_time_it_was_there(ada):
    (device,) = see(0)
    running = grant(ada, device, 5)
    pool_meter(at(10))
    see(1000, ray="b")
    finish(running, 5, 1004)
    pool_meter(at(1010))
    # In service until 5, when the meter was last read, and again from 1000 on.
    assert Job.objects.get(pk=ada.job_id).cost_micro_usd == price(4)
    assert books().capacity_micro_usd == price(5) + price(10)


def test_a_node_that_keeps_restarting_before_its_meters_are_read(ada):
    (device,) = see(0)
    pool_meter(at(10))
    for number, name in enumerate("bcd", start=1):
        see(100 * number, ray=name)
    pool_meter(at(305))
    assert intervals(device) == [(0, 10), (100, 100), (200, 200), (300, None)]
    assert books().capacity_micro_usd == price(10) + price(5)


@pytest.mark.parametrize("seed", range(3))
def test_the_books_add_up_over_any_period_of_a_history_with_gaps(ada, seed):
    rng = random.Random(seed)
    (device,) = see(0)
    clock = 0.0
    for number in range(6):
        for _ in range(3):
            start = clock + rng.random()
            clock = start + rng.random()
            ran(ada, device, start, clock, share=rng.choice([0.3, 0.7, 1.0]))
            pool_meter(at(clock + rng.random() / 10))
            clock += 0.1
        clock += 100 * rng.random()
        see(clock, ray="bcdefg"[number])
        books()
    pool_meter(at(clock + 1))
    whole = books()
    assert whole.capacity_micro_usd < price(6 * 7 + 1)
    for _ in range(10):
        start, end = sorted(rng.uniform(0, clock) for _ in range(2))
        assert accounting(at(start), at(end)).difference_micro_usd == 0


def test_a_turn_is_not_charged_for_the_night_its_device_was_off(ada):
    (device,) = see(0)
    assert placements_open(attempt=ada, devices=[device], reason="its turn", now=at(100))
    ran(ada, device, 101, 108)
    pool_meter(at(110))
    see(10 * HOUR, ray="b")
    placements_close(attempt=ada, now=at(10 * HOUR + 2))
    # Ten seconds before and two after, at weight 2.
    assert Organization.objects.get(pk=ada.job.organization_id).service == 6.0
    assert Attempt.objects.get(pk=ada.pk).step_seconds == 12.0


def states() -> list[str]:
    return list(Device.objects.order_by("index").values_list("state", flat=True))


def test_devices_that_a_live_node_no_longer_announces_are_lost_until_it_does(db):
    shrunk = see(0, devices=4)[2:]
    shrunk[0].residents.create(weights_key="m", bytes=1, last_used_at=at(0))
    pool_meter(at(5))
    see(10, devices=2)
    assert states() == ["ready", "ready", "lost", "lost"]
    assert not shrunk[0].residents.exists()
    pool_meter(at(20))
    see(100, devices=4)
    assert states() == ["ready"] * 4
    assert [intervals(device) for device in see(110, devices=4)] == [[(0, None)]] * 2 + [
        [(0, 5), (100, None)]
    ] * 2
    pool_meter(at(120))
    assert books().capacity_micro_usd == 2 * price(120) + 2 * (price(5) + price(20))


def test_devices_of_another_node_are_left_alone(db):
    see(0)
    node_seen(name="m", ray_node_id="m" * 56, address="10.0.0.2", devices=(), now=at(10))
    assert states() == ["ready"]
