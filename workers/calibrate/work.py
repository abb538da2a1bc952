"""What is measured: pieces of sub-stages, which device shares they run on, and how much effort is spent."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations_with_replacement

from workers.protocol import DeviceRef


class Character(StrEnum):
    """What a sub-stage asks of a device, named as in ``workers.protocol.Calibration``."""

    PREFILL = "prefill"
    DECODE = "decode"
    TAIL = "tail"
    THIN = "thin"
    LOGPROB = "logprob"
    UPDATE = "update"
    SYNC = "sync"


#: Running batches at which TAIL and THIN are measured: the least of the one, and what is common in the other.
TAIL_BATCH = 32
THIN_BATCH = 8

#: A GPU is measured at multiples of this part of it.
GPU_STEPS = 4
#: Prompts that a prefill computes at once.
PREFILL_PROMPTS = 2
#: Decode steps that are timed together.
STEPS = 2

DECODING = (Character.DECODE, Character.TAIL, Character.THIN)


@dataclass(frozen=True)
class Work:
    """``size``: running sequences of a decode; prompts of a prefill; samples of a training pass; else 1."""

    character: Character
    size: int = 1


def units(work: Work) -> int:
    """What a piece of it is divided by: a decode is timed by the step."""
    return STEPS if work.character in DECODING else 1


@dataclass(frozen=True)
class Case:
    """A piece of work with a share of the device."""

    work: Work
    share: float


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    A case is timed ``repetitions`` times, or at least twice until that took ``case_s``. ``shared`` are
    measured at about ``most_shares`` shares, ``pairs`` by two processes at once for ``window_s``, or longer
    where pieces are. What other programs disturbed is measured up to ``attempts`` times in the
    first part of ``limit_s``; after all of it the measurement is given up. What is left out has stand-ins
    (``workers.calibrate.derive.STAND_IN``).
    """

    name: str
    largest_batch: dict[str, int]
    samples: int
    repetitions: int
    case_s: float
    shared: tuple[Character, ...]
    most_shares: int
    pairs: tuple[tuple[Character, Character], ...]
    window_s: float
    attempts: int
    limit_s: float


#: About twenty seconds with a small model.
SHORT = Effort(
    name="short",
    largest_batch={"cpu": 64, "gpu": 256},
    samples=2,
    repetitions=3,
    case_s=0.8,
    shared=(Character.DECODE, Character.THIN, Character.UPDATE, Character.SYNC),
    most_shares=2,
    pairs=(
        (Character.DECODE, Character.UPDATE),
        (Character.THIN, Character.UPDATE),
        (Character.DECODE, Character.DECODE),
        (Character.UPDATE, Character.UPDATE),
    ),
    window_s=0.4,
    attempts=4,
    limit_s=120.0,
)
#: Less than two minutes with a small model. Nobody computes beside a sync for long enough to matter.
FULL = Effort(
    name="full",
    largest_batch={"cpu": 128, "gpu": 512},
    samples=8,
    repetitions=5,
    case_s=4.0,
    shared=tuple(Character),
    most_shares=8,
    pairs=tuple(combinations_with_replacement([c for c in Character if c is not Character.SYNC], 2)),
    window_s=1.0,
    attempts=4,
    limit_s=600.0,
)


def batches(largest: int) -> tuple[int, ...]:
    """The powers of two up to ``largest``."""
    return tuple(1 << place for place in range(largest.bit_length()) if 1 << place <= largest)


def shares_measured(device: DeviceRef, most: int) -> tuple[float, ...]:
    """Ascending to 1: about ``most`` of the multiples of a CPU's thread or of a GPU's quarter, and those of a
    pair.
    """
    steps = device.threads if device.kind == "cpu" else GPU_STEPS
    count = min(steps, most)
    even = {max(1, steps * step // count) / steps for step in range(1, count + 1)}
    return tuple(sorted(even | set(split(device) or ())))


def split(device: DeviceRef) -> tuple[float, float] | None:
    """The shares of two processes on the device: halves. One thread cannot be divided."""
    steps = device.threads if device.kind == "cpu" else GPU_STEPS
    return None if steps == 1 else (steps // 2 / steps, (steps - steps // 2) / steps)
