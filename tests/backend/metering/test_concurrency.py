"""Two processes at one meter: nothing is booked twice, and nobody waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction

import pytest
from django.db import connection, transaction

from backend.jobs.models import Job
from backend.metering.division import MICRO_USD
from backend.metering.models import UsageRecord
from backend.metering.selectors import accounting
from backend.metering.services import attempt_credit, device_meter
from backend.pool.models import Device
from tests.backend.metering.conftest import at, make_attempt, make_device, ran

LIMIT = 20.0

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def others():
    """Runs functions at the same time, each on a connection of its own."""
    with ThreadPoolExecutor(2) as pool:
        yield lambda work: pool.submit(_on_own_connection, work)


def _on_own_connection(work: Callable[[], int]) -> int:
    try:
        return work()
    finally:
        connection.close()


def wait_for_waiters(count: int) -> None:
    """Until so many other sessions of this database wait for a lock."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_stat_clear_snapshot()")
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            if cursor.fetchone()[0] == count:
                return
        time.sleep(0.01)
    pytest.fail(f"not {count} sessions came to wait for the device")


def results(futures: list[Future[int]]) -> list[int]:
    return sorted(future.result(timeout=LIMIT) for future in futures)


def test_two_readings_at_once_book_once(others, tmp_path):
    device, ada = make_device(), make_attempt("ada", tmp_path)
    ran(ada, device, 1, 3)
    with transaction.atomic():
        Device.objects.select_for_update().get(pk=device.pk)
        readings = [others(lambda: device_meter(device_id=device.pk, until=at(5))) for _ in range(2)]
        wait_for_waiters(2)
    assert results(readings) == [0, 3]
    assert UsageRecord.objects.filter(entry="usage").count() == 1
    assert Job.objects.get().cost_micro_usd == 2000
    assert accounting().difference_micro_usd == 0


def test_a_reading_does_not_wait_for_a_job_that_somebody_holds(others, tmp_path):
    device, ada, bob = make_device(), make_attempt("ada", tmp_path), make_attempt("bob", tmp_path)
    ran(ada, device, 1, 3)
    ran(bob, device, 4, 5)
    ran(ada, device, 6, 7)
    with transaction.atomic():
        Job.objects.select_for_update().get(pk=bob.job_id)
        # Up to where bob's begins: idle, usage, idle.
        assert others(lambda: device_meter(device_id=device.pk, until=at(9))).result(timeout=LIMIT) == 3
    device.refresh_from_db()
    assert device.metered_until == at(4)
    device_meter(device_id=device.pk, until=at(9))
    costs = dict(Job.objects.values_list("organization__slug", "cost_micro_usd"))
    assert costs == {"ada": 3000, "bob": 1000}
    assert accounting().difference_micro_usd == 0


def test_two_devices_of_one_job_read_at_once_carry_its_rest_once(others, tmp_path):
    # 40 ms at 0.05 dollars an hour: 10/18 of a micro-dollar on each device.
    ada = make_attempt("ada", tmp_path)
    first, second = make_device(price=50_000), make_device("n/cpu1", price=50_000)
    for device in (first, second):
        ran(ada, device, 1, 1.04)
    with transaction.atomic():
        # Idle, a usage of 0, the whole micro-dollar that it left, idle.
        assert device_meter(device_id=first.pk, until=at(2)) == 4
        # The job's row is held: only the idle time before its sub-stage is booked.
        assert others(lambda: device_meter(device_id=second.pk, until=at(2))).result(timeout=LIMIT) == 1
    assert Job.objects.get().cost_micro_usd == 0
    device_meter(device_id=second.pk, until=at(2))
    job = Job.objects.get()
    assert [job.cost_micro_usd, Fraction(job.cost_fraction, MICRO_USD)] == [1, Fraction(2, 18)]
    assert accounting().difference_micro_usd == 0


def test_a_credit_and_a_reading_at_once_leave_no_lost_work_billed(others, tmp_path):
    device, ada = make_device(), make_attempt("ada", tmp_path)
    ran(ada, device, 1, 3)
    with transaction.atomic():
        Device.objects.select_for_update().get(pk=device.pk)
        both = [
            others(lambda: device_meter(device_id=device.pk, until=at(5))),
            others(lambda: attempt_credit(attempt=ada, since_step=0)),
        ]
        wait_for_waiters(2)
    results(both)
    # The credit holds the job's row: a reading that met it there has left the sub-stage to the next.
    device_meter(device_id=device.pk, until=at(5))
    assert Job.objects.get().cost_micro_usd == 0
    assert accounting().waste_micro_usd == 2000
    assert accounting().difference_micro_usd == 0
