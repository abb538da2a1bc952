"""Which jobs become pipelines, where, and what the others are told."""

import pytest

from scheduler.core.state import DeviceState, Policy, RefusalCode, Snapshot, Tenant
from tests.scheduler.core.build import (
    act,
    admitted,
    decide,
    device,
    evicted,
    job,
    pipeline,
    refused,
    resident,
)

ONE = (Tenant(1),)
TWO = (Tenant(1), Tenant(2))


def test_jobs_spread_over_empty_devices_and_share_weights_when_they_must_share_a_device():
    snapshot = Snapshot(
        now=0,
        devices=(device("d1"), device("d2")),
        tenants=ONE,
        queue=tuple(job(f"j{i}", submitted=i, run=2) for i in range(7)),
    )
    decided = decide(snapshot)
    # 4 GB of weights once and 2 GB each: three fit into 10 GB.
    assert admitted(decided) == {"j0": "d1", "j1": "d2", "j2": "d1", "j3": "d2", "j4": "d1", "j5": "d2"}
    assert refused(decided, "j6").code is RefusalCode.MEMORY


def test_a_gang_gets_different_devices():
    snapshot = Snapshot(
        now=0, devices=(device("d1"), device("d2"), device("d3")), tenants=ONE, queue=(job("j", devices=3),)
    )
    assert admitted(decide(snapshot)) == {"j": "d1 d2 d3"}


def test_a_device_that_knows_the_weights_comes_before_one_that_does_not():
    snapshot = Snapshot(
        now=0,
        devices=(device("d1"), device("d2")),
        tenants=ONE,
        queue=(job("j"),),
        residents=(resident("d2", "base", 4, last_used=1),),
    )
    decided = decide(snapshot)
    assert admitted(decided) == {"j": "d2"}
    assert evicted(decided) == []


def test_large_devices_are_left_to_large_jobs():
    snapshot = Snapshot(
        now=0,
        devices=(device("d1", 80), device("d2", 8)),
        tenants=ONE,
        queue=(job("small", submitted=1), job("large", submitted=2, key="own", weights=70)),
    )
    assert admitted(decide(snapshot)) == {"small": "d2", "large": "d1"}


def test_tenants_take_turns_in_being_admitted_by_what_they_run_per_weight():
    snapshot = Snapshot(
        now=0,
        devices=(device("d1", 9),),  # room for five
        tenants=(Tenant(1, weight=2.0), Tenant(2)),
        queue=(
            *(job(f"a{i}", tenant=1, submitted=i) for i in range(9)),
            *(job(f"b{i}", tenant=2, submitted=100 + i) for i in range(9)),
        ),
    )
    decided = decide(snapshot)
    # Running per weight: a0 (0), b0 (0), a1 (0.5), a2 (1, tie by tenant), b1 (1).
    assert list(admitted(decided)) == ["a0", "b0", "a1", "a2", "b1"]
    # In line: a3 (1.5), a4 (2), b2 (2), a5 (2.5), ...
    assert [refused(decided, name).ahead for name in ("a3", "a4", "b2", "a5")] == [0, 1, 2, 3]
    assert refused(decided, "a3").text == "waiting for memory: next in line"
    assert refused(decided, "a4").text == "waiting for memory: 1 job ahead"
    assert refused(decided, "a5").text == "waiting for memory: 3 jobs ahead"


def test_equal_tenants_are_admitted_by_service_received():
    snapshot = Snapshot(
        now=0,
        devices=(device("d1", 5),),
        tenants=(Tenant(1, service=50.0), Tenant(2, service=20.0)),
        queue=(job("a", tenant=1), job("b", tenant=2, submitted=9)),
    )
    assert admitted(decide(snapshot)) == {"b": "d1"}


