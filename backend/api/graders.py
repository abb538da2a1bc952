"""``/v1/fine_tuning/alpha/graders``: graders tried and checked before a job is paid for."""

from __future__ import annotations

from rest_framework.request import Request
from rest_framework.response import Response

from backend.api.base import ApiView, actor_of
from backend.jobs.trials import grader_run, grader_validate


class GraderRun(ApiView):
    def post(self, request: Request) -> Response:
        return Response(grader_run(actor=actor_of(request), request=request.data))


class GraderValidate(ApiView):
    def post(self, request: Request) -> Response:
        return Response(grader_validate(actor=actor_of(request), request=request.data))
