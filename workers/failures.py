"""An attempt's failure as a value that travels, in words for the customer."""

from __future__ import annotations

import logging
import uuid

from ray.exceptions import RayActorError

from workers.calls import Stuck
from workers.data.rows import RowProblem
from workers.engines.errors import NotFinite
from workers.envs.problems import EnvironmentProblem
from workers.gathering import GraderFailed
from workers.idleness import NothingLearned
from workers.protocol import Failure, FailureKind
from workers.residents.errors import ModelLoad

OUT_OF_MEMORY = {"MemoryError", "OutOfMemoryError"}

log = logging.getLogger(__name__)


def failure_of(error: Exception) -> Failure:
    """Errors of residents arrive as subclasses of their own type.

    What nobody foresaw is told by a number only: its text may name what is not the customer's business.
    """
    said = str(error).strip().splitlines()[-1:] or [type(error).__name__]
    match error:
        case NotFinite():
            return Failure(kind=FailureKind.NOT_FINITE, message=said[0])
        case GraderFailed():
            return Failure(kind=FailureKind.GRADER_FAILED, message=said[0])
        case NothingLearned():
            return Failure(kind=FailureKind.NOTHING_LEARNED, message=said[0])
        case RowProblem() | EnvironmentProblem():
            return Failure(kind=FailureKind.BAD_DATA, message=said[0])
        case ModelLoad():
            return Failure(kind=FailureKind.MODEL_LOAD, message=said[0])
        case Stuck():
            return Failure(kind=FailureKind.TIME_LIMIT, message=said[0])
        case RayActorError():
            return Failure(kind=FailureKind.WORKER_LOST, message="a process on the device is gone")
    if is_out_of_memory(error):
        message = "a smaller micro_batch_size, group_size or max_tokens needs less"
        return Failure(kind=FailureKind.OUT_OF_MEMORY, message=message)
    number = uuid.uuid4().hex[:12]
    log.error("error %s", number, exc_info=error)
    return Failure(kind=FailureKind.INTERNAL, message=f"error {number}")


def is_out_of_memory(error: Exception) -> bool:
    """By the name of the error: torch and Ray have one each, and a pipeline does not load torch to know its.

    torch says it in words only when it is the processor's memory that has run out.
    """
    if OUT_OF_MEMORY & {kind.__name__ for kind in type(error).mro()}:
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
