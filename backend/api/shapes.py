"""How things look from outside: OpenAI's objects with fields of ours beside theirs. A row in, a dict out."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from backend.catalog.models import BaseModel, Dataset, File
from backend.jobs.methods import REINFORCEMENT, method_of
from backend.jobs.models import Event, Job, JobCheckpoint, Sample, Transition
from backend.jobs.selectors import MetricsRow
from backend.jobs.states import REASON_TEXT, JobStatus, Reason
from backend.tenants.models import Secret


def epoch(at: datetime | None) -> int | None:
    return None if at is None else int(at.timestamp())


def file(row: File) -> dict[str, Any]:
    return {
        "id": row.public_id,
        "object": "file",
        "bytes": row.bytes,
        "created_at": epoch(row.created_at),
        "filename": row.filename,
        "purpose": row.purpose,
        "status": "processed",
        "sha256": row.sha256,
        "rows": row.rows,
        "fields": row.fields,
        "kinds": row.kinds,
    }


def model(row: BaseModel) -> dict[str, Any]:
    return {
        "id": row.name,
        "object": "model",
        "created": epoch(row.created_at),
        "owned_by": "system" if row.organization_id is None else "organization",
        "architecture": row.architecture,
        "parameters": row.parameters,
        "context_length": row.context_length,
    }


def dataset(row: Dataset) -> dict[str, Any]:
    return {
        "id": row.name,
        "object": "dataset",
        "title": row.title,
        "description": row.description,
        "rows": row.rows,
        "fields": row.fields,
        "grader": row.grader,
        "environment": row.environment,
        "recommended": row.recommended,
    }


def job(row: Job) -> dict[str, Any]:
    hyperparameters = _hyperparameters(row.spec)
    return {
        "id": row.public_id,
        "object": "fine_tuning.job",
        "created_at": epoch(row.created_at),
        "started_at": epoch(row.started_at),
        "finished_at": epoch(row.finished_at),
        "estimated_finish": None,
        "organization_id": row.organization.public_id,
        "model": row.base_model.name,
        "fine_tuned_model": fine_tuned_model(row) if row.status == JobStatus.SUCCEEDED else None,
        "status": row.status,
        "status_reason": _reason_text(row),
        "error": _error(row),
        "training_file": row.spec["training_file"],
        "validation_file": None,
        "result_files": [],
        "integrations": [],
        "trained_tokens": row.tokens if row.steps_done else None,
        "seed": row.spec["seed"],
        "user_provided_suffix": row.spec["suffix"],
        "metadata": row.metadata,
        "hyperparameters": hyperparameters,
        "method": _method(row.spec, hyperparameters),
        "environment": row.spec["environment"],
        "start_from": row.spec.get("start_from"),
        "resolved": row.spec,
        "progress": {"steps": row.steps, "steps_done": row.steps_done, "reward": row.last_reward},
        "cost": {"micro_usd": row.cost_micro_usd},
        "queue": _queue(row),
    }


def fine_tuned_model(row: Job) -> str:
    """OpenAI's form: base, organization, the client's suffix, and what makes it unique."""
    return ":".join(
        ("ft", row.base_model.name, row.organization.slug, row.name, row.public_id.removeprefix("ftjob-"))
    )


def event(row: Event, job: Job) -> dict[str, Any]:
    return {
        "id": f"ftevent-{job.public_id.removeprefix('ftjob-')}-{row.seq}",
        "object": "fine_tuning.job.event",
        "created_at": epoch(row.at),
        "seq": row.seq,
        "type": row.type,
        "level": row.level,
        "message": row.message,
        "data": row.data,
    }


def metrics(row: MetricsRow) -> dict[str, Any]:
    return {"step": row.step, "created_at": epoch(row.at), "values": row.values}


def sample(row: Sample) -> dict[str, Any]:
    return {
        "id": f"sample-{row.step}-{row.group}-{row.index}",
        "step": row.step,
        "group": row.group,
        "index": row.index,
        "row": row.row,
        "prompt": row.prompt,
        "completion": row.completion,
        "tokens": row.tokens,
        "reward": row.reward,
        "error": row.error or None,
        "advantage": row.advantage,
        "parts": row.parts,
        "finish": row.finish,
    }


def checkpoint(row: JobCheckpoint, job: Job) -> dict[str, Any]:
    made = row.checkpoint
    return {
        "id": made.public_id,
        "object": "fine_tuning.job.checkpoint",
        "created_at": epoch(made.created_at),
        "fine_tuning_job_id": job.public_id,
        "fine_tuned_model_checkpoint": f"{fine_tuned_model(job)}:step-{made.step}",
        "step_number": made.step,
        "metrics": {"step": made.step},
        "format": made.format,
        "bytes": made.bytes,
        "final": row.final,
    }


def transition(row: Transition) -> dict[str, Any]:
    return {
        "id": f"transition-{row.pk}",
        "object": "fine_tuning.job.transition",
        "created_at": epoch(row.at),
        "attempt": row.attempt.number if row.attempt else None,
        "old": row.old or None,
        "new": row.new,
        "reason": row.reason,
        "detail": row.detail,
        "actor": row.actor,
        "stimulus": row.stimulus or None,
    }


def secret(row: Secret) -> dict[str, Any]:
    """The value is nowhere in it."""
    return {
        "id": row.name,
        "object": "secret",
        "name": row.name,
        "created_at": epoch(row.created_at),
        "changed_at": epoch(row.changed_at),
    }


def _hyperparameters(spec: dict[str, Any]) -> dict[str, Any]:
    found = {
        "batch_size": spec["rl"]["prompts_per_step"],
        "learning_rate": spec["rl"]["optimizer"]["learning_rate"],
    }
    if spec["rl"]["algorithm"] == "dpo":
        found["beta"] = spec["rl"]["loss"]["dpo_beta"]
    return found


def _method(spec: dict[str, Any], hyperparameters: dict[str, Any]) -> dict[str, Any]:
    method = method_of(spec["rl"]["algorithm"])
    of_method = {"hyperparameters": hyperparameters}
    if method == REINFORCEMENT:
        of_method = {"grader": spec["grader"], **of_method}
    return {"type": method, method: of_method}


def _reason_text(row: Job) -> str:
    return REASON_TEXT[Reason(row.reason)].format(detail=row.detail)


def _error(row: Job) -> dict[str, Any] | None:
    if row.status != JobStatus.FAILED:
        return None
    return {"code": row.reason, "param": row.error_param or None, "message": _reason_text(row)}


def _queue(row: Job) -> dict[str, Any]:
    return {"ahead": row.ahead, "code": row.wait_code or None, "reason": row.wait_text or None}
