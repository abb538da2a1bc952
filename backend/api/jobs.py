"""``/v1/fine_tuning/jobs`` and what belongs to a job."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from django.http import StreamingHttpResponse
from rest_framework.request import Request
from rest_framework.response import Response

from backend.api import shapes
from backend.api.base import ApiView, actor_of, listed, one_of, stimulus_of, whole
from backend.api.downloads import checkpoint_download
from backend.common.errors import InvalidRequest
from backend.jobs import selectors
from backend.jobs.access import job_access, job_checkpoint_access
from backend.jobs.services import job_cancel, job_create
from backend.jobs.states import JobStatus
from workers.protocol import METRICS

#: Metrics of what rewards are made of, by the parts' own names.
PART = "reward."
#: Numbers that the columns of a sample can hold.
SAMPLE_ID = re.compile(r"sample-([0-9]{1,9})-([0-9]{1,9})-([0-9]{1,9})", re.ASCII)


class Jobs(ApiView):
    def get(self, request: Request) -> Response:
        page = selectors.jobs_page(
            actor_of(request).organization,
            limit=whole(request, "limit", 20),
            after=request.query_params.get("after"),
            status=one_of(request, "status", JobStatus),
        )
        return Response(listed(page.items, shapes.job, has_more=page.has_more))

    def post(self, request: Request) -> Response:
        job = job_create(
            actor=actor_of(request),
            request=request.data,
            idempotency_key=request.headers.get("Idempotency-Key"),
            stimulus=stimulus_of(request),
        )
        return Response(shapes.job(job))


class JobOne(ApiView):
    def get(self, request: Request, job_id: str) -> Response:
        return Response(shapes.job(job_access(actor_of(request), job_id)))


class JobCancel(ApiView):
    def post(self, request: Request, job_id: str) -> Response:
        actor = actor_of(request)
        job = job_access(actor, job_id, write=True)
        return Response(shapes.job(job_cancel(actor=actor, job=job, stimulus=stimulus_of(request))))


class JobEvents(ApiView):
    """Newest first, as OpenAI lists them; ``order=asc`` follows a job from the event ``after`` on."""

    def get(self, request: Request, job_id: str) -> Response:
        job = job_access(actor_of(request), job_id)
        limit = whole(request, "limit", 20)
        cursor = _event_seq(request.query_params.get("after"))
        if one_of(request, "order", ("asc", "desc")) == "asc":
            page = selectors.job_events_page(job, limit=limit, after=cursor or 0)
        else:
            page = selectors.job_events_page(job, limit=limit, before=cursor)
        return Response(listed(page.items, partial(shapes.event, job=job), has_more=page.has_more))


class JobMetrics(ApiView):
    def get(self, request: Request, job_id: str) -> Response:
        job = job_access(actor_of(request), job_id)
        rows = selectors.job_metrics(
            job,
            names=_metric_names(request.query_params.get("names")),
            after_step=whole(request, "after_step", None),
            max_points=_max_points(whole(request, "max_points", 2_000)),
        )
        return Response(listed(rows, shapes.metrics))


class JobSamples(ApiView):
    """Of one step, the newest unless ``step`` says another, by group and index."""

    def get(self, request: Request, job_id: str) -> Response:
        job = job_access(actor_of(request), job_id)
        page = selectors.job_samples_page(
            job,
            step=whole(request, "step", None),
            after=_sample_place(request.query_params.get("after")),
            limit=whole(request, "limit", 100),
        )
        return Response(listed(page.items, shapes.sample, has_more=page.has_more))


class JobCheckpoints(ApiView):
    def get(self, request: Request, job_id: str) -> Response:
        job = job_access(actor_of(request), job_id)
        return Response(listed(selectors.job_checkpoints(job), partial(shapes.checkpoint, job=job)))


class JobCheckpointContent(ApiView):
    def get(self, request: Request, job_id: str, checkpoint_id: str) -> StreamingHttpResponse:
        produced = job_checkpoint_access(actor_of(request), job_id, checkpoint_id)
        return checkpoint_download(job_id, Path(produced.checkpoint.path))


class JobTransitions(ApiView):
    def get(self, request: Request, job_id: str) -> Response:
        job = job_access(actor_of(request), job_id)
        return Response(listed(selectors.job_transitions(job), shapes.transition))


def _event_seq(after: str | None) -> int | None:
    """The position in an event's id, or the position itself."""
    if after is None:
        return None
    seq = after.rpartition("-")[2]
    if not (seq.isascii() and seq.isdigit() and len(seq) <= 18):
        raise InvalidRequest(f"after is no event's id: {after[:80]!r}", param="after")
    return int(seq)


def _sample_place(after: str | None) -> tuple[int, int, int] | None:
    """Step, group and index of the sample with that id."""
    if after is None:
        return None
    place = SAMPLE_ID.fullmatch(after)
    if place is None:
        raise InvalidRequest(f"after is no sample's id: {after[:80]!r}", param="after")
    step, group, index = map(int, place.groups())
    return step, group, index


def _metric_names(text: str | None) -> list[str] | None:
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in METRICS and not name.startswith(PART)]
    if unknown:
        raise InvalidRequest(
            f"names: there is no metric {unknown[0][:40]!r}; there are {', '.join(METRICS)}", param="names"
        )
    return names


def _max_points(points: int) -> int:
    if not 1 <= points <= selectors.MAX_POINTS:
        raise InvalidRequest(
            f"max_points must be between 1 and {selectors.MAX_POINTS}; got {points}", param="max_points"
        )
    return points
