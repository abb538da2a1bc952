"""What can be said of a job without reading its data: each refusal names the field and the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from backend.catalog.access import checkpoint_access, corpus_access
from backend.catalog.models import BaseModel, Checkpoint, Corpus, Dataset, File
from backend.catalog.services import CORPUS, PURPOSE
from backend.common.errors import InvalidRequest, NotFound
from backend.jobs.access import job_access
from backend.jobs.models import JobCheckpoint
from backend.jobs.states import ATTEMPT_TERMINAL, JOB_TERMINAL
from backend.tenants.access import Actor
from backend.tenants.models import Organization
from backend.tenants.secrets import secrets_missing
from workers.data import shapes
from workers.envs.own import check_environment
from workers.graders.check import check_grader, check_templates
from workers.models.limits import longest_sequence
from workers.outside import OutsideError, check_url
from workers.spec import (
    Chat,
    GridWorld,
    GuessingGame,
    JobSpec,
    LoRA,
    OwnEnvironment,
    ReasoningGym,
    RemoteEnvironment,
    RLConfig,
    corpora_of,
    secrets_of,
)

Source = File | Dataset
JOB_PREFIX = "ftjob-"
KIND_WORDS = {
    shapes.PROMPT: "prompts, whose last message is the user's",
    shapes.COMPLETION: "conversations, whose last message is the assistant's",
    shapes.PREFERENCE: "preferences, with two outputs",
}


@dataclass(frozen=True)
class Start:
    """Where a job begins: a checkpoint, and the tuning that made it."""

    checkpoint: Checkpoint
    tuning: dict[str, Any]


# ---------------------------------------------------------------- before the spec is resolved


def start_of(actor: Actor, name: str | None, model: BaseModel) -> Start | None:
    """The checkpoint of that id, or the last of the job of that id."""
    if name is None:
        return None
    try:
        produced = _produced(actor, name)
    except NotFound as error:
        raise InvalidRequest(error.message, param="start_from", code="start_not_found") from None
    checkpoint, job = produced.checkpoint, produced.job
    if job.status not in JOB_TERMINAL or job.attempts.exclude(status__in=ATTEMPT_TERMINAL).exists():
        raise InvalidRequest(
            f"The job {job.public_id} still runs, and may replace its checkpoints: wait for its end.",
            param="start_from",
        )
    if checkpoint.base_model_id != model.pk:
        raise InvalidRequest(
            f"{checkpoint.public_id} is of the model {checkpoint.base_model.name}, not of {model.name}.",
            param="start_from",
        )
    return Start(checkpoint, job.spec["rl"]["tuning"])


def _produced(actor: Actor, name: str) -> JobCheckpoint:
    if name.startswith(JOB_PREFIX):
        job = job_access(actor, name)
        kept = JobCheckpoint.objects.filter(job=job, checkpoint__deleted_at__isnull=True)
    else:
        kept = JobCheckpoint.objects.filter(checkpoint=checkpoint_access(actor, name))
    newest = kept.select_related("checkpoint__base_model", "job").order_by("-checkpoint__step", "-pk").first()
    if newest is None:
        raise NotFound(f"The job {name} has no checkpoint.")
    return newest


# ---------------------------------------------------------------- the resolved spec


def check_start(rl: RLConfig, start: Start | None) -> None:
    """Weights of one shape only: another rank, or a whole model, is another thing to train."""
    if start is None:
        return
    asked, made = _shape(rl), _shape(RLConfig.model_validate({"tuning": start.tuning}))
    for name in sorted(asked.keys() | made.keys()):
        if asked.get(name) != made.get(name):
            raise InvalidRequest(
                f"{start.checkpoint.public_id} was trained with rl.tuning.{name} "
                f"{_said(made.get(name))}, not {_said(asked.get(name))}.",
                param=f"rl.tuning.{name}",
            )


def _shape(rl: RLConfig) -> dict[str, Any]:
    if not isinstance(rl.tuning, LoRA):
        return {"type": rl.tuning.type}
    lora = rl.tuning
    return {"type": "lora", "rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets)}


def _said(value: Any) -> str:
    if value is None:
        return "left out"
    return ", ".join(value) if isinstance(value, list) else f"{value}"


def wanted_kind(rl: RLConfig) -> str:
    """What the rows must be, by the names of ``workers.data.shapes``."""
    kinds = {"likelihood": shapes.COMPLETION, "preference": shapes.PREFERENCE}
    return kinds.get(rl.method.objective, shapes.PROMPT)


def check_rows(spec: JobSpec, source: Source) -> None:
    if isinstance(source, File) and source.purpose != PURPOSE:
        raise InvalidRequest(
            f"{source.public_id} was uploaded as a {source.purpose}: it is not for training.",
            param="training_file",
        )
    wanted = wanted_kind(spec.rl)
    # Files of before rows were told apart say nothing; the validation reads them.
    fit = source.kinds.get(wanted, 0) if source.kinds else source.rows
    if fit < source.rows:
        none = "None" if fit == 0 else f"Only {fit:,}"
        raise InvalidRequest(
            f"rl.algorithm {spec.rl.algorithm} learns from {KIND_WORDS[wanted]}. {none} of the "
            f"{source.rows:,} rows of {spec.training_file} {'is one' if fit == 1 else 'are such'}.",
            param="training_file",
        )


def check_grading(spec: JobSpec, source: Source, path: str) -> None:
    """``path`` is where the client wrote the grader."""
    if spec.grader is None:
        return
    try:
        check_grader(spec.grader)
        # A field that only some rows lack is found by the validation, which can name the row.
        check_templates(spec.grader, source.fields)
    except ValueError as error:
        raise InvalidRequest(f"The grader cannot be used: {error}", param=path) from None


def check_world(spec: JobSpec, source: Source) -> None:
    match spec.environment:
        case GuessingGame(number_field=name):
            _check_field(spec, source, "number_field", name)
        case GridWorld(map_field=name):
            _check_field(spec, source, "map_field", name)
        case Chat(turns_field=name):
            _check_field(spec, source, "turns_field", name)
        case ReasoningGym(puzzle_field=name):
            _check_field(spec, source, "puzzle_field", name)
        case OwnEnvironment():
            try:
                check_environment(spec.environment.source)
            except ValueError as error:
                raise InvalidRequest(
                    f"The environment cannot be used: {error}", param="environment.source"
                ) from None
        case RemoteEnvironment():
            try:
                check_url(spec.environment.url)
            except OutsideError as error:
                raise InvalidRequest(
                    f"The environment cannot be used: {error}", param="environment.url"
                ) from None


def _check_field(spec: JobSpec, source: Source, field: str, name: str) -> None:
    if name not in source.fields:
        raise InvalidRequest(
            f"The environment reads item.{name}, but no row of {spec.training_file} has that field.",
            param=f"environment.{field}",
        )


def corpora(actor: Actor, spec: JobSpec) -> dict[str, File | Corpus]:
    """What the job's tools search, by the names it is called by."""
    found = {}
    for name in sorted(corpora_of(spec.environment)):
        try:
            found[name] = corpus_access(actor, name)
        except NotFound as error:
            raise InvalidRequest(error.message, param="environment.tools", code="corpus_not_found") from None
        if isinstance(found[name], File) and found[name].purpose != CORPUS:
            raise InvalidRequest(
                f"{name} was uploaded for training: upload it with the purpose {CORPUS!r} to search it.",
                param="environment.tools",
            )
    return found


