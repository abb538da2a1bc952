"""Rows that only pages need. Jobs come from the tenants' door."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from django.db.models import F, Max, Min, Sum

from backend.jobs.access import jobs
from backend.jobs.models import Event, Job, Sample, StepMetrics
from backend.metering.selectors import BILLED
from backend.tenants.models import Organization

#: Steps a sparkline shows, and over which the pace of a job is taken.
SPARK_STEPS = 60
PACE_STEPS = 5
#: Events of each type that the job page begins with; ``job.js`` keeps as many.
EVENTS_PER_TYPE = 60


def changed_ids(organization: Organization, pks: Iterable[int]) -> list[str]:
    """Public ids of those of the organization's jobs."""
    return list(jobs(organization).filter(pk__in=pks).order_by("-pk").values_list("public_id", flat=True))


def newest_ids(organization: Organization, limit: int) -> list[str]:
    return list(jobs(organization).order_by("-pk").values_list("public_id", flat=True)[:limit])


def listed(organization: Organization, public_ids: Sequence[str]) -> list[Job]:
    return list(jobs(organization).filter(public_id__in=public_ids).order_by("-pk"))


def recent_rewards(of: Sequence[Job]) -> Mapping[int, list[float]]:
    """Job's primary key -> rewards of its last ``SPARK_STEPS`` steps, oldest first."""
    rows = (
        StepMetrics.objects.filter(job__in=of, step__gte=F("job__steps_done") - SPARK_STEPS)
        .order_by("job_id", "step")
        .values_list("job_id", "values__reward")
    )
    found: dict[int, list[float]] = {}
    for job_pk, reward in rows:
        if reward is not None:
            found.setdefault(job_pk, []).append(reward)
    return found


def newest_values(job: Job) -> list[dict[str, float]]:
    """Metrics of the last ``PACE_STEPS`` steps, newest first."""
    return list(job.step_metrics.order_by("-step").values_list("values", flat=True)[:PACE_STEPS])


def recent_events(job: Job) -> list[Event]:
    """The newest ``EVENTS_PER_TYPE`` of each type, newest first: sub-stages must not crowd out the story."""
    newest = [job.events.filter(type=type).order_by("-seq")[:EVENTS_PER_TYPE] for type in Event.Type.values]
    return sorted((event for events in newest for event in events), key=lambda event: -event.seq)


def cost_by_step(job: Job) -> list[tuple[int, int]]:
    """(step, micro-dollars net of credits) in order of steps."""
    rows = job.usage.filter(entry__in=BILLED, substage__isnull=False).values("substage__step")
    return list(
        rows.annotate(Sum("micro_usd"))
        .order_by("substage__step")
        .values_list("substage__step", "micro_usd__sum")
    )


def sample_steps(job: Job) -> tuple[int, int] | None:
    """The first and the last step of which completions are kept."""
    found: dict[str, Any] = Sample.objects.filter(job=job).aggregate(Min("step"), Max("step"))
    if found["step__min"] is None:
        return None
    return found["step__min"], found["step__max"]
