"""Reading jobs: pages by keyset, one query each whatever their length. A job has passed ``job_access``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db.models import F, FloatField, Max, Q, QuerySet, Sum
from django.db.models.fields.json import KT
from django.db.models.functions import Cast, Mod

from backend.catalog.models import Corpus
from backend.common.pages import Page, page_by_id, page_of
from backend.jobs.access import jobs
from backend.jobs.models import Event, Job, JobCheckpoint, Sample, StepMetrics, Transition
from backend.jobs.states import JOB_TERMINAL
from backend.tenants.models import Organization
from workers.spec import JobSpec, corpora_of

MAX_POINTS = 10_000


@dataclass(frozen=True)
class MetricsRow:
    """One step's numbers, as many as were asked for."""

    step: int
    at: datetime
    values: dict[str, float]


def jobs_page(
    organization: Organization, *, limit: int = 20, after: str | None = None, status: str | None = None
) -> Page[Job]:
    """The organization's jobs, the newest first; ``after`` is the public id of the job before the page."""
    rows = jobs(organization)
    if status is not None:
        rows = rows.filter(status=status)
    return page_by_id(rows, limit=limit, after=after)


def job_events_page(
    job: Job, *, limit: int = 20, before: int | None = None, after: int | None = None
) -> Page[Event]:
    """Newest first below ``before``; or, given ``after``, oldest first above it: the way to follow a job."""
    rows = Event.objects.filter(job=job)
    if after is not None:
        return page_of(rows.filter(seq__gt=after).order_by("seq"), limit)
    if before is not None:
        rows = rows.filter(seq__lt=before)
    return page_of(rows.order_by("-seq"), limit)


def job_metrics(
    job: Job,
    *,
    names: Sequence[str] | None = None,
    after_step: int | None = None,
    max_points: int = 2_000,
) -> list[MetricsRow]:
    """The steps' numbers in order, thinned evenly to about ``max_points``; the newest always stays."""
    rows = StepMetrics.objects.filter(job=job)
    if after_step is not None:
        rows = rows.filter(step__gt=after_step)
    return [MetricsRow(row.step, row.at, _picked(row.values, names)) for row in _thinned(rows, max_points)]


def job_waiting(job: Job) -> float | None:
    """The share of its steps' time in which the job wanted a device and computed on none; None: unknown."""
    known = StepMetrics.objects.filter(job=job, values__has_keys=["waiting", "seconds"])
    waiting, seconds = (Cast(KT(f"values__{name}"), FloatField()) for name in ("waiting", "seconds"))
    sums = known.aggregate(waited=Sum(waiting * seconds), lasted=Sum(seconds))
    return sums["waited"] / sums["lasted"] if sums["lasted"] else None


def job_samples_page(
    job: Job, *, step: int | None = None, after: tuple[int, int, int] | None = None, limit: int = 100
) -> Page[Sample]:
    """The completions kept of a step, or of the newest that has any, by pages in order.

    ``after`` is the (step, group, index) of the sample before the page.
    """
    rows = Sample.objects.filter(job=job)
    if after is not None:
        # The newest step may be another by now: a listing stays with the step it began with.
        step = after[0] if step is None else step
        rows = rows.filter(Q(group=after[1], index__gt=after[2]) | Q(group__gt=after[1]))
    elif step is None:
        step = rows.aggregate(newest=Max("step"))["newest"]
    return page_of(rows.filter(step=step).order_by("group", "index"), limit)


def job_checkpoints(job: Job) -> list[JobCheckpoint]:
    """The checkpoints that are kept, the newest first."""
    return list(
        JobCheckpoint.objects.filter(job=job, checkpoint__deleted_at__isnull=True)
        .select_related("checkpoint", "attempt")
        .order_by("-checkpoint__step", "-pk")
    )


def checkpoints_to_start_from(organization: Organization, *, limit: int) -> list[JobCheckpoint]:
    """The newest checkpoints of jobs that are over, so that no run replaces them."""
    rows = JobCheckpoint.objects.filter(
        job__organization=organization,
        job__status__in=[status.value for status in JOB_TERMINAL],
        checkpoint__deleted_at__isnull=True,
    ).select_related("job", "checkpoint__base_model")
    return list(rows.order_by("-pk")[:limit])


def job_corpora(job: Job) -> dict[str, str]:
    """Paths of what the job's tools search, by the names they call it by."""
    names = corpora_of(JobSpec.model_validate(job.spec).environment)
    if not names:
        return {}
    built_in = Corpus.objects.filter(name__in=names).values_list("name", "path")
    return dict(built_in) | dict(job.searches.values_list("public_id", "path"))


def job_transitions(job: Job) -> list[Transition]:
    """Every change of status of the job and of its attempts, in order."""
    return list(Transition.objects.filter(job=job).select_related("attempt").order_by("pk"))


def _thinned(rows: QuerySet[StepMetrics], max_points: int) -> QuerySet[StepMetrics]:
    last = rows.aggregate(last=Max("step"))["last"]
    count = rows.count() if last is not None else 0
    if count > max_points:
        stride = -(-count // max_points)
        rows = rows.alias(phase=Mod(F("step"), stride)).filter(Q(phase=0) | Q(step=last))
    return rows.order_by("step")


def _picked(values: dict[str, float], names: Sequence[str] | None) -> dict[str, float]:
    return values if names is None else {name: values[name] for name in names if name in values}
