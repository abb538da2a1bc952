"""What was seen of a pipeline's steps, and what its next step is therefore expected to be.

Seconds come in as they would be alone on a whole device: whoever observes a sub-stage that ran beside others
divides by its slow-down first. They are kept for each part of the outlook: a part stands for a kind and a
band of batch sizes with this pipeline's weights, and all workers and steps add to it. A part that did not
occur in a step is observed with 0 seconds, so that it weighs as often as it occurs. What is kept is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, isfinite
from typing import Literal, NamedTuple

from scheduler.core.state import Kind, Outlook, Segment

Chain = Literal["rollout", "train"]

#: What the newest observation weighs in a mean. With a/(2-a) = 1/7 it is as steady as a mean of the last 7.
WEIGHT = 0.25
#: Observations of a part over which quantiles are taken.
WINDOW = 8
#: Beginnings of parts over which the batch curve is fitted: about a window for each of four parts.
POINTS = 32
#: Share of a prediction by which it may be wrong before it is a reason to plan again.
SURPRISE = 0.25
#: What is predicted of a sub-stage that occurs though nothing was expected of it, in seconds.
LEAST = 1e-3
#: Parts that decode: the size of the batch is known when they begin.
DECODES = frozenset({Kind.DECODE, Kind.TAIL})


class Line(NamedTuple):
    """Seconds of one decode forward of n sequences: ``floor + slope * n``."""

    floor: float
    slope: float

    def at(self, batch: float) -> float:
        return self.floor + self.slope * batch


@dataclass(frozen=True, slots=True)
class Part:
    """What was seen of one part. ``mean``, ``batch`` and ``forward`` are weighted means; ``window`` the last
    seconds, newest last. ``batch`` and ``forward`` are 0 until they were seen.
    """

    prior: Segment
    mean: float = 0.0
    window: tuple[float, ...] = ()
    batch: float = 0.0
    forward: float = 0.0
    error: float | None = None

    @property
    def seconds(self) -> float:
        """Expected of the next time. A tail has a median: its mean would follow a few very long ones."""
        if not self.window:
            return self.prior.seconds
        return _quantile(self.window, 0.5) if self.prior.kind is Kind.TAIL else self.mean

    @property
    def late_seconds(self) -> float:
        """Upper quartile, not below what is expected."""
        return max(self.seconds, _quantile(self.window, 0.75)) if self.window else self.prior.late_seconds

    def observe(self, seconds: float, batch: int, forward: float) -> Part:
        off = relative_error(self.seconds, seconds)
        return replace(
            self,
            mean=_towards(self.mean, seconds) if self.window else seconds,
            window=(*self.window, seconds)[-WINDOW:],
            batch=_mean_of_seen(self.batch, batch),
            forward=_mean_of_seen(self.forward, forward),
            error=off if self.error is None else _towards(self.error, off),
        )

    def segment(self, line: Line) -> Segment:
        expected = replace(self.prior, seconds=self.seconds, late_seconds=self.late_seconds)
        if self.batch:
            expected = replace(expected, batch=max(1, round(self.batch)))
        if self.forward:
            floor_seconds = min(line.floor, self.forward)
            expected = replace(expected, forward_seconds=self.forward, floor_seconds=floor_seconds)
        return expected


@dataclass(frozen=True, slots=True)
class Profile:
    """``points`` are (running batch, seconds of one forward) at the beginnings of parts, newest last."""

    rollout: tuple[Part, ...]
    train: tuple[Part, ...]
    points: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, prior: Outlook) -> Profile:
        """Nothing was seen yet: the outlook is ``prior``."""
        return cls(tuple(map(Part, prior.rollout)), tuple(map(Part, prior.train)))

    def observe(
        self, chain: Chain, part: int, seconds: float, batch: int = 0, forward_seconds: float = 0.0
    ) -> Profile:
        """After a part was over on one worker. ``batch`` ran when it began, and a forward of that batch took
        ``forward_seconds``; 0 says that there was none. Raises ``ValueError`` for an unknown part.
        """
        for name, value in (("seconds", seconds), ("batch", batch), ("forward_seconds", forward_seconds)):
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"{chain} part {part}: {name} is {value}")
        seen = self._part(chain, part).observe(seconds, batch, forward_seconds)
        new = [(batch, forward_seconds)] if batch and forward_seconds else []
        rollout, train = self.rollout, self.train
        if chain == "rollout":
            rollout = (*rollout[:part], seen, *rollout[part + 1 :])
        else:
            train = (*train[:part], seen, *train[part + 1 :])
        return Profile(rollout, train, (*self.points, *new)[-POINTS:])

    def outlook(self) -> Outlook:
        """What the next step is expected to be. What was never seen stays as it was in the prior."""
        line = self._line()
        return Outlook(
            tuple(part.segment(line) for part in self.rollout),
            tuple(part.segment(line) for part in self.train),
        )

    def predicted(self, chain: Chain, part: int, batch: int) -> Segment:
        """What is predicted of a part that does occur, with ``batch`` sequences when it begins."""
        self._part(chain, part)
        segment = self._occurring(self.rollout if chain == "rollout" else self.train, part)
        return self._with_batch(segment, batch) if segment.kind in DECODES else segment

    def _occurring(self, parts: Sequence[Part], part: int) -> Segment:
        """What is expected of the part even if it was not expected to occur.

        A decode may occur for the first time in a merged batch: it takes about what the next band takes
        alone.
        """
        segment = parts[part].segment(self._line())
        if segment.seconds > 0:
            return segment
        seconds = max(segment.late_seconds, parts[part].prior.seconds)
        for other in parts[part + 1 :] if segment.kind in DECODES else ():
            if seconds > 0 or other.prior.kind not in DECODES:
                break
            seconds = other.seconds
        seconds = max(seconds, LEAST)
        return replace(segment, seconds=seconds, late_seconds=seconds)

    def _with_batch(self, segment: Segment, batch: int) -> Segment:
        """As many forwards as expected, each as much slower or faster as the batch curve says."""
        usual = self.forward_at(segment.batch)
        ratio = self.forward_at(batch) / usual if usual > 0 else 1.0
        forward = segment.forward_seconds * ratio
        return replace(
            segment,
            seconds=segment.seconds * ratio,
            late_seconds=segment.late_seconds * ratio,
            batch=batch,
            forward_seconds=forward,
            floor_seconds=min(segment.floor_seconds, forward),
        )

    def forward_at(self, batch: float) -> float:
        """Seconds of one decode forward of ``batch`` sequences; 0 where no forward was expected or seen."""
        return self._line().at(batch)

    def error(self, chain: Chain, part: int) -> float | None:
        """Weighted mean of ``relative_error`` over what was predicted just before each observation."""
        return self._part(chain, part).error

    def _part(self, chain: Chain, part: int) -> Part:
        parts = self.rollout if chain == "rollout" else self.train
        if not 0 <= part < len(parts):
            raise ValueError(f"{chain} part {part} is not one of the {len(parts)} of the outlook")
        return parts[part]

    def _line(self) -> Line:
        """The fit through the last points. A single batch size has no slope: the prior is scaled to it."""
        prior = _prior_line([part.prior for part in (*self.rollout, *self.train)])
        if not self.points:
            return prior
        batches, seconds = zip(*self.points, strict=True)
        if len(set(batches)) > 1:
            return fit(batches, seconds)
        mean = sum(seconds) / len(seconds)
        expected = prior.at(batches[0])
        scale = mean / expected if expected > 0 else 0.0
        return Line(prior.floor * scale, prior.slope * scale) if scale else Line(mean, 0.0)


def fit(batches: Sequence[float], seconds: Sequence[float]) -> Line:
    """Least squares with floor and slope not below 0: no forward is shorter for a larger batch, or free.

    Needs two different batches.
    """
    mean_n, mean_s = sum(batches) / len(batches), sum(seconds) / len(seconds)
    pairs = list(zip(batches, seconds, strict=True))
    spread = sum((n - mean_n) ** 2 for n in batches)
    slope = sum((n - mean_n) * (s - mean_s) for n, s in pairs) / spread
    if slope < 0:
        return Line(mean_s, 0.0)
    if mean_s < slope * mean_n:
        return Line(0.0, sum(n * s for n, s in pairs) / sum(n * n for n in batches))
    return Line(mean_s - slope * mean_n, slope)


def relative_error(predicted: float, seen: float) -> float:
    """Of what was predicted, because 0 is often seen; 1 where something came and nothing was predicted."""
    if predicted == seen:
        return 0.0
    return abs(seen - predicted) / predicted if predicted > 0 else 1.0


def surprising(predicted: float, seen: float) -> bool:
    """A prediction this wrong is a reason to plan again."""
    return relative_error(predicted, seen) > SURPRISE


def _prior_line(segments: Iterable[Segment]) -> Line:
    decodes = [segment for segment in segments if segment.forward_seconds > 0]
    if len({segment.batch for segment in decodes}) > 1:
        return fit([segment.batch for segment in decodes], [segment.forward_seconds for segment in decodes])
    if not decodes:
        return Line(0.0, 0.0)
    first = decodes[0]
    return Line(first.floor_seconds, (first.forward_seconds - first.floor_seconds) / first.batch)


def _towards(mean: float, new: float) -> float:
    return mean + WEIGHT * (new - mean)


def _mean_of_seen(mean: float, new: float) -> float:
    """0 stands for nothing seen, before and now."""
    if not (mean and new):
        return mean or new
    return _towards(mean, new)


def _quantile(values: Sequence[float], q: float) -> float:
    """Linear between the two values beside the place q * (n - 1) in ascending order."""
    ordered, place = sorted(values), q * (len(values) - 1)
    low, high = ordered[floor(place)], ordered[ceil(place)]
    return low + (high - low) * (place - floor(place))
