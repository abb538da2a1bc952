"""The life of a job and of an attempt, as tables with a sentence per edge.

job:      validating → queued → running → succeeded
               │          │  ▲      │
               └──────────┴──┼──────┴──► failed, cancelled
                             └ a lost attempt is tried again

attempt:  starting → running → succeeded | failed | lost
               └─────────┴──► stopping → cancelled | lost
"""

from __future__ import annotations

from enum import StrEnum


class JobStatus(StrEnum):
    VALIDATING = "validating_files"
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


JOB_EDGES: dict[tuple[JobStatus, JobStatus], str] = {
    (JobStatus.VALIDATING, JobStatus.QUEUED): "The data passed every check.",
    (JobStatus.VALIDATING, JobStatus.FAILED): "A row of the data cannot be used by this job.",
    (JobStatus.VALIDATING, JobStatus.CANCELLED): "A member cancelled the job before it was checked.",
    (JobStatus.QUEUED, JobStatus.RUNNING): "The scheduler admitted the job and started an attempt.",
    (JobStatus.QUEUED, JobStatus.FAILED): "The pool can never hold the job.",
    (JobStatus.QUEUED, JobStatus.CANCELLED): "A member cancelled the job while it waited.",
    (JobStatus.RUNNING, JobStatus.QUEUED): "The attempt was lost; another starts from the last checkpoint.",
    (JobStatus.RUNNING, JobStatus.SUCCEEDED): "The last step is trained and its checkpoint is saved.",
    (JobStatus.RUNNING, JobStatus.FAILED): "The attempt failed in a way that a further attempt would repeat.",
    (JobStatus.RUNNING, JobStatus.CANCELLED): "A member cancelled the job while it ran.",
}
JOB_TERMINAL = frozenset({JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED})


class AttemptStatus(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"
    CANCELLED = "cancelled"


ATTEMPT_EDGES: dict[tuple[AttemptStatus, AttemptStatus], str] = {
    (AttemptStatus.STARTING, AttemptStatus.RUNNING): "The pipeline made its first report.",
    (AttemptStatus.STARTING, AttemptStatus.STOPPING): "The job was cancelled while the pipeline started.",
    (AttemptStatus.STARTING, AttemptStatus.FAILED): "The pipeline could not start and says why.",
    (AttemptStatus.STARTING, AttemptStatus.LOST): "The pipeline's process is gone.",
    (AttemptStatus.RUNNING, AttemptStatus.SUCCEEDED): "The pipeline finished its last step.",
    (AttemptStatus.RUNNING, AttemptStatus.FAILED): "The pipeline ended with an error that is the job's own.",
    (AttemptStatus.RUNNING, AttemptStatus.LOST): "A process of the attempt died; nothing is the job's fault.",
    (AttemptStatus.RUNNING, AttemptStatus.STOPPING): "The job was cancelled; the pipeline is told to stop.",
    (AttemptStatus.STOPPING, AttemptStatus.CANCELLED): "The pipeline stopped.",
    (AttemptStatus.STOPPING, AttemptStatus.LOST): "The pipeline's process is gone before it could say so.",
}
ATTEMPT_TERMINAL = frozenset(
    {AttemptStatus.SUCCEEDED, AttemptStatus.FAILED, AttemptStatus.LOST, AttemptStatus.CANCELLED}
)


class Reason(StrEnum):
    """Why a status changed."""

    SUBMITTED = "submitted"
    DATA_ACCEPTED = "data_accepted"
    INVALID_DATA = "invalid_data"
    ADMITTED = "admitted"
    STARTED = "started"
    COMPLETED = "completed"
    CANCELLED_BY_MEMBER = "cancelled_by_member"
    WORKER_LOST = "worker_lost"
    TOO_MANY_ATTEMPTS = "too_many_attempts"
    OUT_OF_MEMORY = "out_of_memory"
    GRADER_FAILED = "grader_failed"
    NOT_FINITE = "not_finite"
    MODEL_LOAD = "model_load"
    TIME_LIMIT = "time_limit"
    NOTHING_LEARNED = "nothing_learned"
    NEVER_FITS = "never_fits"
    INTERNAL = "internal"


#: What a customer reads. ``{detail}`` is the particular: the row, the device, the message.
REASON_TEXT: dict[Reason, str] = {
    Reason.SUBMITTED: "The job was submitted.",
    Reason.DATA_ACCEPTED: "The data passed every check.",
    Reason.INVALID_DATA: "The data cannot be used: {detail}",
    Reason.ADMITTED: "The job was admitted: {detail}",
    Reason.STARTED: "Training started.",
    Reason.COMPLETED: "Training is complete.",
    Reason.CANCELLED_BY_MEMBER: "Cancelled on request.",
    Reason.WORKER_LOST: "A process of ours died ({detail}). Work since the last checkpoint is not billed.",
    Reason.TOO_MANY_ATTEMPTS: "The job was started too often without getting further: {detail}",
    Reason.OUT_OF_MEMORY: "The job ran out of device memory: {detail}",
    Reason.GRADER_FAILED: "The grader failed: {detail}",
    Reason.NOT_FINITE: "Training diverged: {detail}",
    Reason.MODEL_LOAD: "The model could not be loaded: {detail}",
    Reason.TIME_LIMIT: "A part of the job took too long: {detail}",
    Reason.NOTHING_LEARNED: "The job was stopped, as it asked, because it learned nothing: {detail}",
    Reason.NEVER_FITS: "The pool can never hold this job: {detail}",
    Reason.INTERNAL: "An error of ours: {detail}",
}

#: Reasons for which another attempt is started, from the last checkpoint.
RETRYABLE = frozenset({Reason.WORKER_LOST, Reason.INTERNAL, Reason.MODEL_LOAD})

#: Reasons that are our fault: the work they lost is not billed.
NOT_BILLED = frozenset({Reason.WORKER_LOST, Reason.INTERNAL, Reason.MODEL_LOAD})

#: Attempts in a row that may be lost without a new checkpoint before the job fails.
MAX_FRUITLESS_ATTEMPTS = 3

#: Seconds until the next attempt, by how many were lost without progress: a disturbance may be over by then.
RETRY_AFTER_S = (1.0, 10.0, 60.0)


def job_may_change(old: JobStatus, new: JobStatus) -> bool:
    return (old, new) in JOB_EDGES


def attempt_may_change(old: AttemptStatus, new: AttemptStatus) -> bool:
    return (old, new) in ATTEMPT_EDGES
