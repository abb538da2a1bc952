"""Creating and cancelling jobs, and deleting the files they use."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Q

from backend.catalog.access import dataset_access, file_access, model_access
from backend.catalog.models import BaseModel, Dataset, File
from backend.catalog.services import dataset_on_demand, file_remove
from backend.common.errors import Conflict, InvalidRequest, LimitReached, NotFound
from backend.jobs import checks, requests, sizing
from backend.jobs.events import event_add
from backend.jobs.models import Attempt, Event, Job, Transition, job_id
from backend.jobs.states import (
    ATTEMPT_TERMINAL,
    JOB_TERMINAL,
    REASON_TEXT,
    AttemptStatus,
    JobStatus,
    Reason,
)
from backend.jobs.tasks import validate_job
from backend.jobs.transitions import attempt_status_change, job_status_change
from backend.tenants.access import Actor, require_write
from backend.tenants.models import Organization
from workers.data.builtin.puzzles import PREFIX as ON_DEMAND
from workers.models.config import read_config
from workers.spec import JobSpec

log = logging.getLogger(__name__)

IDEMPOTENCY_KEY_CHARS = 255
CANCEL_TRIES = 5
UNFINISHED = [status.value for status in JobStatus if status not in JOB_TERMINAL]


@dataclass(frozen=True)
class Draft:
    """A job that is not stored yet, and the uploaded corpora that it will search."""

    job: Job
    searches: list[File]


def job_create(*, actor: Actor, request: Any, idempotency_key: str | None = None, stimulus: str = "") -> Job:
    """Check the request, store the job with its resolved spec, and have its data checked.

    Repeated with the same key and body it returns the first one's job, whoever of two at once is first.
    """
    require_write(actor)
    digest = _digest(request)
    if idempotency_key is not None:
        _check_key(idempotency_key)
        known = _job_of_key(actor, idempotency_key, digest)
        if known is not None:
            return known
    _check_unfinished(actor.organization)
    draft = _prepare(actor, request)
    draft.job.idempotency_key, draft.job.request_digest = idempotency_key, digest
    try:
        return _store(actor, draft, stimulus)
    except IntegrityError:
        known = idempotency_key and _job_of_key(actor, idempotency_key, digest)
        if not known:
            raise
        return known


def job_cancel(*, actor: Actor, job: Job, stimulus: str = "") -> Job:
    """Cancel the job; a live attempt is told to stop. Only what is not over can be cancelled."""
    require_write(actor)
    for _ in range(CANCEL_TRIES):
        if _cancel_once(actor, job.pk, stimulus):
            job.refresh_from_db()
            return job
    raise Conflict("The job is changing too fast to be cancelled; try again.")


@transaction.atomic
def file_delete(*, actor: Actor, file: File) -> None:
    """Delete a file that no unfinished job needs."""
    require_write(actor)
    if _locked_file(file) is None:
        raise NotFound(f"There is no file {file.public_id!r}.")
    needs = Q(training_file=file) | Q(searches=file)
    user = Job.objects.filter(needs, status__in=UNFINISHED).order_by("pk").first()
    if user is not None:
        raise Conflict(f"The job {user.public_id} still needs the file.", code="file_in_use")
    file_remove(file=file)


# ---------------------------------------------------------------- creation


def _digest(request: Any) -> str:
    """Of the body's canonical form; refuses text that no database column can hold."""
    canonical = json.dumps(request, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    try:
        encoded = canonical.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("The request holds half of a surrogate pair, which is no character.") from None
    if _holds_nul(request):
        raise InvalidRequest("The request holds the character U+0000.")
    return hashlib.sha256(encoded).hexdigest()


def _holds_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any(_holds_nul(part) for pair in value.items() for part in pair)
    return isinstance(value, list) and any(_holds_nul(part) for part in value)


def _check_key(key: str) -> None:
    if not key or len(key) > IDEMPOTENCY_KEY_CHARS or not (key.isascii() and key.isprintable()):
        raise InvalidRequest(
            f"An Idempotency-Key has 1 to {IDEMPOTENCY_KEY_CHARS} printable ASCII characters.",
            code="idempotency_key_invalid",
        )


def _job_of_key(actor: Actor, key: str, digest: str) -> Job | None:
    job = Job.objects.filter(organization=actor.organization, idempotency_key=key).first()
    if job is not None and job.request_digest != digest:
        raise InvalidRequest(
            f"The Idempotency-Key was used for another request, which made the job {job.public_id}.",
            code="idempotency_key_reuse",
        )
    return job


def _check_unfinished(organization: Organization) -> None:
    """Requests at once may pass together: the limit bounds the queue, it is not a count to rely on."""
    limit = settings.MAX_UNFINISHED_JOBS
    if Job.objects.filter(organization=organization, status__in=UNFINISHED).count() >= limit:
        raise LimitReached(
            f"The organization has {limit:,} jobs that are not finished, which is the limit: wait for some "
            "to end, or cancel some.",
            code="too_many_unfinished_jobs",
        )


def _prepare(actor: Actor, body: Any) -> Draft:
    """The job as it would be stored; everything that can be said without reading the data is said here."""
    request = requests.parse_request(body)
    model = _model(actor, request.model)
    file, dataset = _data(actor, request.training_file)
    source = file or dataset
    assert source is not None
    start = checks.start_of(actor, request.start_from, model)
    brought = requests.Data(
        rows=source.rows,
        grader=dataset.grader if dataset else None,
        environment=dataset.environment if dataset else None,
        recommended=dataset.recommended if dataset else {},
        start=start.checkpoint.public_id if start else None,
        tuning=start.tuning if start else None,
    )
    spec = requests.resolve(request, brought)
    grader_path = requests.grader_path(request)
    checks.check_rows(spec, source)
    checks.check_start(spec.rl, start)
    checks.check_grading(spec, source, grader_path)
    checks.check_world(spec, source)
    searched = checks.corpora(actor, spec)
    checks.check_secrets(spec, actor.organization, grader_path)
    checks.check_lengths(spec, model)
    checks.check_devices(spec, actor.organization)
    public_id = job_id()
    job = Job(
        public_id=public_id,
        organization=actor.organization,
        created_by=actor.user,
        created_by_key=actor.key,
        name=spec.suffix or "",
        base_model=model,
        training_file=file,
        dataset=dataset,
        start=start.checkpoint if start else None,
        spec=spec.model_dump(mode="json"),
        metadata=spec.metadata,
        devices=spec.rl.devices,
        steps=spec.rl.steps,
        **_sizes(spec, model, source, public_id),
    )
    return Draft(job, [corpus for corpus in searched.values() if isinstance(corpus, File)])


def _model(actor: Actor, name: str) -> BaseModel:
    """A name in the body that means nothing is a bad request, not a missing page."""
    try:
        return model_access(actor, name)
    except NotFound as error:
        raise InvalidRequest(error.message, param="model", code=error.code) from None


def _data(actor: Actor, name: str) -> tuple[File | None, Dataset | None]:
    try:
        return file_access(actor, name), None
    except NotFound:
        pass
    try:
        if name.startswith(ON_DEMAND):
            return None, dataset_on_demand(actor=actor, name=name)
        return None, dataset_access(actor, name)
    except NotFound as error:
        said = f"There is no file and no built-in dataset {name!r}."
        if name.startswith(ON_DEMAND):
            said = error.message
        raise InvalidRequest(said, param="training_file", code="file_not_found") from None


def _sizes(spec: JobSpec, model: BaseModel, source: File | Dataset, public_id: str) -> dict[str, Any]:
    try:
        config = read_config(Path(model.path))
        file_bytes = Path(source.path).stat().st_size
    except (OSError, ValueError):
        # The particular names a path of ours.
        log.exception("sizing a job of %s on %s", model.name, spec.training_file)
        raise Conflict(f"{model.name} or {spec.training_file} cannot be read now.") from None
    guess = sizing.guessed_prompt_tokens(file_bytes, source.rows)
    return {
        "weights_key": sizing.weights_key(model_key=model_key(model), job_key=public_id, spec=spec),
        "weights_bytes": sizing.weights_bytes(model=config, parameters=model.parameters, rl=spec.rl),
        "run_bytes": sizing.run_bytes(
            model=config,
            parameters=model.parameters,
            rl=spec.rl,
            prompt_tokens=guess,
            starts=spec.start_from is not None,
        ),
    }


def model_key(model: BaseModel) -> str:
    """A tenant's own model never shares a name with another's."""
    owner = model.organization
    return model.name if owner is None else f"{owner.public_id}/{model.name}"


@transaction.atomic
def _store(actor: Actor, draft: Draft, stimulus: str) -> Job:
    job = draft.job
    if job.training_file is not None and _locked_file(job.training_file) is None:
        raise InvalidRequest("The file was deleted meanwhile.", param="training_file", code="file_not_found")
    for corpus in draft.searches:
        if _locked_file(corpus) is None:
            raise InvalidRequest(
                "The corpus was deleted meanwhile.", param="environment.tools", code="corpus_not_found"
            )
    job.save(force_insert=True)
    if draft.searches:
        job.searches.set(draft.searches)
    Transition.objects.create(
        job=job, old="", new=job.status, reason=Reason.SUBMITTED, actor=actor.label, stimulus=stimulus
    )
    event_add(
        job=job,
        type=Event.Type.STATUS,
        message=REASON_TEXT[Reason.SUBMITTED],
        data={"status": job.status, "reason": job.reason},
    )
    # A broker that is down must not undo the job: the sweep of ``jobs.tasks`` finds it.
    transaction.on_commit(lambda: validate_job.delay(job.pk), robust=True)
    return job


def _locked_file(file: File) -> File | None:
    """The file, locked against being deleted while a job is made of it, and the other way round."""
    return File.objects.select_for_update().filter(pk=file.pk, deleted_at__isnull=True).first()


# ---------------------------------------------------------------- cancellation


@transaction.atomic
def _cancel_once(actor: Actor, job_pk: int, stimulus: str) -> bool:
    """One try; False when an attempt came or changed meanwhile.

    The attempt is locked before the job, as everybody does who changes both.
    """
    attempt = _live_attempt(job_pk, lock=True)
    job = Job.objects.select_for_update().get(pk=job_pk)
    if JobStatus(job.status) in JOB_TERMINAL:
        raise InvalidRequest(f"The job is {job.status} already.", code="job_finished")
    if attempt != _live_attempt(job_pk, lock=False):
        return False
    job_status_change(
        job=job,
        new=JobStatus.CANCELLED,
        reason=Reason.CANCELLED_BY_MEMBER,
        actor=actor.label,
        attempt=attempt,
        stimulus=stimulus,
    )
    if attempt is not None and attempt.status != AttemptStatus.STOPPING:
        attempt_status_change(
            attempt=attempt,
            new=AttemptStatus.STOPPING,
            reason=Reason.CANCELLED_BY_MEMBER,
            actor=actor.label,
            stimulus=stimulus,
        )
    return True


def _live_attempt(job_pk: int, *, lock: bool) -> Attempt | None:
    attempts = Attempt.objects.select_for_update() if lock else Attempt.objects
    over = [status.value for status in ATTEMPT_TERMINAL]
    return attempts.filter(job_id=job_pk).exclude(status__in=over).first()
