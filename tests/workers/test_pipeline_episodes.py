"""What environments give: rewards of turns, counts of calls, and failures of one episode alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.workers.local import of_kind, offers, run, same_weights, texts
from workers import pipeline
from workers.envs.environment import Beginning, Observation
from workers.envs.problems import EpisodeFailed, EpisodeFailure
from workers.gathering import Episode, Gathering
from workers.protocol import Ended, FailureKind, Log, StepDone, SubStageKind

GAME = {"type": "guessing_game", "max_turns": 3, "turn_tokens": 6}
TOOLS = {"type": "tools", "tools": [{"type": "calculator"}], "max_turns": 3, "turn_tokens": 6}
RL = {"steps": 1, "sampling": {"max_tokens": 120}, "sample_groups": 3}
Step = Callable[[Beginning, int, str], Observation]


class World:
    """What it says to the turn of that number is ``step``'s."""

    def __init__(self, beginning: Beginning, step: Step) -> None:
        self._beginning, self._step, self._turns = beginning, step, 0

    async def step(self, turn: str) -> Observation:
        self._turns += 1
        return self._step(self._beginning, self._turns, turn)


@pytest.fixture
def play(start, monkeypatch):
    """``play(name, step, rl, **launch)``: the reports of an attempt in a world like that."""

    def played(name: str, step: Step, rl=None, **more):
        monkeypatch.setattr(pipeline, "begin", lambda settings, beginning: World(beginning, step))
        more.setdefault("spec", {"environment": GAME, "grader": None})
        return asyncio.run(run(start(name, RL | (rl or {}), **more)))

    return played


def letters(beginning: Beginning, number: int, turn: str) -> Observation:
    """Each turn is worth its different letters; the second is the last."""
    return Observation("go on" if number < 2 else None, len(set(turn)) / 16)


def last_number(beginning: Beginning) -> int:
    return beginning.stream[-1]


@pytest.fixture
def brought(monkeypatch) -> list[Episode]:
    found: list[Episode] = []
    bring = Gathering.bring
    monkeypatch.setattr(
        Gathering, "bring", lambda self, episode: (found.append(episode), bring(self, episode))
    )
    return found


def test_rewards_of_turns_need_no_grader_and_add_up(play, brought):
    reports = play("out", letters)
    assert of_kind(reports, Ended)[0].outcome == "succeeded"
    (done,) = of_kind(reports, StepDone)
    given = {episode.key[1:]: episode.turn_rewards for episode in brought}
    for episode in brought:
        assert len(episode.turn_rewards) == 2
        assert all(episode.sequence.sampled[place] for place in episode.turn_rewards)
        assert max(episode.turn_rewards) == len(episode.sequence.tokens) - 1
    for sample in done.samples:
        assert sample.reward == pytest.approx(sum(given[sample.group, sample.index].values()))
        assert sample.parts == {}
    assert done.metrics["environment_errors"] == done.metrics["grade_errors"] == 0
    assert "grade_seconds" not in done.metrics and "tool_calls" not in done.metrics


def test_a_grader_adds_to_them_and_both_are_told(play):
    source = "def grade(sample, item):\n    return 2.0\n"
    grader = {"type": "python", "name": "two", "source": source}
    reports = play("out", letters, spec={"environment": GAME, "grader": grader})
    (done,) = of_kind(reports, StepDone)
    for sample in done.samples:
        assert sample.parts["grader"] == 2
        assert sample.reward == pytest.approx(2 + sample.parts["environment"])
    assert done.metrics["reward.grader"] == 2
    assert done.metrics["reward"] == pytest.approx(2 + done.metrics["reward.environment"])


def test_a_turns_reward_teaches_from_its_turn_on(play):
    """PPO and REINFORCE++ know which turn it was given for; group estimators do not."""
    early = play("early", letters, {"algorithm": "reinforce_pp"})
    late = play("late", all_at_the_end, {"algorithm": "reinforce_pp"})
    assert texts(early) == texts(late)
    rewards = [[sample.reward for sample in of_kind(r, StepDone)[0].samples] for r in (early, late)]
    assert rewards[0] == pytest.approx(rewards[1])
    assert not same_weights(early, late, tolerance=1e-5)
    grouped = [play(f"grpo-{step.__name__}", step) for step in (letters, all_at_the_end)]
    assert same_weights(*grouped)


