"""Grid world, scripted talk, and the limits of every episode."""

from __future__ import annotations

import asyncio

import pytest

from tests.workers.envs.local import episode, play, settings
from workers.envs import episodes
from workers.envs.environment import OBSERVATION_CHARS, Observation
from workers.envs.problems import EnvironmentProblem, EpisodeFailed, EpisodeFailure

MAP = "S..\n.#.\n..G"
GRID = settings(type="grid_world", max_turns=8)


def test_a_walk_is_worth_1_when_it_arrives():
    found = play(episode(GRID, {"map": MAP}), "go right, right", "DOWN", "down!")
    assert [observation.text for observation in found] == ["..@\n.#.\n..G", "...\n.#@\n..G", None]
    rewards = [observation.reward for observation in found]
    assert rewards == pytest.approx([0.25, 0.125, 0.625])


def test_walls_and_edges_stop_and_going_back_costs():
    found = play(episode(GRID, {"map": MAP}), "up left", "down", "right", "up")
    assert [observation.text for observation in found] == [
        "@..\n.#.\n..G",
        "...\n@#.\n..G",
        "...\n@#.\n..G",
        "@..\n.#.\n..G",
    ]
    assert [observation.reward for observation in found] == pytest.approx([0.0, 0.125, 0.0, -0.125])


def test_a_turn_without_a_move_is_told_what_to_say():
    (found,) = play(episode(GRID, {"map": MAP}), "north by northwest")
    assert found.text is not None
    assert found.text.startswith("Say up, down, left or right.\n@..")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "must be a text"),
        ("S.G\n..", "the same length"),
        ("S.G?", "may hold"),
        ("..G", "needs one S, and has 0"),
        ("SGG", "needs one G, and has 2"),
        ("S#G", "no way from S to G"),
    ],
)
def test_a_map_that_cannot_be_walked_is_a_problem(text, reason):
    with pytest.raises(EnvironmentProblem, match=reason):
        episode(GRID, {"map": text})


def test_a_talk_follows_its_script_whatever_is_said():
    talk = settings(type="chat")
    found = play(episode(talk, {"turns": ["And then?", "Why?"]}), "one", "two", "three")
    assert [observation.text for observation in found] == ["And then?", "Why?", None]
    with pytest.raises(EnvironmentProblem, match="turns must be a list of texts"):
        episode(talk, {"turns": ["fine", 3]})


def test_the_last_turn_is_heard_and_not_answered():
    found = play(episode(settings(type="chat", max_turns=2), {"turns": ["a", "b", "c"]}), "one", "two")
    assert [observation.text for observation in found] == ["a", None]


class Slow:
    async def step(self, turn: str) -> Observation:
        await asyncio.Event().wait()
        raise AssertionError


def test_an_environment_that_never_answers_fails_its_episode():
    limited = episodes.Limited(settings(type="chat", episode_s=0.05), Slow())
    with pytest.raises(EpisodeFailed, match=r"more than 0\.05 s over the episode") as failed:
        play(limited, "hello")
    assert failed.value.kind is EpisodeFailure.TIMEOUT


def test_a_long_observation_is_cut_and_says_so():
    long = "x" * (OBSERVATION_CHARS + 5)
    (found,) = play(episode(settings(type="chat"), {"turns": [long]}), "go on")
    assert found.text == "x" * OBSERVATION_CHARS + "\n[cut: 5 more characters]"


def test_only_tools_change_the_prompt():
    messages = [{"role": "user", "content": "Hello."}]
    assert episodes.opening(None, messages) == messages
    assert episodes.opening(GRID, messages) == messages
    tools = settings(type="tools", tools=[{"type": "calculator"}])
    system, user = episodes.opening(tools, messages)
    assert user == messages[0]
    assert system["role"] == "system"
    assert '<tool_call>{"name": "calculator"' in system["content"]
    first, _ = episodes.opening(tools, [{"role": "system", "content": "Be brief."}, *messages])
    assert first["content"].startswith("Be brief.\n\nYou can call tools:")
