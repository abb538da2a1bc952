"""Advantages by hand: every baseline, what is left out, and where rewards land."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.rl.advantages import Outcome, estimate, gae, leave_one_out_advantages, shaped, teaches
from workers.spec import RLConfig

GROUPED = ["grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo"]


def config(algorithm: str, **changes: Any) -> RLConfig:
    return RLConfig.model_validate({"algorithm": algorithm} | changes)


def group(*rewards: float | None, of: int = 0, tokens: int = 2) -> list[Outcome]:
    return [Outcome(of, reward, [True] * tokens) for reward in rewards]


def firsts(spec: RLConfig, outcomes: list[Outcome]) -> list[float]:
    return [row[0] for row in estimate(spec, outcomes).advantages]


# ---------------------------------------------------------------- groups


@pytest.mark.parametrize("algorithm", GROUPED)
def test_eight_equal_rewards_teach_exactly_nothing(algorithm: str) -> None:
    assert firsts(config(algorithm), group(*[0.97] * 8)) == [0.0] * 8


def test_a_group_is_compared_with_itself_alone() -> None:
    spec = config("dr_grpo")
    assert firsts(spec, group(1, 2, 6) + group(10, 20, of=1)) == [-2, -1, 3, -5, 5]


def test_grpo_divides_by_the_deviation_of_the_group() -> None:
    # Deviation of 1, 2, 6 about 3: sqrt((4 + 1 + 9) / 2).
    deviation = 7**0.5 + 1e-4
    expected = [-2 / deviation, -1 / deviation, 3 / deviation]
    assert firsts(config("grpo"), group(1, 2, 6)) == pytest.approx(expected)


def test_leave_one_out_by_hand() -> None:
    # The others of 1 are 2 and 6, of 2 are 1 and 6, of 6 are 1 and 2.
    assert firsts(config("rloo"), group(1, 2, 6)) == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5])


def test_leave_one_out_stays_bounded_where_one_fails() -> None:
    found = leave_one_out_advantages([0.96] * 7 + [0.0], [True] * 8)
    assert found == pytest.approx([0.96 / 7] * 7 + [-0.96])


def test_rloo_normalizes_over_the_batch() -> None:
    spec = config("rloo", normalize_advantage=True)
    # Advantages -2, 2, -6, 6: mean 0, deviation sqrt(80 / 3).
    found = firsts(spec, group(1, 3) + group(0, 6, of=1))
    deviation = math.sqrt(80 / 3) + 1e-4
    assert found == pytest.approx([value / deviation for value in (-2, 2, -6, 6)])


@pytest.mark.parametrize("algorithm", GROUPED)
@pytest.mark.parametrize("nothing", [None, math.nan, math.inf, -math.inf])
def test_what_has_no_reward_is_left_out_of_its_group(algorithm: str, nothing: float | None) -> None:
    spec = config(algorithm)
    found = firsts(spec, group(1.0, nothing, 3.0))
    assert found[1] == 0
    assert [found[0], found[2]] == firsts(spec, group(1.0, 3.0))


@pytest.mark.parametrize("algorithm", [*GROUPED, "reinforce_pp"])
def test_a_step_without_any_reward_is_zero_everywhere(algorithm: str) -> None:
    assert firsts(config(algorithm), group(None, math.nan)) == [0.0, 0.0]


def test_an_unsampled_token_has_no_advantage() -> None:
    answered = Outcome(0, 1.0, [True, False, True])
    found = estimate(config("dr_grpo"), [answered, Outcome(0, 0.0, [True])]).advantages
    assert found == [[0.5, 0.0, 0.5], [-0.5]]


def test_a_penalty_in_the_reward_counts_before_the_comparison() -> None:
    spec = config("dr_grpo", loss={"kl_beta": 0.5, "kl_in": "reward"})
    one = Outcome(0, 1.0, [True, False, True], kl=[0.2, 99.0, 0.4])
    other = Outcome(0, 1.0, [True], kl=[0.0])
    # 1 - 0.5 * 0.6 = 0.7 against 1: what an environment wrote costs nothing.
    assert firsts(spec, [one, other]) == pytest.approx([-0.15, 0.15])
    with pytest.raises(ValueError, match="each token's divergence"):
        estimate(spec, group(1.0, 2.0))


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12))
def test_group_advantages_add_up_to_nothing(rewards: list[float]) -> None:
    for algorithm in ("dr_grpo", "grpo", "rloo"):
        found = firsts(config(algorithm), group(*rewards))
        assert abs(sum(found)) <= 1e-9 * max(1.0, *map(abs, found)) * len(found)
        assert all(math.isfinite(value) for value in found)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8), st.randoms())
def test_order_within_a_group_changes_nothing(rewards: list[float], chance: Any) -> None:
    order = list(range(len(rewards)))
    chance.shuffle(order)
    found = firsts(config("grpo"), group(*rewards))
    assert firsts(config("grpo"), group(*(rewards[at] for at in order))) == pytest.approx(
        [found[at] for at in order], rel=1e-9, abs=1e-9
    )


# ---------------------------------------------------------------- REINFORCE++


def test_reinforce_pp_normalizes_over_tokens() -> None:
    """Three tokens of the one with 1, one of the other with 5: mean 2, squares 1 + 1 + 1 + 9 over 3."""
    outcomes = [Outcome(0, 1.0, [True] * 3), Outcome(1, 5.0, [True])]
    found = estimate(config("reinforce_pp", group_size=1), outcomes).advantages
    assert found[0] == pytest.approx([-1 / 2.0001] * 3)
    assert found[1] == pytest.approx([3 / 2.0001])


def test_reinforce_pp_with_a_group_baseline() -> None:
    spec = config("reinforce_pp", group_baseline=True, normalize_advantage=False)
    outcomes = group(1, 3, tokens=1) + group(10, 20, of=1, tokens=1)
    assert firsts(spec, outcomes) == [-1, 1, -5, 5]
    assert firsts(config("reinforce_pp", normalize_advantage=False), outcomes) == [1, 3, 10, 20]


def test_a_group_baseline_of_equal_rewards_leaves_exactly_nothing() -> None:
    spec = config("reinforce_pp", group_baseline=True)
    assert firsts(spec, group(*[0.97] * 8)) == [0.0] * 8


def test_reinforce_pp_pays_for_divergence_from_each_token_on() -> None:
    spec = config("reinforce_pp", normalize_advantage=False, loss={"kl_beta": 0.1, "kl_in": "reward"})
    found = estimate(spec, [Outcome(0, 1.0, [True, True], kl=[2.0, 3.0])]).advantages
    assert found == [pytest.approx([1 - 0.5, 1 - 0.3])]


def test_a_turns_reward_counts_from_its_own_tokens_back() -> None:
    """Two turns with a token of the environment between them: 2 for the first, 1 at the end."""
    spec = config("reinforce_pp", normalize_advantage=False)
    talk = Outcome(0, 3.0, [True, True, False, True], turn_rewards={1: 2.0})
    assert estimate(spec, [talk]).advantages == [[3.0, 3.0, 0.0, 1.0]]


def test_the_terminal_reward_lands_on_the_last_sampled_token() -> None:
    spec = config("ppo", normalize_advantage=False, value={"gamma": 0.5, "lam": 1.0})
    ended = Outcome(0, 8.0, [True, True, True, False], values=[0.0] * 4)
    assert estimate(spec, [ended]).advantages == [[2.0, 4.0, 8.0, 0.0]]


# ---------------------------------------------------------------- PPO


def test_gae_by_hand() -> None:
    # d_2 = 1 - 0.5 = 0.5; d_1 = 0.9 * 0.5 - 0.4 = 0.05; d_0 = 0.9 * 0.4 - 0.2 = 0.16; 0.9 * 0.8 a step.
    advantages, returns = gae(np.array([0.0, 0.0, 1.0]), np.array([0.2, 0.4, 0.5]), gamma=0.9, lam=0.8)
    assert advantages.tolist() == pytest.approx([0.16 + 0.72 * 0.41, 0.05 + 0.72 * 0.5, 0.5])
    assert returns.tolist() == pytest.approx([0.16 + 0.72 * 0.41 + 0.2, 0.41 + 0.4, 1.0])


def test_lambda_1_is_the_return_less_the_value_and_lambda_0_one_step() -> None:
    rewards, values = np.array([1.0, 2.0, 4.0]), np.array([0.5, 0.25, 0.125])
    whole, _ = gae(rewards, values, gamma=1.0, lam=1.0)
    assert whole.tolist() == pytest.approx([7 - 0.5, 6 - 0.25, 4 - 0.125])
    step, _ = gae(rewards, values, gamma=1.0, lam=0.0)
    assert step.tolist() == pytest.approx([1 + 0.25 - 0.5, 2 + 0.125 - 0.25, 4 - 0.125])


def test_values_pass_over_what_an_environment_wrote() -> None:
    spec = config("ppo", normalize_advantage=False, value={"gamma": 0.9, "lam": 0.8})
    gaps = Outcome(0, 1.0, [True, False, False, True, True], values=[0.2, 7.0, 7.0, 0.4, 0.5])
    plain = Outcome(0, 1.0, [True, True, True], values=[0.2, 0.4, 0.5])
    found, straight = estimate(spec, [gaps]), estimate(spec, [plain])
    assert [found.advantages[0][at] for at in (0, 3, 4)] == straight.advantages[0]
    assert found.advantages[0][1:3] == [0.0, 0.0]
    assert found.returns is not None
    assert straight.returns is not None
    assert [found.returns[0][at] for at in (0, 3, 4)] == straight.returns[0]


def test_ppo_normalizes_advantages_and_leaves_returns() -> None:
    spec = config("ppo", value={"gamma": 1.0, "lam": 1.0})
    outcomes = [Outcome(0, 1.0, [True], values=[0.0]), Outcome(0, 3.0, [True], values=[0.0])]
    found = estimate(spec, outcomes)
    deviation = 2**0.5 + 1e-4
    assert [row[0] for row in found.advantages] == pytest.approx([-1 / deviation, 1 / deviation])
    assert found.returns == [[1.0], [3.0]]


def test_ppo_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="value head"):
        estimate(config("ppo"), group(1.0))


# ---------------------------------------------------------------- shapes of rewards


def test_the_overlong_penalty_by_hand() -> None:
    spec = config("dapo", sampling={"max_tokens": 100}, overlong_buffer=20, overlong_penalty=2.0)
    lengths = {80: 1.0, 81: 0.9, 90: 0.0, 100: -1.0, 120: -1.0}
    assert {length: shaped(spec, 1.0, length) for length in lengths} == pytest.approx(lengths)
    assert shaped(config("grpo"), 1.0, 64) == 1.0


def test_what_teaches() -> None:
    spec = config("dapo")
    assert teaches(spec, [0.0, 1.0, None])
    assert not teaches(spec, [0.97] * 8)
    assert not teaches(spec, [1.0, None, math.nan])
    assert teaches(config("reinforce_pp"), [1.0, None])
    assert not teaches(config("reinforce_pp"), [None])