def check_secrets(spec: JobSpec, organization: Organization, path: str) -> None:
    if spec.grader is not None:
        refuse_missing_secrets(organization, secrets_of(spec.grader), path)
    refuse_missing_secrets(organization, spec.secrets, "environment.secret")


def refuse_missing_secrets(organization: Organization, names: set[str], path: str) -> None:
    missing = secrets_missing(organization, names)
    if missing:
        raise InvalidRequest(
            f"The organization has no secret {missing[0]!r}.", param=path, code="secret_not_found"
        )


def check_lengths(spec: JobSpec, model: BaseModel) -> None:
    longest = longest_sequence(model.context_length)
    if spec.rl.sampling.max_tokens >= longest:
        raise InvalidRequest(
            f"rl.sampling.max_tokens {spec.rl.sampling.max_tokens:,} leaves no room for a prompt in the "
            f"{longest:,} tokens that {model.name} can be run with.",
            param="rl.sampling.max_tokens",
        )


def check_devices(spec: JobSpec, organization: Organization) -> None:
    limit = organization.max_devices
    if limit is not None and spec.rl.devices > limit:
        raise InvalidRequest(
            f"rl.devices is {spec.rl.devices:,}, but the organization may hold {limit:,} at once: "
            "the job could never start.",
            param="rl.devices",
        )
