"""Priors, predictions and what was seen: every number worked out by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from backend.pool.models import Allotment, SubStage
from scheduler.core.profile import Profile
from scheduler.core.state import Kind, Mode, Outlook, Segment
from scheduler.shell import priors
from scheduler.shell.profiles import dump, load, observed, solo_seconds
from tests import factories
from workers.protocol import Rates

RATES = Rates(prefill_s=0.01, decode_floor_s=1.0, decode_row_s=0.1, logprob_s=0.1, update_s=0.5, sync_s=3)
START = datetime(2026, 1, 1, tzinfo=UTC)


def spec(**fields):
    """4 prompts of 8 samples, up to 64 tokens."""
    rl = fields.pop("rl", {})
    made = factories.spec("m", "f", **rl)
    return made.model_validate({**made.model_dump(), **fields})


def seconds(outlook: Outlook) -> list[tuple[str, float]]:
    return [(segment.kind.value, segment.seconds) for segment in (*outlook.rollout, *outlook.train)]


def test_a_prior_shrinks_the_batch_along_a_line():
    """32 sequences end over 64 forwards, two forwards each: 17 of them down to 15, whose forwards take 3.35 s
    in the mean, then 8 down to 7 (2.15 s), then 7 (1.4 s).
    """
    outlook = priors.prior(spec(), RATES, saturation=16, prompt_tokens=10, streams=False)
    assert seconds(outlook) == [
        ("prefill", pytest.approx(0.4)),
        ("decode", pytest.approx(17 * 2 * 3.4)),
        ("tail", 0.0),
        ("tail", pytest.approx(8 * 2 * 2.15)),
        ("tail", pytest.approx(7 * 2 * 1.4)),
        ("grade", priors.GRADE_S),
        ("update", pytest.approx((4 * 10 + 32 * 32) * 0.5)),
        ("sync", 3.0),
    ]
    assert [segment.batch for segment in outlook.rollout[1:]] == [32, 0, 15, 7]


def test_an_early_update_takes_its_part_and_games_wait_for_their_slowest_answers():
    streams = priors.prior(spec(), RATES, 16, 10, streams=True)
    assert [(s.kind, s.early) for s in streams.train] == [
        (Kind.UPDATE, True),
        (Kind.GRADE, False),
        (Kind.UPDATE, False),
        (Kind.SYNC, False),
    ]
    assert streams.train[0].seconds == pytest.approx(streams.train[2].seconds) == pytest.approx(266)
    game = {"type": "guessing_game", "max_turns": 3, "delay_s": (0.5, 2.0)}
    assert priors.prior(spec(environment=game), RATES, 16, 10, False).rollout[-1] == Segment(
        Kind.TOOL, 4.0, pytest.approx(5.2), 32
    )


def test_shapes_say_how_steps_follow():
    both = (0, 1)
    wide = priors.shape(spec(rl={"devices": 2}), streams=True)
    assert (wide.rollout_workers, wide.train_workers, wide.mode) == (both, both, Mode.STREAM)
    late = priors.shape(spec(rl={"mode": {"type": "async", "max_staleness": 2}}), streams=False)
    assert (late.mode, late.max_staleness) == (Mode.ASYNC, 2)


# ---------------------------------------------------------------- what was seen


def allotment(start: float, end: float | None, speed: float) -> Allotment:
    return Allotment(
        start=START + timedelta(seconds=start),
        end=None if end is None else START + timedelta(seconds=end),
        speed=speed,
    )


def test_time_beside_others_counts_as_long_as_it_would_have_taken_alone():
    assert solo_seconds([allotment(0, 4, 0.5), allotment(4, 6, 1.0), allotment(6, None, 1.0)]) == 4


PRIOR = Outlook(
    rollout=(
        Segment(Kind.PREFILL, 9),
        Segment(Kind.DECODE, 9),
        Segment(Kind.TAIL, 9, batch=8, forward_seconds=1),
    ),
    train=(Segment(Kind.GRADE, 9), Segment(Kind.UPDATE, 9)),
)


def row(pk: int, kind: str, part: int, end: float, worker: int = 0, **fields) -> SubStage:
    begun, over = START + timedelta(seconds=end - 1), START + timedelta(seconds=end)
    fields = {"sequences": 8, "started_at": begun, "ended_at": over, **fields}
    return SubStage(pk=pk, kind=kind, part=part, worker=worker, **fields)


def test_a_step_adds_the_sum_of_each_part_and_what_did_not_occur():
    rows = [
        row(1, "prefill", 0, 1),
        row(2, "tail", 2, 2, forwards=4),
        row(3, "tail", 2, 4, sequences=3, forwards=2),
        row(4, "grade", 0, 4.5),
        row(5, "update", 1, 6),
    ]
    seen = observed(Profile.of(PRIOR), rows, {1: 1.0, 2: 2.0, 3: 1.0, 5: 5.0})
    assert seconds(seen.outlook()) == [
        ("prefill", 1.0),
        ("decode", 0.0),
        ("tail", 3.0),
        ("grade", 0.5),  # it began with the first answers, and half a second was left after the last
        ("update", 5.0),
    ]
    assert seen.points == ((8, 0.5),)


def test_workers_whose_sequences_moved_say_nothing_and_gangs_count_by_their_mean():
    rows = [
        row(1, "tail", 2, 2, moves_to="elsewhere"),
        row(2, "tail", 2, 2, worker=1),
        row(3, "update", 1, 6),
        row(4, "update", 1, 6, worker=1),
    ]
    seen = observed(Profile.of(PRIOR), rows, {1: 1.0, 2: 7.0, 3: 2.0, 4: 4.0}).outlook()
    assert (seen.rollout[2].seconds, seen.train[1].seconds) == (7.0, 3.0)


def test_what_was_kept_comes_back_and_another_chain_begins_anew():
    profile = observed(Profile.of(PRIOR), [row(1, "tail", 2, 2, forwards=4)], {1: 2.0})
    kept = {"streams": True, **dump(profile)}
    assert load(kept, PRIOR) == profile
    assert load({"streams": True}, PRIOR) == Profile.of(PRIOR)
    other = Outlook(rollout=PRIOR.rollout)
    assert load(kept, other) == Profile.of(other)
