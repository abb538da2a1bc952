"""Holds: all devices or none, for an attempt that may have them, on devices that are there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection, transaction

from backend.jobs.models import Attempt
from backend.jobs.states import AttemptStatus
from backend.pool.models import Device, Placement
from backend.pool.services import placements_open
from backend.pool.states import DeviceState
from tests.backend.metering.conftest import at, make_attempt, make_device
from tests.backend.metering.test_concurrency import LIMIT, wait_for_waiters


def hold(attempt: Attempt, *devices: Device) -> bool:
    return placements_open(attempt=attempt, devices=devices, reason="its turn", now=at(0))


def held() -> list[str]:
    return list(Placement.objects.order_by("device__name").values_list("device__name", flat=True))


@pytest.mark.parametrize("status", [AttemptStatus.STARTING, AttemptStatus.RUNNING])
def test_an_attempt_takes_its_devices_and_makes_them_its_home(device, ada, status):
    Attempt.objects.filter(pk=ada.pk).update(status=status)
    assert hold(ada, make_device("n/cpu1"), device)
    ada.refresh_from_db()
    assert ada.home == ["n/cpu1", "n/cpu0"]
    assert list(ada.placements.order_by("worker").values_list("device__name", flat=True)) == ada.home


@pytest.mark.parametrize(
    "status", sorted(set(AttemptStatus) - {AttemptStatus.STARTING, AttemptStatus.RUNNING})
)
def test_an_attempt_that_stops_or_is_over_gets_no_device(device, ada, status):
    before = ada.home
    Attempt.objects.filter(pk=ada.pk).update(status=status)
    assert not hold(ada, device)
    assert held() == []
    ada.refresh_from_db()
    assert ada.home == before


def test_nothing_is_held_when_one_device_is_not_ready(device, ada):
    lost = make_device("n/cpu1")
    Device.objects.filter(pk=lost.pk).update(state=DeviceState.LOST)
    assert not hold(ada, device, lost)
    assert held() == []


def test_nothing_is_held_when_one_device_is_taken(device, ada, bob):
    other = make_device("n/cpu1")
    assert hold(bob, other)
    assert not hold(ada, device, other)
    assert held() == ["n/cpu1"]


@pytest.mark.django_db(transaction=True)
def test_a_hold_waits_for_a_cancel_under_way_and_then_gives_way_to_it(tmp_path):
    ada, device = make_attempt("ada", tmp_path), make_device()
    with ThreadPoolExecutor(1) as other:
        with transaction.atomic():
            Attempt.objects.filter(pk=ada.pk).update(status=AttemptStatus.STOPPING)
            holding = other.submit(_on_own_connection, ada, device)
            wait_for_waiters(1)
        assert not holding.result(timeout=LIMIT)
    assert held() == []


def _on_own_connection(attempt: Attempt, device: Device) -> bool:
    try:
        return hold(attempt, device)
    finally:
        connection.close()
