from __future__ import annotations

import pytest

from tests.workers.envs.local import episode, play, settings
from workers.envs.problems import EnvironmentProblem

STREAM = (3, 0, 1, 2)
GAME = settings(type="guessing_game")


def answers(*turns: str, number: int = 7, **fields) -> list[tuple[str | None, float | None]]:
    found = play(episode(settings(type="guessing_game", **fields), {"number": number}), *turns)
    return [(observation.text, observation.reward) for observation in found]


def test_a_guess_is_answered_until_it_is_right():
    assert answers("I say 3.", "9, or 7", "no idea", " 7!", max_turns=5) == [
        ("Higher.", None),
        ("Lower.", None),
        ("Say a number.", None),
        (None, 1.0),
    ]


@pytest.mark.parametrize(("number", "turn"), [(7, "7"), (-2, "-2, I think"), (0, "00")])
def test_the_right_number_ends_the_game(number, turn):
    assert answers(turn, number=number) == [(None, 1.0)]


def test_the_last_turn_gets_no_answer_and_the_nearest_guess_counts():
    # Three away from 7: half of 1 - 3 / 8.
    assert answers("1", "4", "nothing", max_turns=3)[-1] == (None, 0.5 * (1 - 3 / 8))


@pytest.mark.parametrize("turn", ["nothing", "1000"])
def test_no_guess_or_a_far_one_is_worth_nothing(turn):
    assert answers(turn, max_turns=1) == [(None, 0.0)]


def test_endless_digits_are_cut_and_not_refused():
    assert answers("9" * 5000) == [("Lower.", None)]


@pytest.mark.parametrize("item", [{}, {"number": "7"}, {"number": True}, {"number": 2.5}])
def test_a_row_without_a_whole_number_is_a_problem(item):
    with pytest.raises(EnvironmentProblem, match="number must be a whole number"):
        episode(GAME, item)


def test_delays_are_drawn_from_the_episodes_own_stream(monkeypatch):
    waits: list[float] = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr("workers.envs.guessing_game.asyncio.sleep", sleep)
    slow = settings(type="guessing_game", delay_s=(0.2, 2.0))
    for stream in (STREAM, STREAM, (3, 0, 1, 3)):
        play(episode(slow, {"number": 7}, stream=stream), "1", "2", "3")
    assert waits[:3] == waits[3:6] != waits[6:]