def test_inside_a_tenant_priority_then_age_then_id():
    snapshot = Snapshot(
        now=0,
        devices=(device("d1", 8),),  # room for four
        tenants=ONE,
        queue=(
            job("late", submitted=2),
            job("y", submitted=1),
            job("x", submitted=1),
            job("urgent", submitted=3, priority=5),
        ),
    )
    assert list(admitted(decide(snapshot))) == ["urgent", "x", "y", "late"]


def test_a_thousand_queued_jobs_do_not_keep_out_the_one_of_another_tenant():
    snapshot = Snapshot(
        now=0,
        devices=(device("d1", 6),),  # room for two
        tenants=TWO,
        queue=(*(job(f"a{i:04}", tenant=1) for i in range(1000)), job("b", tenant=2, submitted=1e9)),
    )
    decided = decide(snapshot)
    assert admitted(decided) == {"a0000": "d1", "b": "d1"}
    assert refused(decided, "a0999").text == "waiting for memory: 998 jobs ahead"


def test_idle_weights_are_evicted_least_recently_used_first_and_only_as_needed():
    snapshot = Snapshot(
        now=100,
        devices=(device("d1", 11.5),),
        tenants=ONE,
        queue=(job("j", key="own", weights=5, run=1),),
        pipelines=(pipeline(1, "d1", weights=2, run=0.5),),
        residents=(
            resident("d1", "base", 2, last_used=1),  # oldest, but in use
            resident("d1", "old", 3, last_used=10),
            resident("d1", "new", 3, last_used=20),
        ),
    )
    decided = decide(snapshot)
    # 2.5 used + 6 idle + 6 asked = 14.5 of 11.5: taking the 3 of "old" is exactly enough.
    assert evicted(decided) == ["old@d1"]
    assert admitted(decided) == {"j": "d1"}


def test_the_first_job_that_waits_for_memory_is_not_overtaken_for_ever():
    """A large job waits for both devices; small ones would fit, but the kept device must empty."""
    snapshot = Snapshot(
        now=0,
        devices=(device("d1"), device("d2")),
        tenants=ONE,
        queue=(
            job("large", submitted=1, key="own", weights=9),
            *(job(f"s{i}", submitted=2 + i) for i in range(6)),
        ),
        pipelines=(pipeline(1, "d1"), pipeline(2, "d2"), pipeline(3, "d2")),
    )
    decided = decide(snapshot)
    # d1 lacks less (5 GB against 6) and is kept; d2 has room for four more.
    assert admitted(decided) == {"s0": "d2", "s1": "d2", "s2": "d2", "s3": "d2"}
    assert refused(decided, "large").text == "waiting for memory: next in line"
    assert refused(decided, "s4").text == "waiting for memory: 1 job ahead"


def test_the_bound_on_pipelines_per_device_is_a_bound_on_admission():
    snapshot = Snapshot(
        now=0, devices=(device("d1", 100),), tenants=ONE, queue=tuple(job(f"j{i}") for i in range(5))
    )
    assert list(admitted(decide(snapshot, Policy(max_pipelines_per_device=3)))) == ["j0", "j1", "j2"]


def test_memory_for_a_pipeline_that_must_leave_its_device_is_set_aside_before_jobs():
    snapshot = Snapshot(
        now=0,
        devices=(device("d1", state=DeviceState.DRAINING), device("d2", 6)),
        tenants=ONE,
        queue=(job("j", key="own", weights=4),),
        pipelines=(pipeline(1, "d1"),),
    )
    assert refused(decide(snapshot), "j").code is RefusalCode.MEMORY


POOL = (device("d1", 8), device("d2", 8), device("d3", 8, state=DeviceState.DRAINING))


