from __future__ import annotations

import pytest

from backend.jobs.models import Attempt
from backend.jobs.states import AttemptStatus
from backend.pool.models import Device
from backend.pool.selectors import attempts_on_lost_devices, stale_placements
from backend.pool.services import placements_open
from backend.pool.states import DeviceState
from tests.backend.metering.conftest import at, make_device


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
