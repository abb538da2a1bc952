"""What is expected after what was seen: every rule by numbers worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.profile import LEAST, POINTS, WINDOW, Line, Profile, fit, relative_error, surprising
from scheduler.core.state import Kind, Outlook, Segment

PRIOR = Outlook(
    rollout=(
        Segment(Kind.PREFILL, 2, late_seconds=3),
        Segment(Kind.DECODE, 10, 12, batch=200, forward_seconds=0.03, floor_seconds=0.01, bandwidth=0.4),
        Segment(Kind.TAIL, 8, 9, batch=100, forward_seconds=0.02, floor_seconds=0.01, bandwidth=0.2),
    ),
    train=(Segment(Kind.GRADE, 1), Segment(Kind.UPDATE, 6, late_seconds=7, early=True)),
)
PREFILL, DECODE, TAIL = 0, 1, 2


def seen(part: int, *seconds: float, chain="rollout", profile: Profile | None = None) -> Profile:
    profile = profile or Profile.of(PRIOR)
    for one in seconds:
        profile = profile.observe(chain, part, one)
    return profile


def expected(profile: Profile, part: int, chain="rollout") -> tuple[float, float]:
    segment = getattr(profile.outlook(), chain)[part]
    return segment.seconds, segment.late_seconds


def decoded(*points: tuple[int, float], prior: Outlook = PRIOR) -> Profile:
    profile = Profile.of(prior)
    for batch, forward in points:
        profile = profile.observe("rollout", DECODE, 10, batch, forward)
    return profile


# ---------------------------------------------------------------- seconds


def test_before_anything_was_seen_the_prior_is_expected():
    assert Profile.of(PRIOR).outlook() == PRIOR
    assert Profile.of(Outlook()).outlook() == Outlook()


def test_the_first_observation_replaces_the_prior_and_the_next_ones_weigh_a_quarter():
    assert expected(seen(DECODE, 20), DECODE) == (20, 20)
    assert expected(seen(DECODE, 20, 28), DECODE)[0] == 22
    assert expected(seen(DECODE, 20, 28, 10), DECODE)[0] == 19
    assert expected(seen(1, 4, 8, chain="train"), 1, "train") == (5, 7)


def test_a_part_changes_no_other():
    profile = seen(DECODE, 20)
    outlook = profile.outlook()
    assert (outlook.rollout[PREFILL], outlook.rollout[TAIL]) == (PRIOR.rollout[PREFILL], PRIOR.rollout[TAIL])
    assert outlook.train == PRIOR.train
    outlook = seen(1, 4, chain="train").outlook()
    assert (outlook.rollout, outlook.train[0]) == (PRIOR.rollout, PRIOR.train[0])
    assert outlook.train[1] == Segment(Kind.UPDATE, 4, 4, early=True)


def test_observing_leaves_the_profile_as_it_was():
    profile = Profile.of(PRIOR)
    seen(DECODE, 20, profile=profile)
    assert profile == Profile.of(PRIOR)


def test_a_tail_is_the_median_and_the_upper_quartile():
    # Places 0.5 * 3 = 1.5 and 0.75 * 3 = 2.25 of 2, 4, 6, 50.
    assert expected(seen(TAIL, 4, 50, 2, 6), TAIL) == (5, 6 + 0.25 * 44)
    assert expected(seen(TAIL, 7), TAIL) == (7, 7)
    # Of 1 .. 5: the third and the fourth.
    assert expected(seen(TAIL, 3, 1, 5, 2, 4), TAIL) == (3, 4)


def test_a_tail_remembers_the_last_eight():
    assert WINDOW == 8
    # Eight values 1 .. 8: places 3.5 and 5.25.
    assert expected(seen(TAIL, 99, 99, *range(1, 9)), TAIL) == (4.5, 6.25)


def test_others_are_late_by_the_quartile_of_the_same_window():
    # Mean: 8 -> 8 + (4 - 8) / 4 = 7 -> 7 + (12 - 7) / 4 = 8.25. Quartile of 4, 8, 12: place 1.5.
    assert expected(seen(PREFILL, 8, 4, 12), PREFILL) == (8.25, 10)


def test_late_is_never_before_what_is_expected():
    # Mean 40 -> 30 -> 22.5 -> 16.875 -> 12.65625; quartile of 0, 0, 0, 0, 40 is 0.
    assert expected(seen(PREFILL, 40, 0, 0, 0, 0), PREFILL) == (12.65625, 12.65625)


def test_parts_that_do_not_occur_lower_what_is_expected():
    assert expected(seen(DECODE, 0), DECODE) == (0, 0)
    assert expected(seen(DECODE, 20, 0), DECODE)[0] == 15
    assert expected(seen(TAIL, 6, 0, 0), TAIL) == (0, 3)


# ---------------------------------------------------------------- batch curve


def test_batch_and_forward_are_means_of_those_that_occurred():
    profile = decoded((240, 0.04), (200, 0.036))
    profile = profile.observe("rollout", DECODE, 0)
    segment = profile.outlook().rollout[DECODE]
    assert segment.batch == 230
    assert segment.forward_seconds == pytest.approx(0.039)
    assert segment.bandwidth == 0.4
    assert segment.seconds == 7.5


def test_the_curve_is_fitted_through_what_was_seen():
    # 0.01 + 0.0001 * n; the prior would say 0.0001 * n.
    profile = decoded((100, 0.02), (200, 0.03)).observe("rollout", TAIL, 5, 50, 0.015)
    assert profile.forward_at(300) == pytest.approx(0.04)
    assert profile.forward_at(0) == pytest.approx(0.01)
    assert profile.outlook().rollout[DECODE].floor_seconds == pytest.approx(0.01)
    assert profile.outlook().rollout[TAIL].floor_seconds == pytest.approx(0.01)


def test_least_squares_by_hand():
    # Means 2 and 4; (1, 3), (2, 3), (3, 6): slope (1 + 0 + 2) / 2.
    assert fit([1, 2, 3], [3, 3, 6]) == Line(1.0, 1.5)
    # The line would be 3 * n - 2: through the origin instead, (1 + 8) / 5.
    assert fit([1, 2], [1, 4]) == Line(0.0, 1.8)
    # Falling: the mean.
    assert fit([1, 3], [5, 3]) == Line(4.0, 0.0)


def test_only_the_last_points_are_fitted():
    old = [(100, 9.0), (200, 1.0)] * POINTS
    new = [(100, 0.02), (200, 0.03)] * (POINTS // 2)
    assert decoded(*old, *new).forward_at(300) == pytest.approx(0.04)
    assert decoded(*old, *new[1:]).forward_at(300) > 0.1


def test_before_points_the_prior_has_a_curve():
    # Through (200, 0.03) and (100, 0.02).
    assert Profile.of(PRIOR).forward_at(50) == pytest.approx(0.015)
    single = Outlook((PRIOR.rollout[PREFILL], PRIOR.rollout[DECODE]))
    # 0.01 is the floor, the other 0.02 belong to 200 sequences.
    assert Profile.of(single).forward_at(50) == pytest.approx(0.015)
    assert Profile.of(Outlook(train=PRIOR.train)).forward_at(50) == 0


def test_one_batch_size_scales_the_priors_curve():
    profile = decoded((200, 0.05), (200, 0.07))  # 0.06 on average is twice the prior's
    assert profile.forward_at(200) == pytest.approx(0.06)
    assert profile.forward_at(50) == pytest.approx(0.03)
    assert profile.outlook().rollout[DECODE].floor_seconds == pytest.approx(0.02)


def test_one_batch_size_without_a_prior_curve_says_only_that():
    prior = Outlook((Segment(Kind.PREFILL, 1), Segment(Kind.DECODE, 1)))
    profile = decoded((200, 0.05), prior=prior)
    assert profile.forward_at(200) == profile.forward_at(10) == 0.05


def test_a_floor_is_not_above_the_forward():
    # Falling points: the line is their mean 0.03; the decode's own forward is less.
    profile = decoded((200, 0.02)).observe("rollout", TAIL, 5, 100, 0.04)
    decode = profile.outlook().rollout[DECODE]
    assert (decode.forward_seconds, decode.floor_seconds) == (0.02, 0.02)


# ---------------------------------------------------------------- errors


def test_errors_are_of_what_was_predicted_before():
    profile = Profile.of(PRIOR)
    assert profile.error("rollout", DECODE) is None
    profile = seen(DECODE, 15)  # the prior said 10
    assert profile.error("rollout", DECODE) == 0.5
    profile = seen(DECODE, 12, profile=profile)  # 15 was expected: 0.2
    assert profile.error("rollout", DECODE) == pytest.approx(0.5 + (0.2 - 0.5) / 4)
    assert profile.error("rollout", TAIL) is None
    assert seen(1, 6, chain="train").error("train", 1) == 0


def test_a_tails_error_is_of_its_median():
    # Errors: of 8 seen 10: 0.25; of 10 seen 10: 0; of 10 seen 40: 3; of 10 (the median) seen 10: 0.
    profile = seen(TAIL, 10, 10, 40, 10)
    by_hand = 0.25
    for error in (0, 3, 0):
        by_hand += (error - by_hand) / 4
    assert profile.error("rollout", TAIL) == pytest.approx(by_hand)


def test_relative_errors_with_nothing():
    assert relative_error(0, 0) == 0
    assert relative_error(5, 0) == 1
    assert relative_error(0, 5) == 1


@pytest.mark.parametrize(
    ("predicted", "came", "is_surprise"),
    [(100, 125, False), (100, 126, True), (100, 75, False), (100, 74, True), (0, 0, False), (0, 1, True)],
)
def test_more_than_a_quarter_off_is_a_surprise(predicted, came, is_surprise):
    assert surprising(predicted, came) is is_surprise


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("rollout", 3, 1.0), "rollout part 3 is not one of the 3"),
        (("train", -1, 1.0), "train part -1 is not one of the 2"),
        (("train", 0, -1.0), "train part 0: seconds is -1.0"),
        (("train", 0, float("nan")), "train part 0: seconds is nan"),
        (("rollout", 1, 1.0, -2), "rollout part 1: batch is -2"),
        (("rollout", 1, 1.0, 2, float("inf")), "rollout part 1: forward_seconds is inf"),
    ],
)
def test_what_cannot_be_is_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        Profile.of(PRIOR).observe(*arguments)


OBSERVED = st.tuples(
    st.integers(0, 2),
    st.floats(0, 1e4),
    st.integers(0, 512),
    st.floats(0, 1).filter(lambda f: f == 0 or f > 1e-4),
)


@given(st.lists(OBSERVED, max_size=80))
def test_whatever_was_seen_the_outlook_is_one_a_planner_can_use(observations):
    profile = Profile.of(PRIOR)
    for part, seconds, batch, forward in observations:
        profile = profile.observe("rollout", part, seconds, batch, forward)
    assert len(profile.points) <= POINTS
    for part, segment in zip(profile.rollout, profile.outlook().rollout, strict=True):
        assert len(part.window) <= WINDOW
        assert 0 <= segment.seconds <= segment.late_seconds
        assert segment.batch >= 1
        assert 0 <= segment.floor_seconds <= segment.forward_seconds
    assert 0 <= profile.forward_at(1) <= profile.forward_at(100) * (1 + 1e-9)


@given(st.lists(st.floats(1, 100), min_size=1, max_size=20), st.sampled_from([DECODE, TAIL]))
def test_what_is_expected_lies_among_what_was_seen(seconds, part):
    expected_seconds, late = expected(seen(part, *seconds), part)
    assert min(seconds) - 1e-9 <= expected_seconds <= max(seconds) + 1e-9
    assert late <= max(seconds) + 1e-9


# ---------------------------------------------------------------- what does occur


def test_a_decode_is_predicted_for_the_batch_that_runs():
    """The line through the prior is 10 ms and a tenth a sequence: 20 ms at 100, 15 ms at 50."""
    profile = Profile.of(PRIOR)
    tail = profile.predicted("rollout", TAIL, 50)
    assert (tail.batch, tail.seconds, tail.forward_seconds) == pytest.approx((50, 6.0, 0.015))
    assert profile.predicted("rollout", PREFILL, 50) == PRIOR.rollout[PREFILL]
    assert profile.predicted("train", 1, 50).seconds == 6


def test_what_occurs_though_it_was_not_expected_takes_what_the_next_band_takes():
    prior = Outlook(rollout=(Segment(Kind.DECODE, 0), Segment(Kind.TAIL, 4)), train=(Segment(Kind.GRADE, 0),))
    assert Profile.of(prior).predicted("rollout", 0, 1).seconds == 4
    assert Profile.of(prior).predicted("train", 0, 1).seconds == LEAST
    with pytest.raises(ValueError, match="train part 1"):
        Profile.of(prior).predicted("train", 1, 1)
