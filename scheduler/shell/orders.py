"""What remains to be done in the world once a decision is committed.

Orders are made from rows, so that a daemon that starts anew makes the same ones again; each is idempotent.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from django.conf import settings

from backend.jobs.models import Attempt
from backend.pool import selectors
from backend.pool.models import Device, SubStage
from backend.pool.states import SubStageStatus
from workers.protocol import DeviceRef, Grant, Launch, Stop
from workers.spec import JobSpec


@dataclass(frozen=True)
class LaunchOrder:
    launch: Launch


@dataclass(frozen=True)
class GrantOrder:
    attempt_id: int
    grant: Grant


@dataclass(frozen=True)
class StopOrder:
    attempt_id: int
    stop: Stop


@dataclass(frozen=True)
class EvictOrder:
    device: str
    weights_key: str


Order = LaunchOrder | GrantOrder | StopOrder | EvictOrder


def launch_order(attempt: Attempt) -> LaunchOrder:
    """Raises ``ValueError`` when the job's stored settings are not those of this release."""
    job = attempt.job
    data = job.training_file or job.dataset
    folder = Path(settings.CHECKPOINTS_DIR) / job.organization.public_id / job.public_id
    launch = Launch(
        attempt_id=attempt.pk,
        attempt=attempt.number,
        job_id=job.public_id,
        run_key=run_key(attempt),
        weights_key=job.weights_key,
        spec=JobSpec.model_validate(job.spec),
        model_path=job.base_model.path,
        dataset_path=data.path,
        checkpoint_dir=str(folder),
        resume_from=attempt.resume_from.path if attempt.resume_from else None,
        start_step=attempt.start_step,
    )
    return LaunchOrder(launch)


def run_key(attempt: Attempt) -> str:
    """The attempt's name inside residents that it shares with other runs."""
    return f"{attempt.job.public_id}.{attempt.number}"


def grant_order(substage: SubStage) -> GrantOrder:
    grant = Grant(
        action_id=substage.action_id,
        node=substage.node,
        device=device_ref(substage.device) if substage.device else None,
        share=substage.share,
    )
    return GrantOrder(substage.attempt_id, grant)


def open_grants(attempt_id: int | None = None) -> list[GrantOrder]:
    """The grants that have not been answered by a report: of one attempt, or of all."""
    rows = selectors.open_substages().filter(status=SubStageStatus.GRANTED)
    if attempt_id is not None:
        rows = rows.filter(attempt_id=attempt_id)
    return [grant_order(row) for row in rows]


def stop_order(attempt: Attempt) -> StopOrder:
    return StopOrder(attempt.pk, Stop(action_id=f"stop:{attempt.pk}", reason="the job was cancelled"))


def device_ref(device: Device) -> DeviceRef:
    return DeviceRef(
        name=device.name,
        kind=device.kind,
        index=device.index,
        ray_node_id=device.node.ray_node_id,
        threads=device.threads,
        memory_bytes=device.memory_bytes,
        saturation_batch=device.saturation_batch,
    )
