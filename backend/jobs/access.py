"""The door to a tenant's jobs."""

from __future__ import annotations

from django.db.models import QuerySet

from backend.catalog.access import checkpoint_access
from backend.common.errors import NotFound
from backend.jobs.models import Job, JobCheckpoint
from backend.tenants.access import Actor, require_write
from backend.tenants.models import Organization


def job_access(actor: Actor, public_id: str, write: bool = False) -> Job:
    job = None
    if "\0" not in public_id:
        job = jobs(actor.organization).filter(public_id=public_id).first()
    if job is None:
        raise NotFound(f"There is no job {public_id!r}.")
    if write:
        require_write(actor)
    return job


def job_checkpoint_access(actor: Actor, job_id: str, checkpoint_id: str) -> JobCheckpoint:
    """A checkpoint as the product of that job."""
    job = job_access(actor, job_id)
    checkpoint = checkpoint_access(actor, checkpoint_id)
    produced = JobCheckpoint.objects.filter(job=job, checkpoint=checkpoint).first()
    if produced is None:
        raise NotFound(f"The job has no checkpoint {checkpoint_id!r}.")
    produced.job, produced.checkpoint = job, checkpoint
    return produced


def jobs(organization: Organization) -> QuerySet[Job]:
    """With what a job's row is shown with, so that a page of jobs is one query."""
    return Job.objects.filter(organization=organization).select_related(
        "organization", "base_model", "training_file", "dataset"
    )