@pytest.mark.parametrize(
    ("devices", "wanted", "code", "text"),
    [
        (POOL, job("j", devices=8), "never_fits_devices", "needs 8 devices, the pool has 3"),
        (POOL, job("j", weights=29), "never_fits_memory", "needs 30 GB, the largest device has 8 GB"),
        (POOL, job("j", weights=7.04), "never_fits_memory", "needs 8.04 GB, the largest device has 8.00 GB"),
        (
            (device("d9", 40), *POOL),
            job("j", devices=2, weights=29),
            "never_fits_memory",
            "needs 2 devices with 30 GB, the pool has 1",
        ),
        ((), job("j"), "no_devices", "no device is ready"),
        ((device("d1", state=DeviceState.LOST),), job("j"), "no_devices", "no device is ready"),
        ((device("d1", state=DeviceState.DRAINING),), job("j"), "no_devices", "no device is ready"),
        # A drain can be taken back, so three is not "never".
        (POOL, job("j", devices=3), "no_devices", "needs 3 devices, only 2 that can hold it are ready"),
        (
            (device("d1", 8), device("d2", 8, state=DeviceState.LOST)),
            job("j", devices=2),
            "no_devices",
            "needs 2 devices, only 1 that can hold it is ready",
        ),
    ],
)
def test_refusals_tell_the_true_reason(devices, wanted, code, text):
    decided = decide(Snapshot(now=0, devices=devices, tenants=ONE, queue=(wanted,)))
    refusal = refused(decided, "j")
    assert (refusal.code, refusal.text, refusal.ahead) == (code, text, 0)
    assert decided.actions == ()


def test_quota_is_a_ceiling_and_says_what_is_in_use():
    snapshot = Snapshot(
        now=0,
        devices=tuple(device(f"d{i}") for i in range(6)),
        tenants=(Tenant(1, max_devices=2), Tenant(2, max_devices=3), Tenant(3)),
        queue=(
            job("a1", tenant=1, submitted=1),
            job("a2", tenant=1, submitted=2),
            job("a3", tenant=1, submitted=3),
            job("a4", tenant=1, submitted=4),
            job("b1", tenant=2, submitted=1, devices=4),
            job("b2", tenant=2, submitted=2, devices=2),
            job("b3", tenant=2, submitted=3, devices=2),
            job("b4", tenant=2, submitted=4, devices=1),
            job("c", tenant=3),
        ),
    )
    decided = decide(snapshot)
    assert set(admitted(decided)) == {"a1", "a2", "b2", "c"}
    texts = {name: refused(decided, name).text for name in ("a3", "a4", "b1", "b3", "b4")}
    assert texts == {
        "a3": "your organization's limit of 2 devices is in use",
        "a4": "your organization's limit of 2 devices is taken: 1 of its jobs ahead",
        "b1": "needs 4 devices, your organization's limit is 3",
        "b3": "needs 2 devices, your organization's limit of 3 leaves 1",
        # It would fit into the limit, but b3 was there before it.
        "b4": "your organization's limit of 3 devices is taken: 1 of its jobs ahead",
    }
    assert {r.code for r in decided.refusals} == {RefusalCode.QUOTA}


def test_a_job_that_waits_for_memory_keeps_its_claim_on_the_quota():
    snapshot = Snapshot(
        now=0,
        devices=(device("d1"), device("d2")),
        tenants=(Tenant(1, max_devices=1), Tenant(2)),
        queue=(job("large", submitted=1, weights=9, key="own"), job("small", submitted=2)),
        pipelines=(pipeline(1, "d1", tenant=2), pipeline(2, "d2", tenant=2)),
    )
    decided = decide(snapshot)
    assert admitted(decided) == {}
    assert refused(decided, "large").code is RefusalCode.MEMORY
    assert refused(decided, "small").code is RefusalCode.QUOTA
    assert refused(decided, "small").ahead == 1


def test_admitted_jobs_leave_the_queue_and_take_the_next_pipeline_id():
    snapshot = Snapshot(
        now=0, devices=(device("d1"),), tenants=ONE, queue=(job("j"),), pipelines=(pipeline(7, "d1"),)
    )
    after = act(snapshot, decide(snapshot))
    assert after.queue == ()
    assert [(p.id, p.job, p.home, p.holds) for p in after.pipelines[1:]] == [(8, "j", ("d1",), ())]
