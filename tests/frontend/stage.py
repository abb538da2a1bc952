"""Plays a running job through the services the scheduler calls, at times of its own: no Ray, no waiting.

A step runs its sub-stages one after the other on the job's devices, so that pages have a timeline, samples, a
cost and curves that rise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timedelta

from django.db import transaction
from django.utils import timezone

from backend.jobs.attempts import attempt_fence, attempt_open, checkpoint_record, step_record
from backend.jobs.models import Attempt, Job
from backend.metering.services import pool_meter
from backend.pool import services as pool
from backend.pool import substages
from backend.pool.models import Device
from workers.protocol import CheckpointSaved, Finished, Offer, SampleRecord, StepDone, SubStageKind

#: Seconds of each sub-stage, and tokens it works on.
STEP = (
    (SubStageKind.PREFILL, 0.6, 512),
    (SubStageKind.DECODE, 4.2, 900),
    (SubStageKind.TAIL, 2.1, 220),
    (SubStageKind.LOGPROB, 1.1, 1400),
    (SubStageKind.UPDATE, 3.6, 1400),
    (SubStageKind.SYNC, 0.3, 0),
)
STEP_SECONDS = sum(seconds for _, seconds, _ in STEP)
GROUP = 4


def devices(count: int, since: datetime) -> list[Device]:
    """A node with CPU devices, in service since then."""
    seen = [pool.DeviceSeen(index, "cpu", "Xeon", 1, 8 << 30, 16) for index in range(count)]
    node = pool.node_seen(name="node-a", ray_node_id="0" * 32, address="10.0.0.1", devices=seen, now=since)
    return list(node.devices.order_by("index"))


def admit(job: Job, on: Sequence[Device]) -> Attempt:
    attempt = attempt_open(
        job_public_id=job.public_id,
        home=[device.name for device in on],
        reason=f"{on[0].name} is free",
        stimulus="test",
    )
    assert attempt is not None
    with transaction.atomic():
        fenced = attempt_fence(attempt_id=attempt.pk, seq=1)
    assert fenced is not None
    return fenced


def run_step(
    attempt: Attempt, step: int, on: Sequence[Device], start: datetime, *, share: float = 1.0
) -> datetime:
    """Hold the devices, run the sub-stages, record the step; returns when it ended."""
    attempt.refresh_from_db()
    at = start
    for kind, seconds, tokens in STEP:
        end = at + timedelta(seconds=seconds)
        for worker, device in enumerate(on):
            run_substage(attempt, step, worker, kind, device, at, end, tokens, share)
        at = end
    pool_meter(min(at, timezone.now()))
    attempt.job.refresh_from_db()
    step_record(attempt=attempt, done=step_done(step))
    return at


def run_substage(
    attempt: Attempt,
    step: int,
    worker: int,
    kind: SubStageKind,
    device: Device,
    start: datetime,
    end: datetime,
    tokens: int,
    share: float,
) -> None:
    node = f"s{step}.w{worker}.{kind}.0"
    offer = Offer(node=node, step=step, worker=worker, kind=kind, sequences=GROUP)
    substages.substage_offer(attempt=attempt, offer=offer, now=start)
    action = f"{attempt.pk}/{node}"
    granted = substages.substage_grant(
        attempt_id=attempt.pk,
        node=node,
        device=device,
        share=share,
        slot="",
        speed=1.0,
        reason="it was its turn",
        action_id=action,
        now=start,
    )
    assert granted
    finished = Finished(node=node, started_at=start.timestamp(), ended_at=end.timestamp(), tokens=tokens)
    assert substages.substage_finish(attempt=attempt, finished=finished, now=end) is not None


def step_done(step: int) -> StepDone:
    """Numbers that rise and fall as a run's do; the same for the same step."""
    wave = math.sin(1.7 * step)
    reward = 0.08 + 0.72 * (1 - math.exp(-step / 9)) + 0.04 * wave
    metrics = {
        "reward": reward,
        "reward_std": 0.24 * math.exp(-step / 30),
        "loss": -0.02 + 0.015 * wave,
        "kl": 0.0008 * step + 0.0004 * (1 + wave),
        "entropy": 2.4 * math.exp(-step / 40) + 0.05 * wave,
        "clip_fraction": 0.02,
        "grad_norm": 0.6 + 0.2 * wave,
        "learning_rate": 1e-3,
        "mismatch": 0.011 + 0.002 * wave,
        "mismatch_max": 0.09,
        "completion_length": 18 + 4 * math.exp(-step / 12) + wave,
        "truncated": 0.0,
        "zero_variance_groups": 0.0,
        "grade_errors": 0.0,
        "tokens": 1120.0 + 10 * step,
        "tokens_per_s": 152 + 8 * wave,
        "seconds": STEP_SECONDS,
    }
    return StepDone(step=step, metrics=metrics, samples=tuple(sample(step, index) for index in range(GROUP)))


TEXTS = (
    "The old lighthouse keeper watched the storm roll in from the western sea.",
    "Lighthouses guide ships home.",
    "A lighthouse stands alone on the rocks, its light turning through every long and windy night.",
    "The light",
)


def sample(step: int, index: int) -> SampleRecord:
    rewards = (1.0, 0.33, 0.42, 0.17)
    mean = sum(rewards) / GROUP
    return SampleRecord(
        group=0,
        index=index,
        row=step % 8,
        prompt=f"Write one sentence about a lighthouse with exactly {13 + step % 3} words.",
        completion=TEXTS[index],
        tokens=len(TEXTS[index]) // 4,
        reward=rewards[index],
        advantage=rewards[index] - mean,
        finish="length" if index == 3 else "stop",
    )


def save_checkpoint(attempt: Attempt, step: int, path: str, *, final: bool = False) -> None:
    attempt.job.refresh_from_db()
    saved = CheckpointSaved(step=step, path=path, bytes=1_301, final=final)
    checkpoint_record(attempt=attempt, saved=saved)
