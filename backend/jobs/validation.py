"""What can only be said with the data in hand: every row against the algorithm, the grader and the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from backend.jobs import sizing
from backend.jobs.checks import wanted_kind
from backend.jobs.models import Job
from workers.data import supervised
from workers.data.fits import check_environment_fields, check_grader_fields, check_kind, check_prompt_lengths
from workers.data.problems import RowError, RowProblem
from workers.data.rows import iter_rows
from workers.data.shapes import PREFERENCE
from workers.envs.episodes import opening
from workers.models.chat import ChatTokenizer
from workers.models.config import read_config
from workers.models.limits import longest_sequence
from workers.spec import Environment, JobSpec, Tools

#: Size and time of change: another version of the file has others.
Version = tuple[int, int]


class BadData(Exception):
    """A row that the job cannot use; the text names it and says why."""


@dataclass
class PromptCounter:
    """Tokens of each row's prompt in turn, with what is said before the first turn of an episode; remembers
    the most, and whose template complained.
    """

    tokenizer: ChatTokenizer
    environment: Environment | None = None
    row: int = 0
    longest: int = 0

    def __call__(self, messages: list[dict[str, Any]]) -> int:
        self.row += 1
        try:
            tokens = len(self.tokenizer.encode_chat(opening(self.environment, messages)))
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
    version = facts.st_size, facts.st_mtime_ns
    context = longest_sequence(job.base_model.context_length)
    kind, longest_output = wanted_kind(spec.rl), spec.rl.sampling.max_tokens
    try:
        _refuse(check_kind(data, kind))
        if spec.grader is not None:
            _refuse(check_grader_fields(data, spec.grader))
        if spec.environment is not None:
            _refuse(check_environment_fields(data, spec.environment))
        if spec.rl.method.rolls_out:
            # Tools are described in the prompt; no other environment adds to it.
            tools = spec.environment if isinstance(spec.environment, Tools) else None
            longest = longest_prompt(
                data, version, folder, context - longest_output, _what_limits(context, spec), tools
            )
        else:
            longest = longest_example(data, version, folder, kind, longest_output, context)
    except RowProblem as problem:
        raise BadData(str(problem)) from None
    return sizing.run_bytes(
        model=read_config(folder),
        parameters=job.base_model.parameters,
        rl=spec.rl,
        prompt_tokens=longest,
        starts=spec.start_from is not None,
    )


@lru_cache(maxsize=1_024)
def longest_prompt(
    data: Path, version: Version, folder: Path, limit: int, what_limits: str, tools: Tools | None = None
) -> int:
    """Tokens of the longest prompt; ``BadData`` if that is more than ``limit``.

    It is most of the check's time and the same for every job of a search over other settings, so it is
    remembered.
    """
    counter = PromptCounter(ChatTokenizer(folder), tools)
    _refuse(check_prompt_lengths(data, counter, limit), what_limits)
    return counter.longest


@lru_cache(maxsize=1_024)
def longest_example(
    data: Path, version: Version, folder: Path, kind: str, longest_output: int, context: int
) -> int:
    """Tokens of the longest prompt before what is learned; ``BadData`` for a row that is too long."""
    tokenizer, longest = ChatTokenizer(folder), 0
    read: Callable[..., Sequence[supervised.Example]] = (
        supervised.pair_of if kind == PREFERENCE else supervised.completion_of
    )
    for number, row in enumerate(iter_rows(data), start=1):
        try:
            examples = read(tokenizer, row, longest_output)
        except ValueError as error:
            raise BadData(f"row {number}: {error}") from None
        for example in examples:
            whole = len(example.prompt) + len(example.tokens)
            if whole > context:
                raise BadData(
                    f"row {number}: prompt and completion have {whole:,} tokens, the limit is {context:,}"
                )
            longest = max(longest, len(example.prompt))
    return longest


def _what_limits(context: int, spec: JobSpec) -> str:
    return f" (the model's context of {context:,} tokens less max_tokens of {spec.rl.sampling.max_tokens:,})"


def _refuse(errors: list[RowError], why: str = "") -> None:
    if errors:
        raise BadData(errors[0].message + why)
