"""A pool that was measured, jobs that share it, and what must hold of it afterwards."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime

from asgiref.sync import sync_to_async
from django.conf import settings

from backend.jobs.models import Job
from backend.metering.selectors import accounting
from backend.metering.services import pool_meter
from backend.pool.models import Allotment, Device, DeviceCalibration, SubStage
from backend.pool.services import DeviceSeen
from scheduler.core.interference import Character
from scheduler.shell.inventory import devices_of
from tests import factories
from tests.scheduler.shell.fake import SATURATION, FakeCluster, FakePipeline
from workers.launch import NodeSeen
from workers.protocol import Calibration, Merge, Rates, Yield

in_database = sync_to_async

#: Compute-bound work slows down by 1/share; a small batch is as fast on a quarter of a device.
BY_SHARE = (4.0, 2.0, 4 / 3, 1.0)
ALONE = {
    one.value: BY_SHARE if one.value in ("prefill", "logprob", "update") else (1.0, 1.0, 1.0, 1.0)
    for one in Character
}
#: A first step is expected to take some seconds: longer than the fake ones that are looked at.
RATES = Rates(
    prefill_s=1e-3, decode_floor_s=0.1, decode_row_s=1e-4, logprob_s=1e-3, update_s=4e-3, sync_s=0.1
)


def calibration() -> Calibration:
    return Calibration(
        shares=(0.25, 0.5, 0.75, 1.0),
        alone=ALONE,
        beside={"sync|sync": 2.0},
        saturation_batch=SATURATION,
        rates=RATES,
        parameters=20_000,
        source="round numbers for tests",
    )


def one_device() -> DeviceSeen:
    """As ``FakeCluster`` has them."""
    threads = settings.CPU_DEVICE_THREADS
    node = NodeSeen("local", "f" * 56, "127.0.0.1", threads, 0, "", 8 << 30)
    (seen,) = devices_of(node, threads_per_device=threads, gpu_memory_bytes=0)
    return seen


def calibrate() -> None:
    """What ``manage.py calibrate_pool`` would have left for the devices of ``FakeCluster``."""
    seen = one_device()
    DeviceCalibration.objects.create(
        device_type=seen.type,
        threads=seen.threads,
        base_model="measured",
        values=calibration().model_dump(mode="json"),
        measured_at=datetime.now(UTC),
    )


def jobs_over_one_base(organizations: Iterable, folder, **rl) -> list[Job]:
    model = factories.base_model(folder / "model")
    return [factories.job(of, folder, model=model, rl={"steps": 3, **rl}) for of in organizations]


def pipeline_of(cluster: FakeCluster, job: Job) -> FakePipeline:
    return next(one for one in reversed(cluster.ran) if one.launch.job_id == job.public_id)


async def until(what, *args) -> None:
    """Wait until a question to the database is answered by yes."""
    while not await in_database(what)(*args):
        await asyncio.sleep(0)


# ---------------------------------------------------------------- what must hold


def require_never_overbooked() -> None:
    """At no instant did anybody have a part of a device that somebody else had."""
    for device in Device.objects.all():
        rows = list(Allotment.objects.filter(device=device).select_related("substage"))
        changes = sorted(
            [(row.end, 0, row) for row in rows if row.end is not None]
            + [(row.start, 1, row) for row in rows],
            key=lambda change: (change[0], change[1], change[2].pk),
        )
        there: dict[int, Allotment] = {}
        for at, begins, row in changes:
            if begins:
                there[row.pk] = row
            else:
                there.pop(row.pk, None)
            if begins and row.end is not None and row.end <= row.start:
                del there[row.pk]
            assert sum(one.part_ppm for one in there.values()) <= 1_000_000, (device, at)
            slots: dict[str, float] = defaultdict(float)
            for one in there.values():
                slots[one.substage.slot] = max(slots[one.substage.slot], one.share)
            assert sum(slots.values()) <= 1 + 1e-6, _story(rows, at)


def _story(rows: Iterable[Allotment], at: datetime) -> str:
    """What each had of the device just before and after the instant, in milliseconds from there."""
    lines = []
    for row in rows:
        begins, ends = ((one - at).total_seconds() * 1e3 for one in (row.start, row.end or at))
        if begins < 50 and ends > -50:
            what = f"{row.substage.slot} {row.substage.attempt_id}/{row.substage.node} {row.substage.status}"
            lines.append(f"{begins:.3f} to {ends:.3f}: {row.share} {what} {row.reason}")
    return "\n".join(lines)


def require_settled() -> None:
    """Nothing is left open, and what tenants pay and what was idle is all that there was."""
    assert not SubStage.objects.filter(status__in=["ready", "granted", "leaving"]).exists()
    assert not Allotment.objects.filter(end__isnull=True).exists()
    require_never_overbooked()
    pool_meter(datetime.now(UTC))
    assert accounting().difference_micro_usd == 0
    for job in Job.objects.all():
        assert sum(job.usage.values_list("micro_usd", flat=True)) == job.cost_micro_usd


def require_each_order_once(cluster: FakeCluster) -> None:
    """No order was made twice under different names, nor two orders under one."""
    for pipeline in cluster.ran:
        by_id = defaultdict(set)
        for order in pipeline.orders:
            by_id[order.action_id].add(order.model_dump_json())
        assert all(len(bodies) == 1 for bodies in by_id.values())
        granted = Counter(grant.node for grant in {g.action_id: g for g in pipeline.grants}.values())
        assert set(granted.values()) <= {1}
        left = [o for o in pipeline.orders if isinstance(o, Yield | Merge)]
        assert len({o.action_id for o in left}) == len({o.model_dump_json() for o in left})
