"""What can go wrong in an episode: with the job's data, or with this episode alone."""

from __future__ import annotations

from enum import StrEnum


class EnvironmentProblem(ValueError):
    """An episode that cannot be played: its row, or the model's chat template, does not fit."""


class EpisodeFailure(StrEnum):
    """Why an episode has no reward; the others of its group go on."""

    EXCEPTION = "exception"  # the environment raised
    TIMEOUT = "timeout"
    BAD_ANSWER = "bad_answer"  # not an observation: no text, no finite reward, too long
    CRASHED = "crashed"  # its process ended
    UNREACHABLE = "unreachable"  # its server gave no usable answer
    SANDBOX = "sandbox"  # our fault: its code could not be run


class EpisodeFailed(Exception):
    """Typed event of one sample; the text is for the customer."""

    def __init__(self, kind: EpisodeFailure, message: str) -> None:
        super().__init__(kind, message)
        self.kind, self.message = kind, message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"