SUMS: dict[tuple[int, ...], float] = {}


def all_at_the_end(beginning: Beginning, number: int, turn: str) -> Observation:
    found = letters(beginning, number, turn)
    if number == 1:
        SUMS[beginning.stream] = found.reward
        return Observation(found.text)
    return Observation(None, found.reward + SUMS[beginning.stream])


@pytest.mark.parametrize("kind", list(EpisodeFailure))
def test_an_episode_that_fails_is_left_out_and_others_go_on(play, kind):
    def step(beginning: Beginning, number: int, turn: str) -> Observation:
        if last_number(beginning) == 1 and number == 2:
            raise EpisodeFailed(kind, "the dice fell off the table")
        return letters(beginning, number, turn)

    reports = play("out", step)
    assert of_kind(reports, Ended)[0].outcome == "succeeded"
    (done,) = of_kind(reports, StepDone)
    failed = [sample for sample in done.samples if sample.index == 1]
    assert len(failed) == 3
    for sample in failed:
        assert (sample.reward, sample.advantage) == (None, 0)
        assert sample.error == f"environment: {kind}: the dice fell off the table"
    assert all(sample.error is None for sample in done.samples if sample.index != 1)
    assert done.metrics["environment_errors"] == done.metrics["grade_errors"] == pytest.approx(1 / 3)
    assert any("3 of 9 samples have no reward" in log.message for log in of_kind(reports, Log))


def test_too_many_failures_end_the_job_with_their_words(play):
    def step(beginning: Beginning, number: int, turn: str) -> Observation:
        raise EpisodeFailed(EpisodeFailure.CRASHED, "gone")

    (ended,) = of_kind(play("out", step), Ended)
    assert ended.failure.kind is FailureKind.GRADER_FAILED
    assert "9 of 9 samples" in ended.failure.message
    assert "environment: crashed: gone" in ended.failure.message


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_rewards_that_are_no_numbers_are_errors_of_their_samples(play, reward):
    def step(beginning: Beginning, number: int, turn: str) -> Observation:
        return Observation(None, reward if last_number(beginning) == 0 else len(set(turn)) / 16)

    (done,) = of_kind(play("out", step), StepDone)
    assert [sample.reward is None for sample in done.samples] == [True, False, False] * 3
    assert all(value == value for value in done.metrics.values())


def test_calls_of_tools_are_counted(play):
    def step(beginning: Beginning, number: int, turn: str) -> Observation:
        return Observation("more" if number < 3 else None, float(len(turn)), calls=2, failed_calls=number % 2)

    source = "def grade(sample, item):\n    return 1.0\n"
    grader = {"type": "python", "name": "one", "source": source}
    (done,) = of_kind(play("out", step, spec={"environment": TOOLS, "grader": grader}), StepDone)
    assert done.metrics["tool_calls"] == 6
    assert done.metrics["tool_errors"] == pytest.approx(2 / 6)
    assert all("calculator" in sample.prompt for sample in done.samples), "the model was told of its tool"


def test_groups_of_episodes_are_replaced_as_well(play):
    def step(beginning: Beginning, number: int, turn: str) -> Observation:
        worth = 0.5 if beginning.item["number"] < 3 else len(set(turn)) / 16
        return Observation("go on" if number < 2 else None, worth)

    rl = {"sampling_rounds": 4, "steps": 3}
    reports = play("out", step, rl)
    assert of_kind(reports, Ended)[0].outcome == "succeeded"
    rounds = [offer.step for offer in offers(reports) if offer.kind is SubStageKind.PREFILL]
    assert len(rounds) > 3
    again = play("again", step, rl)
    assert texts(reports) == texts(again)
    assert same_weights(reports, again)
