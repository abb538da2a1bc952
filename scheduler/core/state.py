"""What a decision may see. Frozen values of the standard library; the same snapshot gives the same plan."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Sub-stage kinds (the same words as ``workers.protocol.SubStageKind``; a test keeps them equal)."""

    PREFILL = "prefill"
    DECODE = "decode"
    TAIL = "tail"
    GRADE = "grade"
    LOGPROB = "logprob"
    UPDATE = "update"
    SYNC = "sync"


#: Kinds that run beside the devices, on the hosts' processors.
OFF_DEVICE = frozenset({Kind.GRADE})


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


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A running attempt. ``home[w]`` is the device where worker ``w`` last was, ``holds`` what it has now.

    ``step_seconds`` is the expected length of its next step: what a turn is charged before it is over.
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
    step_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class Node:
    """An offered sub-stage. ``device`` and ``share`` are set once it runs."""

    id: str
    pipeline: int
    step: int
    worker: int
    kind: Kind
    state: NodeState = NodeState.READY
    device: str | None = None
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Resident:
    """Weights that lie loaded on a device; idle ones may be evicted, least recently used first."""

    device: str
    weights_key: str
    bytes: int
    last_used: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    now: float
    seed: int = 0
    devices: tuple[Device, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    queue: tuple[QueuedJob, ...] = ()
    pipelines: tuple[Pipeline, ...] = ()
    nodes: tuple[Node, ...] = ()
    residents: tuple[Resident, ...] = ()


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


Action = Admit | Place | Start | Evict


class RefusalCode(StrEnum):
    NEVER_FITS_DEVICES = "never_fits_devices"
    NEVER_FITS_MEMORY = "never_fits_memory"
    NO_DEVICES = "no_devices"
    QUOTA = "quota"
    MEMORY = "memory"
    TURN = "turn"


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
    """Which rules decide. ``max_pipelines_per_device`` bounds the host memory of pipeline processes."""

    name: str = "exclusive"
    max_pipelines_per_device: int = 8
