"""What remains to be done in the world once a decision is committed.

Orders are made from rows, so that a daemon that starts anew makes the same ones again; each is idempotent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings

from backend.jobs.models import Attempt
from backend.jobs.selectors import job_corpora
from backend.jobs.states import AttemptStatus
from backend.pool.models import Allotment, Device, SubStage
from backend.pool.states import SubStageStatus
from backend.tenants.secrets import secrets_open
from workers import protocol
from workers.protocol import DeviceRef, Grant, Launch, Merge, Resize, Stop, Yield
from workers.spec import JobSpec


@dataclass(frozen=True)
class LaunchOrder:
    launch: Launch


@dataclass(frozen=True)
class PipelineOrder:
    attempt_id: int
    order: protocol.Order


@dataclass(frozen=True)
class StopOrder:
    attempt_id: int
    stop: Stop


@dataclass(frozen=True)
class EvictOrder:
    device: str
    weights_key: str


Order = LaunchOrder | PipelineOrder | StopOrder | EvictOrder


def launch_order(attempt: Attempt) -> LaunchOrder:
    """Raises ``ValueError`` when the job's stored settings are not those of this release."""
    job, spec = attempt.job, JobSpec.model_validate(attempt.job.spec)
    data = job.training_file or job.dataset
    folder = Path(settings.CHECKPOINTS_DIR) / job.organization.public_id / job.public_id
    launch = Launch(
        attempt_id=attempt.pk,
        attempt=attempt.number,
        job_id=job.public_id,
        run_key=run_key(attempt),
        weights_key=job.weights_key,
        spec=spec,
        model_path=job.base_model.path,
        dataset_path=data.path,
        checkpoint_dir=str(folder),
        resume_from=attempt.resume_from.path if attempt.resume_from else None,
        start_step=attempt.start_step,
        start_path=job.start.path if job.start else None,
        corpora=job_corpora(job),
        secrets=secrets_open(job.organization, spec.secrets),
        streams=bool(attempt.profile.get("streams")),
    )
    return LaunchOrder(launch)


def run_key(attempt: Attempt) -> str:
    """The attempt's name inside residents that it shares with other runs."""
    return f"{attempt.job.public_id}.{attempt.number}"


def stop_order(attempt: Attempt) -> StopOrder:
    return StopOrder(attempt.pk, Stop(action_id=f"stop:{attempt.pk}", reason="the job was cancelled"))


# ---------------------------------------------------------------- to running pipelines


def grant_order(substage: SubStage) -> PipelineOrder:
    grant = Grant(
        action_id=substage.action_id,
        node=substage.node,
        device=device_ref(substage.device) if substage.device else None,
        share=substage.share,
    )
    return PipelineOrder(substage.attempt_id, grant)


def resize_order(allotment: Allotment) -> PipelineOrder:
    """Each allotment is another order: shares that come back are not taken for a repetition."""
    substage = allotment.substage
    action_id = f"resize:{allotment.pk}"
    return PipelineOrder(
        substage.attempt_id, Resize(action_id=action_id, node=substage.node, share=allotment.share)
    )


def leave_order(substage: SubStage) -> PipelineOrder:
    """Make room, or move the sequences to where they were told to go."""
    name = f"{substage.attempt_id}/{substage.node}"
    if substage.moves_to:
        order: protocol.Order = Merge(
            action_id=f"merge:{name}", sources=(substage.node,), target=substage.moves_to
        )
    else:
        order = Yield(action_id=f"yield:{name}", node=substage.node)
    return PipelineOrder(substage.attempt_id, order)


def resize_orders(substages: Iterable[int]) -> list[PipelineOrder]:
    """The shares that these running sub-stages, by their keys, have now."""
    rows = Allotment.objects.filter(
        substage__in=list(substages), end__isnull=True, substage__status=SubStageStatus.GRANTED
    )
    return [resize_order(row) for row in rows.select_related("substage").order_by("pk")]


def open_orders(attempt_id: int | None = None) -> list[PipelineOrder]:
    """All that has not been answered by a report, of one attempt or of all: grants with the shares that hold
    now, and who was told to leave.
    """
    rows = SubStage.objects.filter(
        status__in=[SubStageStatus.GRANTED, SubStageStatus.LEAVING], device__isnull=False
    ).exclude(attempt__status=AttemptStatus.STOPPING)
    if attempt_id is not None:
        rows = rows.filter(attempt_id=attempt_id)
    rows = rows.select_related("device__node").order_by("pk")
    granted = [row for row in rows if row.status == SubStageStatus.GRANTED]
    leaving = [row for row in rows if row.status == SubStageStatus.LEAVING]
    grants = [grant_order(row) for row in granted if not crossed(row)]
    return [*grants, *resize_orders(row.pk for row in granted), *map(leave_order, leaving)]


def crossed(substage: SubStage) -> bool:
    """Whether it runs on the grant of the one before it, and waits for none."""
    return (substage.action_id or "").startswith("cross:")


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
