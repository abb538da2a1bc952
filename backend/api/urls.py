"""The API's routes. Ids are matched by their form, so that nothing else ever reaches a query."""

from __future__ import annotations

from typing import Any

from django.urls import path, register_converter
from rest_framework.exceptions import NotFound
from rest_framework.request import Request

from backend.api import catalog, graders, jobs, secrets
from backend.api.base import ApiView


class PublicId:
    regex = "[A-Za-z]{1,12}-[A-Za-z0-9]{1,40}"

    def to_python(self, value: str) -> str:
        return value

    def to_url(self, value: str) -> str:
        return value


class Unknown(ApiView):
    """Whatever else is asked for below ``/v1``: the envelope instead of a page."""

    authentication_classes: list[Any] = []
    permission_classes: list[Any] = []

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        raise NotFound(f"There is no route {request.method} {request.path}.")


register_converter(PublicId, "id")

JOB = "fine_tuning/jobs/<id:job_id>"

app_name = "api"
urlpatterns = [
    path("files", catalog.Files.as_view(), name="files"),
    path("files/<id:file_id>", catalog.FileOne.as_view(), name="file"),
    path("files/<id:file_id>/content", catalog.FileContent.as_view(), name="file_content"),
    path("models", catalog.Models.as_view(), name="models"),
    path("models/<path:name>", catalog.ModelOne.as_view(), name="model"),
    path("datasets", catalog.Datasets.as_view(), name="datasets"),
    path("secrets", secrets.Secrets.as_view(), name="secrets"),
    path("secrets/<str:name>", secrets.SecretOne.as_view(), name="secret"),
    path("fine_tuning/alpha/graders/run", graders.GraderRun.as_view(), name="grader_run"),
    path("fine_tuning/alpha/graders/validate", graders.GraderValidate.as_view(), name="grader_validate"),
    path("fine_tuning/jobs", jobs.Jobs.as_view(), name="jobs"),
    path(JOB, jobs.JobOne.as_view(), name="job"),
    path(f"{JOB}/cancel", jobs.JobCancel.as_view(), name="job_cancel"),
    path(f"{JOB}/events", jobs.JobEvents.as_view(), name="job_events"),
    path(f"{JOB}/metrics", jobs.JobMetrics.as_view(), name="job_metrics"),
    path(f"{JOB}/samples", jobs.JobSamples.as_view(), name="job_samples"),
    path(f"{JOB}/checkpoints", jobs.JobCheckpoints.as_view(), name="job_checkpoints"),
    path(
        f"{JOB}/checkpoints/<id:checkpoint_id>/content",
        jobs.JobCheckpointContent.as_view(),
        name="job_checkpoint_content",
    ),
    path(f"{JOB}/transitions", jobs.JobTransitions.as_view(), name="job_transitions"),
    path("<path:anything>", Unknown.as_view(), name="unknown"),
]
