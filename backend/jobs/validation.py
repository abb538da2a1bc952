"""What can only be said with the data in hand: every row against the grader and the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from backend.jobs import sizing
from backend.jobs.models import Job
from workers.data.rows import (
    RowError,
    RowProblem,
    check_environment_fields,
    check_grader_fields,
    check_prompt_lengths,
)
from workers.models.chat import ChatTokenizer
from workers.models.config import read_config
from workers.models.limits import longest_sequence
from workers.spec import JobSpec


class BadData(Exception):
    """A row that the job cannot use; the text names it and says why."""


@dataclass
class PromptCounter:
    """Tokens of each row's prompt in turn; remembers the most, and whose template complained."""

    tokenizer: ChatTokenizer
    row: int = 0
    longest: int = 0

    def __call__(self, messages: list[dict[str, Any]]) -> int:
        self.row += 1
        try:
            tokens = len(self.tokenizer.encode_chat(messages))
        except ValueError as error:
            raise BadData(f"row {self.row}: {error}") from None
        self.longest = max(self.longest, tokens)
        return tokens


def data_check(job: Job) -> int:
    """Read every row; returns the memory of the run, now that the longest prompt is known. Raises BadData."""
    spec = JobSpec.model_validate(job.spec)
    source = job.training_file or job.dataset
    assert source is not None
    data, folder = Path(source.path), Path(job.base_model.path)
    if not data.exists():
        raise BadData("the file's content is gone")
    facts = data.stat()
    limit = longest_sequence(job.base_model.context_length) - spec.rl.sampling.max_tokens
    try:
        if spec.grader is not None:
            _refuse(check_grader_fields(data, spec.grader))
        if spec.environment is not None:
            _refuse(check_environment_fields(data, spec.environment))
        longest = longest_prompt(
            data, (facts.st_size, facts.st_mtime_ns), folder, limit, _what_limits(job, spec)
        )
    except RowProblem as problem:
        raise BadData(str(problem)) from None
    return sizing.run_bytes(
        model=read_config(folder),
        parameters=job.base_model.parameters,
        rl=spec.rl,
        prompt_tokens=longest,
    )


@lru_cache(maxsize=1_024)
def longest_prompt(data: Path, version: tuple[int, int], folder: Path, limit: int, what_limits: str) -> int:
    """Tokens of the longest prompt; ``BadData`` if that is more than ``limit``.

    It is most of the check's time and the same for every job of a search over other settings, so it is
    remembered; ``version`` changes with the file.
    """
    counter = PromptCounter(ChatTokenizer(folder))
    _refuse(check_prompt_lengths(data, counter, limit), what_limits)
    return counter.longest


def _what_limits(job: Job, spec: JobSpec) -> str:
    return (
        f" (the model's context of {longest_sequence(job.base_model.context_length):,} tokens"
        f" less max_tokens of {spec.rl.sampling.max_tokens:,})"
    )


def _refuse(errors: list[RowError], why: str = "") -> None:
    if errors:
        raise BadData(errors[0].message + why)
