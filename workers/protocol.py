"""Orders that go down to a pipeline and reports that come back.

    scheduler daemon ── Launch, Grant, Stop ──────────────► pipeline actor (one per attempt)
                     ◄── Report(attempt_id, seq, body) ────

A pipeline numbers its reports from 1 and keeps each until the daemon has asked for a later one, so a report
may arrive twice but is never lost; the daemon drops what it has already applied (same attempt, ``seq`` not
above the last). Orders carry a deterministic ``action_id``; executing one twice is executing it once.
Failures travel as values (``Failure``). Times are UTC epoch seconds of the machine that did the work.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from workers.spec import JobSpec


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def printable(text: str) -> str:
    """What can be stored and shown: no NUL (PostgreSQL), no half of a surrogate pair (UTF-8), not endless."""
    shown = text.replace("\0", "\N{SYMBOL FOR NULL}").encode(errors="replace").decode()
    return shown if len(shown) <= MAX_TEXT else f"{shown[:MAX_TEXT]} …"


#: Longest text of a report, in characters.
MAX_TEXT = 20_000
#: Text made by models, by tenants' code or by exceptions.
Text = Annotated[str, AfterValidator(printable)]


class SubStageKind(StrEnum):
    """A piece of a stage with one resource character (the unit that is scheduled)."""

    PREFILL = "prefill"
    DECODE = "decode"
    TAIL = "tail"
    TOOL = "tool"
    GRADE = "grade"
    LOGPROB = "logprob"
    UPDATE = "update"
    SYNC = "sync"

    @property
    def needs_device(self) -> bool:
        return self not in (SubStageKind.TOOL, SubStageKind.GRADE)


class FailureKind(StrEnum):
    WORKER_LOST = "worker_lost"
    OUT_OF_MEMORY = "out_of_memory"
    GRADER_FAILED = "grader_failed"
    BAD_DATA = "bad_data"
    NOT_FINITE = "not_finite"
    MODEL_LOAD = "model_load"
    TIME_LIMIT = "time_limit"
    INTERNAL = "internal"


class Failure(Message):
    kind: FailureKind
    message: Text


class DeviceRef(Message):
    """What a pipeline must know of a device it may run on."""

    name: str
    kind: Literal["cpu", "gpu"]
    index: int
    ray_node_id: str
    threads: int = Field(description="compute threads of a CPU device; host threads of a GPU")
    memory_bytes: int
    saturation_batch: int = Field(description="running batch at which decode stops being launch-bound")


# ---------------------------------------------------------------- orders


class Launch(Message):
    """Start (or resume) an attempt; sent once, as the pipeline actor's constructor argument."""

    attempt_id: int
    attempt: int = Field(description="1-based number of the attempt within its job")
    job_id: str
    run_key: str = Field(description="names the run's adapter and optimizer inside shared residents")
    weights_key: str = Field(description="what the residents load: the base model for LoRA, the job for full")
    spec: JobSpec
    model_path: str
    dataset_path: str
    checkpoint_dir: str = Field(description="the job's own folder; checkpoints become step-N below it")
    resume_from: str | None = Field(None, description="a checkpoint folder written by an earlier attempt")
    start_step: int = Field(0, description="first step to run; the checkpoint's step")


class Grant(Message):
    """Run one offered sub-stage on a device with a share of its compute."""

    action_id: str
    node: str
    device: DeviceRef | None = Field(description="None for sub-stages that need no device")
    share: float = Field(gt=0, le=1)


class Stop(Message):
    action_id: str
    reason: str


# ---------------------------------------------------------------- reports


class Offer(Message):
    """A sub-stage whose inputs are ready and which waits for a grant."""

    type: Literal["offer"] = "offer"
    node: str = Field(description="unique within the attempt, e.g. 's3.w0.decode.1'")
    step: int
    worker: int
    kind: SubStageKind
    sequences: int = Field(description="sequences the sub-stage works on")


class Finished(Message):
    """A granted sub-stage ran. The interval is the computation alone: loading a model is not in it."""

    type: Literal["finished"] = "finished"
    node: str
    started_at: float
    ended_at: float
    tokens: int = Field(ge=0, description="prefill: prompt tokens; decode, tail: sampled; others: processed")


class SampleRecord(Message):
    """One completion, kept for people to read."""

    group: int
    index: int
    row: int = Field(description="0-based row of the dataset")
    prompt: Text
    completion: Text
    tokens: int
    reward: float | None = Field(description="None when the grade failed")
    error: Text | None = None
    advantage: float
    finish: Literal["stop", "length"]


class StepDone(Message):
    """A whole RL step; ``step`` counts from 0. The devices of the step are free again."""

    type: Literal["step_done"] = "step_done"
    step: int
    metrics: dict[str, float]
    samples: tuple[SampleRecord, ...]


class CheckpointSaved(Message):
    type: Literal["checkpoint_saved"] = "checkpoint_saved"
    step: int = Field(description="steps completed: a resume starts with this step")
    path: str
    bytes: int
    final: bool
    removed: tuple[str, ...] = Field((), description="older checkpoint folders deleted by the keep rule")


class Log(Message):
    type: Literal["log"] = "log"
    level: Literal["info", "warning", "error"]
    message: Text


class Ended(Message):
    """The attempt is over; no report follows."""

    type: Literal["ended"] = "ended"
    outcome: Literal["succeeded", "failed", "stopped"]
    failure: Failure | None = None


Body = Annotated[Offer | Finished | StepDone | CheckpointSaved | Log | Ended, Field(discriminator="type")]


class Report(Message):
    attempt_id: int
    seq: int = Field(ge=1)
    at: float
    body: Body


def pipeline_name(attempt_id: int) -> str:
    """Name of the attempt's actor: how a restarted daemon finds it again."""
    return f"pipeline-{attempt_id}"


METRICS = {
    "reward": "mean reward of the step's graded samples",
    "reward_std": "standard deviation of the rewards over the step",
    "loss": "policy loss plus KL penalty, averaged as the job asks; mean over the step's updates",
    "kl": "k3 estimate of the divergence from the starting weights, mean per trained token",
    "entropy": "mean entropy of the sampling distribution at trained positions, in nats",
    "clip_fraction": "share of trained tokens whose ratio was clipped",
    "grad_norm": "norm of the gradient before clipping, mean over the step's updates",
    "learning_rate": "rate of the step's last update",
    "mismatch": "mean |engine log-prob - trainer log-prob| over sampled tokens, same weights",
    "mismatch_max": "the largest of those differences",
    "completion_length": "mean sampled tokens per completion",
    "truncated": "share of completions that hit max_tokens",
    "zero_variance_groups": "share of groups whose rewards are all equal, which teach nothing",
    "grade_errors": "share of samples whose grade failed",
    "tokens": "tokens sampled in the step",
    "tokens_per_s": "sampled tokens per second of the whole step",
    "seconds": "wall seconds of the step, waiting included",
}
