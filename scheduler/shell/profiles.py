"""What was seen of an attempt's steps, between the rows and the core's ``Profile``.

A sub-stage that ran beside others counts as long as it would have taken alone: the sum over its allotments of
seconds times the speed it was given. Sums are per step, worker and part, for in an environment a part occurs
in every turn. Workers whose sequences moved to another say nothing about rollouts of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from backend.pool.models import Allotment, SubStage
from scheduler.core.profile import Part, Profile
from scheduler.core.state import OFF_DEVICE, ROLLOUT, Kind, Outlook, Segment

#: Kinds of the rollouts' chain; the others are the trainers'.
ROLLING = ROLLOUT | {Kind.TOOL}


def dump(profile: Profile) -> dict[str, Any]:
    return {
        "rollout": [asdict(part) for part in profile.rollout],
        "train": [asdict(part) for part in profile.train],
        "points": profile.points,
    }


def load(stored: Mapping[str, Any], prior: Outlook) -> Profile:
    """What was kept; nothing was seen yet where it is empty, or is of another chain than ``prior``."""
    kept = Profile(
        tuple(map(_part, stored.get("rollout", ()))),
        tuple(map(_part, stored.get("train", ()))),
        tuple((int(batch), float(seconds)) for batch, seconds in stored.get("points", ())),
    )
    kinds = [part.prior.kind for part in (*kept.rollout, *kept.train)]
    if kinds != [segment.kind for segment in (*prior.rollout, *prior.train)]:
        return Profile.of(prior)
    return kept


def _part(stored: Mapping[str, Any]) -> Part:
    prior = Segment(**{**stored["prior"], "kind": Kind(stored["prior"]["kind"])})
    return Part(**{**stored, "prior": prior, "window": tuple(stored["window"])})


# ---------------------------------------------------------------- what was seen


def solo_seconds(allotments: Iterable[Allotment]) -> float:
    """Of those that are over."""
    return sum((one.end - one.start).total_seconds() * one.speed for one in allotments if one.end is not None)


@dataclass(frozen=True, slots=True)
class Seen:
    """One part of one worker in one step."""

    seconds: float
    batch: int = 0
    forward_seconds: float = 0.0


def observed(profile: Profile, substages: Sequence[SubStage], done: Mapping[int, float]) -> Profile:
    """After a step: its sub-stages in the order in which they ended, and by their keys the solo seconds of
    those that ran on devices.
    """
    rolled, trained = _by_worker(substages, done)
    moved = {row.worker for row in substages if row.moves_to}
    for worker, parts in sorted(rolled.items()):
        for part in range(len(profile.rollout)) if worker not in moved else ():
            seen = parts.get(part, Seen(0.0))
            profile = profile.observe("rollout", part, seen.seconds, seen.batch, seen.forward_seconds)
    for part in range(len(profile.train)) if trained else ():
        seconds = [parts[part].seconds if part in parts else 0.0 for parts in trained.values()]
        profile = profile.observe("train", part, fmean(seconds))
    return profile


def _by_worker(
    substages: Sequence[SubStage], done: Mapping[int, float]
) -> tuple[dict[int, dict[int, Seen]], dict[int, dict[int, Seen]]]:
    """The rollouts' and the trainers' parts by worker."""
    found: dict[bool, dict[int, dict[int, list[SubStage]]]] = {
        rolls: defaultdict(lambda: defaultdict(list)) for rolls in (True, False)
    }
    for row in substages:
        found[Kind(row.kind) in ROLLING][row.worker][row.part].append(row)
    ends = [r.ended_at.timestamp() for r in substages if Kind(r.kind) in ROLLING and r.ended_at is not None]
    over = max(ends, default=0.0)
    rolled, trained = (
        {
            worker: {part: _seen(rows, done, over) for part, rows in parts.items()}
            for worker, parts in found[rolls].items()
        }
        for rolls in (True, False)
    )
    return rolled, trained


def _seen(rows: Sequence[SubStage], done: Mapping[int, float], over: float) -> Seen:
    kind = Kind(rows[0].kind)
    if kind in OFF_DEVICE:
        return Seen(sum(_host_seconds(row, over if kind is Kind.GRADE else 0.0) for row in rows))
    seconds = sum(done.get(row.pk, 0.0) for row in rows)
    forwards = sum(row.forwards for row in rows)
    if kind not in ROLLOUT or not forwards:
        return Seen(seconds)
    return Seen(seconds, rows[0].sequences, seconds / forwards)


def _host_seconds(row: SubStage, since: float) -> float:
    """How long it went on after ``since``: grading beside rollouts costs the step nothing."""
    if row.started_at is None or row.ended_at is None:
        return 0.0
    return max(0.0, row.ended_at.timestamp() - max(row.started_at.timestamp(), since))
