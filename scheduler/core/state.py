"""What a decision may see. Frozen values of the standard library; the same snapshot gives the same plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.core.interference import Interference


class Kind(StrEnum):
    """Sub-stage kinds (the same words as ``workers.protocol.SubStageKind``; a test keeps them equal)."""

    PREFILL = "prefill"
    DECODE = "decode"
    TAIL = "tail"
    TOOL = "tool"
    GRADE = "grade"
    LOGPROB = "logprob"
    UPDATE = "update"
    SYNC = "sync"


#: Kinds that run beside the devices, on the hosts' processors.
OFF_DEVICE = frozenset({Kind.TOOL, Kind.GRADE})
#: Kinds that a rollout resident runs; the others that need a device are a trainer's.
ROLLOUT = frozenset({Kind.PREFILL, Kind.DECODE, Kind.TAIL})


class Mode(StrEnum):
    """How a pipeline's steps follow each other; see ``graph.py``."""

    SYNC = "sync"
    ONE_STEP_OFF = "one_step_off"
    ASYNC = "async"
    STREAM = "stream"


class DeviceState(StrEnum):
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


class NodeState(StrEnum):
    READY = "ready"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class Device:
    """One schedulable accelerator: a GPU, or a CPU device of some threads."""

    name: str
    type: str
    memory_bytes: int
    state: DeviceState = DeviceState.READY


@dataclass(frozen=True, slots=True)
class Tenant:
    """``service`` is virtual time: device-seconds received divided by the weight, lifted when work arrives.

    It counts steps that are over; ``plan`` adds the steps that run, at their expected length.
    ``max_devices`` is a ceiling on what the tenant's pipelines have together.
    """

    id: int
    weight: float = 1.0
    service: float = 0.0
    max_devices: int | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """A predicted sub-stage: its kind, and how long one worker takes for it alone on a whole device.

    ``seconds`` is the median, ``late_seconds`` the upper quartile. ``batch`` counts the sequences that run
    when it begins. ``forward_seconds`` is a decode step, in the mean over the sub-stage, of which
    ``floor_seconds`` do not depend on the batch: what fusing and merging share. ``bandwidth`` is the part
    of the device's memory bandwidth used alone, ``tokens`` what it processes (prefill: the prompts'). An
    ``early`` one may begin while rollouts still run (mode STREAM).
    """

    kind: Kind
    seconds: float
    late_seconds: float = 0.0
    batch: int = 1
    forward_seconds: float = 0.0
    floor_seconds: float = 0.0
    bandwidth: float = 0.0
    tokens: int = 0
    early: bool = False


@dataclass(frozen=True, slots=True)
class Outlook:
    """What one step of a pipeline is expected to be: a rollout worker's chain, then the trainers' chain."""

    rollout: tuple[Segment, ...] = ()
    train: tuple[Segment, ...] = ()

    @property
    def seconds(self) -> float:
        """Of a step alone on its devices, when nothing of it overlaps."""
        return sum(segment.seconds for segment in (*self.rollout, *self.train))


@dataclass(frozen=True, slots=True)
class Shape:
    """The coarse stage graph of a job: which workers roll out, which train, and how steps follow each other.

    A worker may do both (colocated). ``max_staleness`` is eta of mode ASYNC: rollout k may start once the
    weights have seen step k - 1 - eta.
    """

    rollout_workers: tuple[int, ...]
    train_workers: tuple[int, ...]
    mode: Mode = Mode.SYNC
    max_staleness: int = 0


@dataclass(frozen=True, slots=True)
class Demand:
    """How much of a device a job wants over a step alone: the mean of its sub-stages' least useful shares.

    ``rollout`` is shared by jobs that fuse. A job that was never seen has none: (0, 0) constrains nothing.
    """

    rollout: float = 0.0
    train: float = 0.0


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that waits to be admitted. ``weights_bytes`` are shared by jobs with the same ``weights_key``."""

    id: str
    tenant: int
    submitted: float
    devices: int
    weights_key: str
    weights_bytes: int
    run_bytes: int
    priority: int = 0
    demand: Demand = Demand()
    latency_cap: float = 1.5
    shape: Shape | None = None
    outlook: Outlook = Outlook()
    fusible: bool = False
    kv_tokens: int = 0
    kv_bytes: int = 0
    peak_bytes: int = 0
    overlap_bytes: int = 0


#: What a turn is charged while nothing is known of the pipeline's steps.
UNKNOWN_STEP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A running attempt. ``home[w]`` is the device where worker ``w`` last was, ``holds`` what it has now.

    ``step_seconds`` is the expected length of its next step: what a turn is charged before it is over.
    Policies that multiplex also read ``outlook`` (what a step is expected to be), ``latency_cap`` (how many
    times its solo length a step may take) and ``fusible`` (a LoRA job: its rollouts decode in one batch
    with those of the same ``weights_key``), ``kv_tokens`` (what its KV cache holds on one device; 0: enough
    for all), ``kv_bytes`` (of one more token, where merged tails grow into free memory) and ``peak_bytes``
    (what its training needs beside ``run_bytes``, and only then: a device without room for two trains one
    at a time), and ``overlap_bytes`` (what it needs more while it trains and rolls out at once).
    ``stepped`` is the number of updates done.
    """

    id: int
    job: str
    tenant: int
    submitted: float
    devices: int
    weights_key: str
    weights_bytes: int
    run_bytes: int
    home: tuple[str, ...]
    holds: tuple[str, ...] = ()
    priority: int = 0
    step_seconds: float = UNKNOWN_STEP_SECONDS
    demand: Demand = Demand()
    latency_cap: float = 1.5
    shape: Shape | None = None
    outlook: Outlook = Outlook()
    fusible: bool = False
    kv_tokens: int = 0
    kv_bytes: int = 0
    peak_bytes: int = 0
    overlap_bytes: int = 0
    step_began: float = 0.0
    stepped: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """An offered sub-stage. ``device`` and ``share`` are set once it runs.

    Nodes of a pipeline with the same ``gang`` start together. ``segment`` is what is predicted of it,
    ``part`` its place in its chain of the outlook. ``left`` are the solo seconds that remained at
    ``since``. ``tokens`` counts what lies in its KV cache: what a merge must prefill again. ``yielded``
    says that it made room once.
    """

    id: str
    pipeline: int
    step: int
    worker: int
    kind: Kind
    state: NodeState = NodeState.READY
    device: str | None = None
    share: float = 0.0
    gang: str = ""
    part: int = 0
    segment: Segment | None = None
    left: float = 0.0
    since: float = 0.0
    tokens: int = 0
    yielded: bool = False


