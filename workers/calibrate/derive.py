"""From measured seconds to the numbers that the planner uses; pure arithmetic.

Measurements are noisy, physics is not: more of a device never makes a sub-stage slower, company never makes
it faster, and a larger batch never makes a decode step shorter. Values that say otherwise are put right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from workers.calibrate.work import Character

Pair = tuple[Character, Character]

#: Doubling a batch beyond saturation gives less than this much more tokens a second.
WORTH_DOUBLING = 1 / 3
#: What a decode step costs before its first sequence is never nothing.
LEAST_FLOOR_S = 1e-6
#: Digits that are kept of a factor.
DIGITS = 4

#: Whose measurement stands in for that of a character which was left out: the same resource binds both.
STAND_IN = {
    Character.PREFILL: Character.UPDATE,
    Character.LOGPROB: Character.UPDATE,
    Character.TAIL: Character.DECODE,
    Character.THIN: Character.DECODE,
}


def slowdowns(seconds: Sequence[float]) -> tuple[float, ...]:
    """Of one character by ascending shares, against the last: falling to 1.

    >>> slowdowns([3.0, 3.2, 2.0])
    (1.6, 1.6, 1.0)
    """
    ratios = [second / seconds[-1] for second in reversed(seconds)]
    return tuple(round(ratio, DIGITS) for ratio in reversed(list(accumulate(ratios, max))))


def alone(seconds: Mapping[Character, Sequence[float]]) -> dict[Character, tuple[float, ...]]:
    """Slow-downs of every character, from seconds by ascending shares of those that were measured."""
    return {name: slowdowns(seconds[name if name in seconds else STAND_IN[name]]) for name in Character}


def beside(together: float, alone: float) -> float:
    """What company costs on top of having a part of the device only; both with the same part."""
    return max(1.0, round(together / alone, DIGITS))


def filled(measured: Mapping[Pair, float]) -> dict[Pair, float]:
    """Every pair that was measured, or whose stand-ins were: its own value first, then the nearest."""
    found: dict[Pair, float] = {}
    for own in Character:
        for partner in Character:
            nearest = (
                (own, partner),
                (own, STAND_IN.get(partner, partner)),
                (STAND_IN.get(own, own), partner),
                (STAND_IN.get(own, own), STAND_IN.get(partner, partner)),
            )
            known = [measured[pair] for pair in nearest if pair in measured]
            if known:
                found[own, partner] = known[0]
    return found


def rising(step_s: Mapping[int, float]) -> dict[int, float]:
    """Seconds of a decode step by batch, none shorter than that of a smaller batch."""
    ordered = sorted(step_s)
    return dict(zip(ordered, accumulate((step_s[batch] for batch in ordered), max), strict=True))


def saturation(step_s: Mapping[int, float]) -> int:
    """The least batch from which each doubling gives less than a third more tokens a second; the largest
    measured where doubling was worth it up to there. ``step_s``: seconds of a step by powers of two.
    """
    ordered = sorted(step_s)
    for batch, double in reversed(list(pairwise(ordered))):
        gain = (double / step_s[double]) / (batch / step_s[batch]) - 1
        if gain >= WORTH_DOUBLING:
            return double
    return ordered[0]


def decode_line(step_s: Mapping[int, float]) -> tuple[float, float]:
    """(floor, row): seconds of a decode step of n sequences are about ``floor + row * n``.

    Least squares of the relative errors, so that small batches count as much as large ones; needs two
    batches.
    """
    n2 = sum((batch / s) ** 2 for batch, s in step_s.items())
    n1 = sum(batch / s**2 for batch, s in step_s.items())
    ones = sum(1 / s**2 for s in step_s.values())
    n_by_s = sum(batch / s for batch, s in step_s.items())
    by_s = sum(1 / s for s in step_s.values())
    row = (n_by_s * ones - by_s * n1) / (n2 * ones - n1 * n1)
    if row < 0:
        return by_s / ones, 0.0
    floor = (by_s - row * n1) / ones
    return (floor, row) if floor > 0 else (LEAST_FLOOR_S, n_by_s / n2)
