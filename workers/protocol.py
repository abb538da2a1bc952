"""Orders that go down to a pipeline and reports that come back.

    scheduler daemon ── Launch, Grant, Resize, Yield, Merge, Stop ──► pipeline actor (one per attempt)
                     ◄── Report(attempt_id, seq, body) ──────────────

A pipeline numbers its reports from 1 and keeps each until the daemon has asked for a later one, so a report
may arrive twice but is never lost; the daemon drops what it has already applied (same attempt, ``seq`` not
above the last). Orders carry a deterministic ``action_id``; executing one twice is executing it once.
Failures travel as values (``Failure``). Times are UTC epoch seconds of the machine that did the work.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

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
    NOTHING_LEARNED = "nothing_learned"
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
    start_path: str | None = Field(
        None, description="folder of the checkpoint that a job starts from; its weights are the reference"
    )
    corpora: dict[str, str] = Field(default_factory=dict, description="paths of what the job's tools search")
    secrets: dict[str, SecretStr] = Field(
        default_factory=dict, description="the organization's secrets that graders and environments need"
    )
    streams: bool = Field(False, description="training may begin on finished groups while others roll out")


class Grant(Message):
    """Run one offered sub-stage on a device with a share of its compute."""

    action_id: str
    node: str
    device: DeviceRef | None = Field(description="None for sub-stages that need no device")
    share: float = Field(gt=0, le=1)


class Resize(Message):
    """Go on with another share; it holds from the next token or micro-batch on."""

    action_id: str
    node: str
    share: float = Field(gt=0, le=1)


class Yield(Message):
    """Stop a running sub-stage of training at the next micro-batch. What is left of it is offered again."""

    action_id: str
    node: str


class Merge(Message):
    """Move the unfinished sequences of ``sources`` into the batch of ``target``; the sources are over."""

    action_id: str
    sources: tuple[str, ...]
    target: str


Order = Grant | Resize | Yield | Merge


class Stop(Message):
    action_id: str
    reason: str


# ---------------------------------------------------------------- reports


class Offer(Message):
    """A sub-stage whose inputs are ready.

    One that needs a device waits for a grant, another has begun. Those with the same ``gang`` start together.
    """

    type: Literal["offer"] = "offer"
    node: str = Field(description="unique within the attempt, e.g. 's3.w0.decode.1'")
    step: int
    worker: int
    kind: SubStageKind
    sequences: int = Field(description="sequences the sub-stage works on")
    part: int = Field(0, description="place in its chain of workers.chain")
    gang: str = ""
    early: bool = Field(False, description="training on finished groups while others of the step roll out")
    yielded: bool = Field(False, description="what is left of one that made room")
    left: float = Field(1.0, gt=0, le=1, description="the part of the sub-stage that remains to be done")
    cached_tokens: int = Field(0, ge=0, description="tokens in the KV cache, which a merge computes again")


class Finished(Message):
    """A granted sub-stage ran. The interval is the computation alone: loading a model is not in it."""

    type: Literal["finished"] = "finished"
    node: str
    started_at: float
    ended_at: float
    tokens: int = Field(ge=0, description="prefill: prompt tokens; decode, tail: sampled; others: processed")
    forwards: int = Field(0, ge=0, description="decode, tail: steps of the batch")


class Crossed(Message):
    """A sub-stage reached a boundary and went over into the next of its chain, on the same grant.

    Nothing stops for it: the daemon learns what now runs there.
    """

    type: Literal["crossed"] = "crossed"
    finished: Finished
    offer: Offer


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
    advantage: float = Field(description="mean over its sampled tokens")
    parts: dict[str, float] = Field(default_factory=dict, description="what the reward is made of, by name")
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


Body = Annotated[
    Offer | Finished | Crossed | StepDone | CheckpointSaved | Log | Ended, Field(discriminator="type")
]


class Report(Message):
    attempt_id: int
    seq: int = Field(ge=1)
    at: float
    body: Body


class Rates(Message):
    """How fast a device computes for a model alone, all of it. Seconds of one worker."""

    prefill_s: float = Field(gt=0, description="a prompt token")
    decode_floor_s: float = Field(gt=0, description="a decode step, whatever its batch")
    decode_row_s: float = Field(ge=0, description="what each sequence adds to a decode step")
    logprob_s: float = Field(gt=0, description="a token of a log-prob pass")
    update_s: float = Field(gt=0, description="a token forward and backward")
    sync_s: float = Field(gt=0, description="an adapter to the rollout engine")


class Calibration(Message):
    """What was measured on a type of device: speeds alone, and how much sub-stages slow each other down.

    ``alone[character]`` has a slow-down for each of ``shares``, which ascend and end with 1;
    ``beside["one|other"]`` is what ``one`` loses when ``other`` computes beside it on its own part, 1 where
    it is left out. Characters: prefill, decode, tail, thin, logprob, update, sync.
    """

    shares: tuple[float, ...]
    alone: dict[str, tuple[float, ...]]
    beside: dict[str, float]
    saturation_batch: int
    rates: Rates
    parameters: int = Field(description="of the model that was measured: others are taken in proportion")
    source: Text = Field(description="what was measured, where and when")
    disturbed: float | None = Field(
        None, description="share of the measuring time that compute threads waited; None: not known"
    )


def pipeline_name(attempt_id: int) -> str:
    """Name of the attempt's actor: how a restarted daemon finds it again."""
    return f"pipeline-{attempt_id}"


METRICS = {
    "reward": "mean reward of the step's graded samples",
    "reward_std": "standard deviation of the rewards over the step",
    "loss": "policy loss plus KL penalty, averaged as the job asks; mean over the step's updates",
    "kl": "estimated divergence from the starting weights, mean per trained token",
    "entropy": "mean entropy of the sampling distribution at trained positions, in nats",
    "clip_fraction": "share of trained tokens whose ratio was clipped",
    "grad_norm": "norm of the gradient before clipping, mean over the step's updates",
    "learning_rate": "rate of the step's last update",
    "mismatch": "mean |engine log-prob - trainer log-prob| over sampled tokens, same weights",
    "mismatch_max": "the largest of those differences",
    "completion_length": "mean sampled tokens per completion",
    "truncated": "share of completions that hit max_tokens",
    "zero_variance_groups": "share of groups whose rewards are all equal, which teach nothing",
    "grade_errors": "share of samples without a usable reward: a grade or an environment failed",
    "environment_errors": "share of episodes whose environment failed",
    "grade_seconds": "mean wall seconds of a grade",
    "grade_seconds_max": "the longest of them",
    "masked": "share of completions left out of the loss because they were truncated",
    "sampling_rounds": "rounds of rollouts that the step took",
    "tool_calls": "mean tool calls per episode",
    "tool_errors": "share of tool calls that failed",
    "value_loss": "squared error of the value head, mean per trained token",
    "explained_variance": "share of the returns' variance that the value head explains",
    "accuracy": "share of pairs whose preferred completion has the higher implicit reward (DPO)",
    "margin": "mean difference of the implicit rewards of a pair (DPO)",
    "tokens": "tokens sampled in the step",
    "tokens_per_s": "sampled tokens per second of the whole step",
    "seconds": "wall seconds of the step, waiting included",
    "waiting": "share of the step in which the job wanted a device and computed on none",
    "staleness": "updates that the weights of a sampled token were behind those it trained, mean",
    "staleness_max": "the largest of those",
    "importance_capped": "share of trained tokens whose importance ratio was cut or which it left out",
    "turns": "mean turns per episode, in an environment",
}
