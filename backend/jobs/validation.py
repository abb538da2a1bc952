"""What can only be said with the data in hand: every row against the grader and the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from backend.jobs.models import Job
from workers.data.rows import RowError, check_grader_fields, check_prompt_lengths
from workers.models.chat import ChatTokenizer
from workers.spec import JobSpec


def data_problem(job: Job) -> str | None:
    """The first row that the job cannot use and why; None when all are fine."""
    spec = JobSpec.model_validate(job.spec)
    source = job.training_file or job.dataset
    assert source is not None
    path = Path(source.path)
    if not path.exists():
        return "the file's content is gone"
    try:
        return _told(check_grader_fields(path, spec.grader)) or _told(_long_prompts(path, job, spec))
    except ValueError as error:
        return str(error)


def _long_prompts(path: Path, job: Job, spec: JobSpec) -> list[RowError]:
    tokenizer = ChatTokenizer(Path(job.base_model.path))
    limit = job.base_model.context_length - spec.rl.sampling.max_tokens
    return check_prompt_lengths(path, _counter(tokenizer), limit)


def _counter(tokenizer: ChatTokenizer) -> Callable[[list[dict[str, Any]]], int]:
    return lambda messages: len(tokenizer.encode_chat(messages))


def _told(errors: list[RowError]) -> str | None:
    return errors[0].message if errors else None
