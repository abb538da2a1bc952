"""From measured seconds to the numbers that the planner uses; pure arithmetic.

Measurements are noisy, physics is not: more of a device never makes a sub-stage slower, company never makes
it faster, and a larger batch never makes a decode step shorter. Values that say otherwise are put right.
Other programs only ever add time: it is taken from the repetitions that they disturbed least.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

from workers.calibrate.waiting import Piece
from workers.calibrate.work import Character

Pair = tuple[Character, Character]

#: Doubling a batch beyond saturation gives less than this much more tokens a second.
WORTH_DOUBLING = 1 / 3
#: What a decode step costs before its first sequence is never nothing.
LEAST_FLOOR_S = 1e-6
#: Digits that are kept of a factor.
DIGITS = 4
#: What waited for processors for a larger share of its time was disturbed, and is measured again.
CALM = 0.05

#: Whose measurement stands in for that of a character which was left out: the same resource binds both.
STAND_IN = {
    Character.PREFILL: Character.UPDATE,
    Character.LOGPROB: Character.UPDATE,
    Character.TAIL: Character.DECODE,
    Character.THIN: Character.DECODE,
}


def calmest(pieces: Sequence[Piece]) -> list[Piece]:
    """Those that were not disturbed; where all were, the half that was so least: what is left of one piece
    without its waiting is not exact.
    """
    calm = [piece for piece in pieces if piece.disturbed <= CALM]
    return calm or sorted(pieces, key=lambda piece: piece.disturbed)[: (len(pieces) + 1) // 2]


def typical(pieces: Sequence[Piece]) -> float:
    """Seconds without waiting: the lower quartile.

    A median rises when the machine is slow for a while for reasons that nobody counts. The least falls with
    the number of repetitions, and beside another it is the piece that happened to have no company.

    >>> typical([Piece(seconds, 0.0) for seconds in (3.0, 1.0, 9.0, 2.0, 8.0)])
    2.0
    """
    ordered = sorted(piece.undisturbed for piece in pieces)
    return ordered[(len(ordered) - 1) // 4]


def disturbed(pieces: Iterable[Piece]) -> float | None:
    """Share of their time that they waited for processors; None where that is not known."""
    pairs = [(piece.seconds, piece.waited) for piece in pieces]
    known = [waited for _, waited in pairs if waited is not None]
    if len(known) < len(pairs) or not pairs:
        return None
    return round(sum(known) / sum(seconds for seconds, _ in pairs), DIGITS)


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
