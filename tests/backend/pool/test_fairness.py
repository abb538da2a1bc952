"""Who gets the next turn: the tenant with the least virtual time, then the one with the lower id."""

from __future__ import annotations

import pytest

from backend.jobs.models import Attempt
from backend.jobs.states import AttemptStatus
from backend.metering.services import device_meter
from backend.pool.fairness import service_lift
from backend.pool.models import Device
from backend.pool.services import placements_close, placements_open
from backend.tenants.models import Organization
from tests.backend.metering.conftest import at, make_attempt, make_device, ran


def service(attempt: Attempt) -> float:
    return Organization.objects.get(pk=attempt.job.organization_id).service


def turn(attempt: Attempt, *devices: Device, start: float, end: float) -> None:
    assert placements_open(attempt=attempt, devices=devices, reason="its turn", now=at(start))
    placements_close(attempt=attempt, now=at(end))


def first_in_order(attempts: list[Attempt]) -> Attempt:
    return min(attempts, key=lambda attempt: (service(attempt), attempt.job.organization_id))


def test_a_turn_is_charged_by_holding_devices_over_weight(device, ada, bob):
    turn(ada, device, make_device("n/cpu1"), start=0, end=30)
    assert [service(ada), service(bob)] == [2 * 30 / 2.0, 0.0]
    placements_close(attempt=ada, now=at(60))
    assert service(ada) == 30.0
    turn(bob, device, start=60, end=75)
    assert [service(ada), service(bob)] == [30.0, 15.0]


def test_one_who_mostly_grades_holds_the_pool_no_longer_than_one_who_computes(device, bob, tmp_path):
    grader = make_attempt("grader", tmp_path)
    computes = {grader.pk: 1, bob.pk: 10}
    held = dict.fromkeys(computes, 0)
    for number in range(20):
        attempt = first_in_order([grader, bob])
        start = 10 * number
        ran(attempt, device, start, start + computes[attempt.pk], step=number)
        turn(attempt, device, start=start, end=start + 10)
        device_meter(device_id=device.pk, until=at(start + 10))
        held[attempt.pk] += 10
    assert held == {grader.pk: 100, bob.pk: 100}
    costs = Organization.objects.values_list("jobs__cost_micro_usd", flat=True)
    assert sorted(costs) == [10_000, 100_000]


def test_after_an_idle_pool_a_new_tenant_and_a_heavy_one_alternate(device, tmp_path):
    heavy, fresh = make_attempt("heavy", tmp_path), make_attempt("fresh", tmp_path)
    Attempt.objects.update(status=AttemptStatus.SUCCEEDED)
    Organization.objects.filter(pk=heavy.job.organization_id).update(service=1e5)
    for attempt in (fresh, heavy):
        service_lift(organization_id=attempt.job.organization_id)
        Attempt.objects.filter(pk=attempt.pk).update(status=AttemptStatus.RUNNING)
    turns = []
    for number in range(6):
        attempt = first_in_order([heavy, fresh])
        turn(attempt, device, start=10 * number, end=10 * number + 10)
        turns.append(attempt)
    assert turns == [heavy, fresh] * 3


@pytest.mark.parametrize(("before", "after"), [(5.0, 40.0), (70.0, 70.0)])
def test_a_newcomer_is_lifted_to_the_least_of_those_at_work_and_never_lowered(tmp_path, db, before, after):
    newcomer, slow, fast = (make_attempt(name, tmp_path) for name in ("newcomer", "slow", "fast"))
    Attempt.objects.filter(pk=newcomer.pk).update(status=AttemptStatus.SUCCEEDED)
    for attempt, received in ((newcomer, before), (slow, 40.0), (fast, 90.0)):
        Organization.objects.filter(pk=attempt.job.organization_id).update(service=received)
    service_lift(organization_id=newcomer.job.organization_id)
    assert service(newcomer) == after


def test_who_is_at_work_is_not_lifted(ada, bob):
    Organization.objects.filter(pk=bob.job.organization_id).update(service=9.0)
    service_lift(organization_id=ada.job.organization_id)
    assert service(ada) == 0.0
