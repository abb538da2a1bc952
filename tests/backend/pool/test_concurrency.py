"""Reports, grants and readings that meet on one device: each waits its turn, and none for ever."""

from __future__ import annotations

from functools import partial

import pytest
from django.db import transaction

from backend.jobs.models import Job
from backend.metering.services import device_meter
from backend.pool.allotments import device_allot
from backend.pool.models import Allotment, Device
from backend.pool.parts import WHOLE
from tests.backend.metering.conftest import at, make_attempt, make_device
from tests.backend.metering.test_concurrency import LIMIT, others, wait_for_waiters
from tests.backend.pool.conftest import had, over, start

__all__ = ["others"]

pytestmark = pytest.mark.django_db(transaction=True)


def test_two_grants_at_once_divide_the_device(others, tmp_path):
    device, tenants = make_device(), [make_attempt(name, tmp_path) for name in ("ada", "bob")]
    with transaction.atomic():
        Device.objects.select_for_update().get(pk=device.pk)
        grants = [others(partial(start, attempt, device, "n", 1, share=0.75)) for attempt in tenants]
        wait_for_waiters(2)
    assert [had(grant.result(timeout=LIMIT))[0][:2] for grant in grants] == [(1, None)] * 2
    assert sum(Allotment.objects.values_list("part_ppm", flat=True)) == WHOLE


def test_a_report_waits_for_its_job_before_it_keeps_the_device_from_others(others, tmp_path):
    device, ada, bob = make_device(), make_attempt("ada", tmp_path), make_attempt("bob", tmp_path)
    start(ada, device, "a", 1, slot="rollout")
    theirs = start(bob, device, "b", 1, slot="rollout")
    with transaction.atomic():
        Job.objects.select_for_update().get(pk=ada.job_id)
        report = others(lambda: over(ada, "a", 1, 3))
        wait_for_waiters(1)
        others(lambda: device_allot(device_id=device.pk, terms={}, now=at(4))).result(timeout=LIMIT)
        others(lambda: device_meter(device_id=device.pk, until=at(4))).result(timeout=LIMIT)
    assert report.result(timeout=LIMIT).ended_at == at(3)
    # The others locked the device at 4, and nothing changes before that any more.
    assert had(theirs) == [(1, 4, 500), (4, None, 1000)]


def test_a_report_that_came_twice_at_once_is_written_once(others, tmp_path):
    device, ada = make_device(), make_attempt("ada", tmp_path)
    start(ada, device, "a", 1)
    with transaction.atomic():
        Device.objects.select_for_update().get(pk=device.pk)
        reports = [others(lambda: over(ada, "a", 1, 3)) for _ in range(2)]
        wait_for_waiters(2)
    assert sorted(report.result(timeout=LIMIT) is None for report in reports) == [False, True]
