"""Trying a grader before paying for a job: on one completion, by the code that grades in training.

    request ──► checked ──► queue ──► a Celery process grades ──► answer in Redis ──► whoever waits

A trial may run a tenant's code and ask a tenant's servers, so it is not the web's to run; it takes
``TRIAL_SECONDS`` at most, and an organization runs one at a time.
"""

from __future__ import annotations

import json
import uuid
from functools import cache
from typing import Any

from celery import shared_task
from celery.exceptions import SoftTimeLimitExceeded
from django.conf import settings
from django.db import close_old_connections
from pydantic import Field, ValidationError
from redis import Redis

from backend.common.errors import InvalidRequest, LimitReached, Unavailable
from backend.jobs.checks import refuse_missing_secrets
from backend.jobs.requests import refusal
from backend.tenants.access import Actor, require_write
from backend.tenants.models import Organization
from backend.tenants.secrets import secrets_open
from workers.graders.grades import ErrorType, GradeResult
from workers.graders.trial import response, run_grader, validate_grader
from workers.spec import Grader, Strict, secrets_of

TRIAL_SECONDS = 60
#: How long the answer is waited for, the queue included, and kept.
WAIT_SECONDS = 75


class Checked(Strict):
    grader: Grader


class Trial(Checked):
    """``item`` is the row that templates read."""

    model_sample: str = Field(max_length=1 << 20)
    item: dict[str, Any] = Field(default_factory=dict)


def grader_validate(*, actor: Actor, request: Any) -> dict[str, Any]:
    """The grader with its defaults, or ``InvalidRequest`` that says what is wrong with it."""
    require_write(actor)
    checked = _read(Checked, request)
    return _validated(checked.grader)


def grader_run(*, actor: Actor, request: Any) -> dict[str, Any]:
    """Grade one completion, and wait for it; in OpenAI's shape (``workers.graders.trial``)."""
    require_write(actor)
    trial = _read(Trial, request)
    _validated(trial.grader)
    refuse_missing_secrets(actor.organization, secrets_of(trial.grader), "grader")
    lock, ticket = f"trial:{actor.organization.pk}", f"trial-answer:{uuid.uuid4().hex}"
    if not _redis().set(lock, ticket, nx=True, ex=WAIT_SECONDS):
        raise LimitReached(
            "The organization tries another grader just now: one runs at a time.", code="grader_busy"
        )
    try:
        try_grader.apply_async(
            (ticket, actor.organization.pk, trial.model_dump(mode="json")), expires=WAIT_SECONDS
        )
        close_old_connections()  # none is held while waiting
        answer = _redis().blpop([ticket], timeout=WAIT_SECONDS)
    finally:
        _redis().delete(lock)
    if answer is None:
        raise Unavailable("No process was free to run the grader; try again.", code="graders_busy")
    found: dict[str, Any] = json.loads(answer[1])
    return found


@shared_task(soft_time_limit=TRIAL_SECONDS, time_limit=TRIAL_SECONDS + 10, acks_late=False)
def try_grader(ticket: str, organization_pk: int, content: dict[str, Any]) -> None:
    """Grade, and leave the answer where it is waited for."""
    trial = Trial.model_validate(content)
    organization = Organization.objects.get(pk=organization_pk)
    secrets = secrets_open(organization, secrets_of(trial.grader))
    try:
        answer = run_grader(
            trial.grader,
            trial.item,
            trial.model_sample,
            secrets={name: value.get_secret_value() for name, value in secrets.items()},
        )
    except SoftTimeLimitExceeded:
        late = f"a trial of a grader may take {TRIAL_SECONDS} s"
        answer = response(trial.grader, GradeResult(None, late, ErrorType.TIMEOUT, float(TRIAL_SECONDS)))
    pipe = _redis().pipeline()
    pipe.rpush(ticket, json.dumps(answer))
    pipe.expire(ticket, WAIT_SECONDS)
    pipe.execute()


def _read(model: type[Any], request: Any) -> Any:
    if not isinstance(request, dict):
        raise InvalidRequest("The request must be a JSON object.")
    given = {name: value for name, value in request.items() if value is not None}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise refusal(error, "grader") from None


def _validated(grader: Grader) -> dict[str, Any]:
    try:
        return validate_grader(grader)
    except ValueError as error:
        raise InvalidRequest(f"The grader cannot be used: {error}", param="grader") from None


@cache
def _redis() -> Redis:
    return Redis.from_url(settings.REDIS_URL)
