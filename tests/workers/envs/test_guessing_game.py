from __future__ import annotations

import asyncio

import pytest

from workers.envs.environment import begin
from workers.envs.guessing_game import GuessingGame
from workers.envs.problems import EnvironmentProblem
from workers.spec import GuessingGame as Settings

STREAM = (3, 0, 1, 2)


def settings(**fields) -> Settings:
    return Settings(type="guessing_game", **fields)


def play(game: GuessingGame, *turns: str) -> list[str | None]:
    async def story():
        return [await game.answer(turn) for turn in turns]

    return asyncio.run(story())


def test_a_guess_is_answered_until_it_is_right():
    game = begin(settings(), {"number": 7}, STREAM)
    assert play(game, "I say 3.", "9, or 7", "no idea", " 7!") == ["Higher.", "Lower.", "Say a number.", None]


@pytest.mark.parametrize(("number", "turn"), [(7, "7"), (-2, "-2, I think"), (0, "00")])
def test_the_right_number_ends_the_game(number, turn):
    assert play(begin(settings(), {"number": number}, STREAM), turn) == [None]


def test_the_last_turn_gets_no_answer():
    assert play(begin(settings(max_turns=2), {"number": 7}, STREAM), "1", "2") == ["Higher.", None]


def test_endless_digits_are_cut_and_not_refused():
    assert play(begin(settings(), {"number": 7}, STREAM), "9" * 5000) == ["Lower."]


@pytest.mark.parametrize("item", [{}, {"number": "7"}, {"number": True}, {"number": 2.5}])
def test_a_row_without_a_whole_number_is_a_problem(item):
    with pytest.raises(EnvironmentProblem, match="number must be a whole number"):
        begin(settings(), item, STREAM)


def test_delays_are_drawn_from_the_episodes_own_stream(monkeypatch):
    waits: list[float] = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr("workers.envs.guessing_game.asyncio.sleep", sleep)
    slow = settings(delay_s=(0.2, 2.0))
    for stream in (STREAM, STREAM, (3, 0, 1, 3)):
        play(begin(slow, {"number": 7}, stream), "1", "2", "3")
    assert waits[:3] == waits[3:6] != waits[6:]
    assert len(set(waits)) == 6
    assert all(0.2 <= wait <= 2.0 for wait in waits)