@dataclass(frozen=True, slots=True)
class Resident:
    """Weights that lie loaded on a device; idle ones may be evicted, least recently used first."""

    device: str
    weights_key: str
    bytes: int
    last_used: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``tables``: the interference table of each type of device. ``waits``: until when a pipeline waits on
    purpose.
    """

    now: float
    seed: int = 0
    devices: tuple[Device, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    queue: tuple[QueuedJob, ...] = ()
    pipelines: tuple[Pipeline, ...] = ()
    nodes: tuple[Node, ...] = ()
    residents: tuple[Resident, ...] = ()
    tables: tuple[tuple[str, Interference], ...] = ()
    waits: tuple[tuple[int, float], ...] = ()


# ---------------------------------------------------------------- what a decision says


@dataclass(frozen=True, slots=True)
class Admit:
    """Start an attempt for the job; ``home`` names the devices its workers will live on."""

    job: str
    home: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Place:
    """Give the pipeline its devices for one step: all of them or none. ``devices[w]`` is for worker ``w``."""

    pipeline: int
    devices: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Start:
    """Run an offered sub-stage. ``device`` is None for kinds that need none."""

    node: str
    pipeline: int
    device: str | None
    share: float
    reason: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Unload idle weights from a device to make room."""

    device: str
    weights_key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Resize:
    """Change the share of a running sub-stage."""

    node: str
    pipeline: int
    share: float
    reason: str


@dataclass(frozen=True, slots=True)
class Yield:
    """Stop a running sub-stage at its next yield point; it is offered again with what is left of it."""

    node: str
    pipeline: int
    reason: str


@dataclass(frozen=True, slots=True)
class Merge:
    """Move the running sequences of ``sources`` into the batch of ``target``, all of the same pipeline.

    The sources are over; the target goes on with all sequences after it has prefilled the new ones.
    """

    pipeline: int
    sources: tuple[str, ...]
    target: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rehome:
    """Give the pipeline, of which nothing runs, new homes: one of its devices is not READY any more."""

    pipeline: int
    home: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Leave the pipeline's offered sub-stages for a better moment: decide again at ``until``, or earlier when
    something happens on its devices.
    """

    pipeline: int
    until: float
    reason: str


Action = Admit | Place | Start | Evict | Resize | Yield | Merge | Rehome | Wait


class RefusalCode(StrEnum):
    NEVER_FITS_DEVICES = "never_fits_devices"
    NEVER_FITS_MEMORY = "never_fits_memory"
    NO_DEVICES = "no_devices"
    QUOTA = "quota"
    MEMORY = "memory"
    TURN = "turn"
    DEVICE = "device"
    LATENCY = "latency"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a queued job (``job``) or a pipeline ready for its turn (``pipeline``) gets nothing now."""

    code: RefusalCode
    text: str
    job: str | None = None
    pipeline: int | None = None
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    actions: tuple[Action, ...] = ()
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """Which rules decide.

    ``max_pipelines_per_device`` bounds who lives on a device (host memory of processes), ``max_computing``
    the residents that compute there at once. ``merge``, ``shares``, ``fuse`` and ``wait`` switch parts off,
    to measure what each is worth: without ``shares`` those who compute at once have equal parts, and a
    gang's workers equal work. ``corun`` says which kinds may compute beside another's.
    """

    name: str = "exclusive"
    max_pipelines_per_device: int = 8
    max_computing: int = 1
    merge: bool = False
    shares: bool = False
    fuse: bool = False
    wait: bool = False
    corun: frozenset[Kind] = frozenset()
    lookahead: bool = False
    capped: bool = False
    stream: bool = False


_ALL = frozenset(Kind) - OFF_DEVICE

#: The policies by name. The baselines of others are policies of the same core, so that one run compares them:
#: ``exclusive`` (verl: one pipeline after another per set of devices), ``phase`` (RollMux: whole phases take
#: turns on a device), ``rollout_only`` (MuxServe-like: decodes share a device, training does not).
_GREEDY = Policy(
    "greedy", max_computing=3, merge=True, shares=True, fuse=True, corun=_ALL, capped=True, stream=True
)
POLICIES = {
    policy.name: policy
    for policy in (
        Policy(),
        Policy("phase", max_pipelines_per_device=2),
        Policy("rollout_only", max_pipelines_per_device=2, max_computing=2, shares=True, corun=ROLLOUT),
        _GREEDY,
        replace(_GREEDY, name="lookahead", wait=True, lookahead=True),
    )
}
