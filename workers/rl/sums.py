"""What an update measures, as sums that add up over micro-batches, workers and updates."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from workers.rl.averages import Averaging, Denominator, divisor


@dataclass(frozen=True)
class Sums:
    """Sums over trained tokens, or over pairs; ``mismatch_max`` is a maximum.

    ``loss`` is not divided yet: ``average`` says by what it will be. What was not measured is None: ``kl``
    without a reference, ``capped`` where no importance is weighted, ``value_loss`` and its company without a
    value head, ``clipped`` and ``mismatch`` where nothing was sampled, ``pairs`` where there are none.
    """

    tokens: int = 0
    loss: float = 0.0
    kl: float | None = None
    entropy: float = 0.0
    clipped: float | None = None
    capped: float | None = None
    mismatch: float | None = None
    mismatch_max: float | None = None
    value_loss: float | None = None
    returns: float | None = None
    returns_squared: float | None = None
    residuals_squared: float | None = None
    pairs: int | None = None
    preferred: float | None = None
    margin: float | None = None
    average: Averaging = "token"

    def __add__(self, other: Sums) -> Sums:
        if self.tokens and other.tokens and self.average != other.average:
            raise ValueError("sums of jobs with different averages do not add up")
        columns = vars(self).items() - {("average", self.average)}
        added: dict[str, Any] = {name: _measured(value, getattr(other, name)) for name, value in columns}
        added["mismatch_max"] = _measured(self.mismatch_max, other.mismatch_max, max)
        return Sums(**added, average=self.average if self.tokens else other.average)

    def metrics(self, over: Denominator) -> dict[str, float]:
        """One update's metrics by their names in ``workers.protocol.METRICS``; ``over`` are its totals."""
        count = max(1, self.tokens)
        per_token = {
            "kl": self.kl,
            "importance_capped": self.capped,
            "clip_fraction": self.clipped,
            "mismatch": self.mismatch,
            "value_loss": self.value_loss,
            "entropy": self.entropy,
        }
        found = {name: value / count for name, value in per_token.items() if value is not None}
        found["loss"] = self.loss / max(1, divisor(self.average, over))
        if self.mismatch_max is not None:
            found["mismatch_max"] = self.mismatch_max
        if self.pairs:
            found["accuracy"] = (self.preferred or 0.0) / self.pairs
            found["margin"] = (self.margin or 0.0) / self.pairs
        return found | self._explained()

    def _explained(self) -> dict[str, float]:
        """The share of the returns' variance that the values explain, where the returns vary."""
        if self.returns is None or self.returns_squared is None or self.residuals_squared is None:
            return {}
        variation = self.returns_squared - self.returns**2 / max(1, self.tokens)
        if variation <= 1e-9 * max(1.0, self.returns_squared):
            return {}
        return {"explained_variance": 1 - self.residuals_squared / variation}


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


def _measured(one: Any, other: Any, join: Callable[[Any, Any], Any] = operator.add) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return join(one, other)
