"""What an update measures, as sums that add up over micro-batches, workers and updates."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from workers.rl.averages import Denominator, divisor
from workers.spec import Average


@dataclass(frozen=True)
class Sums:
    """Sums over trained tokens; ``mismatch_max`` is a maximum.

    ``loss`` is not divided yet: ``average`` says by what it will be. ``kl`` is None where there was no
    reference to measure it against, ``capped`` where no importance is weighted.
    """

    tokens: int = 0
    loss: float = 0.0
    kl: float | None = None
    entropy: float = 0.0
    clipped: float = 0.0
    capped: float | None = None
    mismatch: float = 0.0
    mismatch_max: float = 0.0
    average: Average = "token"

    def __add__(self, other: Sums) -> Sums:
        if self.tokens and other.tokens and self.average != other.average:
            raise ValueError("sums of jobs with different averages do not add up")
        return Sums(
            tokens=self.tokens + other.tokens,
            loss=self.loss + other.loss,
            kl=_measured(self.kl, other.kl),
            entropy=self.entropy + other.entropy,
            clipped=self.clipped + other.clipped,
            capped=_measured(self.capped, other.capped),
            mismatch=self.mismatch + other.mismatch,
            mismatch_max=max(self.mismatch_max, other.mismatch_max),
            average=self.average if self.tokens else other.average,
        )

    def metrics(self, over: Denominator) -> dict[str, float]:
        """One update's metrics by their names in ``workers.protocol.METRICS``; ``over`` are its totals."""
        count = max(1, self.tokens)
        measured = {"kl": self.kl, "importance_capped": self.capped}
        return {name: value / count for name, value in measured.items() if value is not None} | {
            "loss": self.loss / max(1, divisor(self.average, over)),
            "entropy": self.entropy / count,
            "clip_fraction": self.clipped / count,
            "mismatch": self.mismatch / count,
            "mismatch_max": self.mismatch_max,
        }


@dataclass(frozen=True)
class Trained:
    """The sums over the first ``done`` micro-batches of those that were asked for, which were computed."""

    sums: Sums
    done: int


def step_metrics(updates: Sequence[tuple[Sums, Denominator]]) -> dict[str, float]:
    """Those of a step with one or more updates: means over all its tokens, and the mean of their losses."""
    (sums, over), *others = updates
    for more, further in others:
        sums, over = sums + more, over + further
    losses = [part.metrics(total)["loss"] for part, total in updates]
    return sums.metrics(over) | {"loss": statistics.fmean(losses)}


def _measured(one: float | None, other: float | None) -> float | None:
    found = [value for value in (one, other) if value is not None]
    return sum(found) if found else None
