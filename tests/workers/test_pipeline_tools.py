"""Jobs with real tools and tenants' worlds: their sandbox, what it does to tokens, and what may go wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.workers.local import Orders, of_kind, of_worker, run, running, same_weights, texts
from workers import pipeline
from workers.envs.chat import Chat
from workers.envs.environment import Beginning, Environment, Observation
from workers.envs.episodes import Limited, begin
from workers.gathering import Episode, Gathering
from workers.protocol import Ended, Merge, StepDone, SubStageKind
from workers.spec import Chat as ChatSettings

RL = {"steps": 1, "sampling": {"max_tokens": 150}, "sample_groups": 3}
TOOLS = {"type": "tools", "tools": [{"type": "calculator"}, {"type": "python"}], "turn_tokens": 6}
LETTERS = """
class Environment:
    def __init__(self, item, seed):
        self.number, self.heard = item["number"], ""

    def step(self, turn):
        self.heard += turn
        answer = f"{self.number} {len(self.heard)}"
        return {"observation": answer, "reward": len(set(self.heard)) / 64, "done": len(self.heard) > 16}
"""
OWN = {"type": "python", "source": LETTERS, "max_turns": 3, "turn_tokens": 8}
Script = Callable[[Beginning, int], str]


class Said:
    """Hears what a script says in place of the random model's turns, which call no tool."""

    def __init__(self, inner: Environment, beginning: Beginning, script: Script) -> None:
        self._inner, self._beginning, self._script, self._turns = inner, beginning, script, 0

    async def step(self, turn: str) -> Observation:
        self._turns += 1
        return await self._inner.step(self._script(self._beginning, self._turns))


@pytest.fixture
def says(monkeypatch):
    def set_script(script: Script) -> None:
        monkeypatch.setattr(
            pipeline,
            "begin",
            lambda settings, beginning: Said(begin(settings, beginning), beginning, script),
        )

    return set_script


@pytest.fixture
def brought(monkeypatch) -> list[Episode]:
    found: list[Episode] = []
    bring = Gathering.bring
    monkeypatch.setattr(
        Gathering, "bring", lambda self, episode: (found.append(episode), bring(self, episode))
    )
    return found


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


CALLS = [
    (call("calculator", expression="6 * 7"), "42"),
    (call("python", code="print(sum(range(5)))"), "10\n"),
    (call("rocket", where="moon"), "error: there is no tool 'rocket'; there are: calculator, python"),
]


def test_answers_of_tools_are_in_the_conversation_and_not_trained(start, says, brought, tokenizer):
    says(lambda beginning, turn: CALLS[beginning.stream[-1]][0] if turn == 1 else "that is all")
    reports = asyncio.run(run(start("out", RL, spec={"environment": TOOLS})))
    assert of_kind(reports, Ended)[0].outcome == "succeeded"
    assert len(brought) == 9
    for episode in brought:
        sequence = episode.sequence
        answer = [t for t, mine in zip(sequence.tokens, sequence.sampled, strict=True) if not mine]
        said = tokenizer.decode(answer, skip_special=False).removeprefix("<eos>")
        expected = CALLS[episode.key[-1]][1].lower()
        assert said == f"\n<user><tool_response>\n{expected}\n</tool_response>\n<assistant>"
        assert episode.turns == 2
        assert sequence.sampled[-1] and sequence.sampled[0]
    (done,) = of_kind(reports, StepDone)
    assert done.metrics["tool_calls"] == 1
    assert done.metrics["tool_errors"] == pytest.approx(1 / 3)
    assert done.metrics["mismatch_max"] < 1e-3, "the trainer reads the tokens that the engine has seen"


def test_code_that_hangs_is_answered_and_holds_up_nobody(start, says, brought, tokenizer):
    def script(beginning: Beginning, turn: int) -> str:
        endless = beginning.stream[-1] == 0
        return call("python", code="while True: pass" if endless else "print(1)") if turn == 1 else "done"

    says(script)
    tools = TOOLS | {"tools": [{"type": "python", "timeout_s": 0.5}]}
    reports = asyncio.run(run(start("out", RL, spec={"environment": tools})))
    assert of_kind(reports, StepDone)[0].metrics["grade_errors"] == 0
    failed = {episode.key[-1] for episode in brought if episode.failed_calls}
    assert failed == {0}


def test_a_world_of_a_tenants_own_gives_the_rewards(start, brought):
    reports = asyncio.run(run(start("out", RL, spec={"environment": OWN, "grader": None})))
    (done,) = of_kind(reports, StepDone)
    assert done.metrics["environment_errors"] == 0
    rewards = {episode.key[1:]: sum(episode.turn_rewards.values()) for episode in brought}
    assert all(sample.reward == rewards[sample.group, sample.index] > 0 for sample in done.samples)
    assert {episode.turns for episode in brought} >= {3}


def test_its_processes_may_be_killed_between_turns(start, cluster, monkeypatch):
    spec = {"environment": OWN, "grader": None}
    alone = asyncio.run(run(start("alone", RL, spec=spec)))
    sandbox = cluster.graders.actor._sandbox
    killed = []
    called = sandbox.call

    def call_then_kill(*arguments, **named):
        result = called(*arguments, **named)
        idle = [process for _, process in sandbox._idle_now()]
        killed.extend(idle)
        sandbox._evict(idle)
        return result

    monkeypatch.setattr(sandbox, "call", call_then_kill)
    killing = asyncio.run(run(start("killing", RL, spec=spec)))
    assert len(killed) > 3
    assert texts(alone) == texts(killing)
    assert same_weights(alone, killing)


FAULTS = {
    "raise ValueError('no more dice')": "exception",
    "while True: pass": "timeout",
    "return 'x' * 10_000_000": "bad_answer",
    "return b'bytes'": "bad_answer",
    "import os; os._exit(3)": "crashed",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_it_does_wrong_is_of_its_own_sample(start, says, fault):
    source = (
        "class Environment:\n"
        "    def __init__(self, item, seed): pass\n"
        "    def step(self, turn):\n"
        "        if turn == 'wrong':\n"
        f"            {fault}\n"
        "        return {'observation': 'go on', 'reward': 0.5}\n"
    )
    says(lambda beginning, turn: "wrong" if (beginning.stream[-1], turn) == (1, 2) else "right")
    own = OWN | {"source": source, "timeout_s": 1}
    reports = asyncio.run(run(start("out", RL, spec={"environment": own, "grader": None})))
    assert of_kind(reports, Ended)[0].outcome == "succeeded"
    (done,) = of_kind(reports, StepDone)
    assert done.metrics["environment_errors"] == pytest.approx(1 / 3)
    for sample in done.samples:
        if sample.index == 1:
            assert sample.reward is None
            assert sample.error.startswith(f"environment: {FAULTS[fault]}: ")
        else:
            assert sample.reward == 1.5


class Asleep:
    async def step(self, turn: str) -> Observation:
        await asyncio.Event().wait()
        raise AssertionError


def talks(beginning: Beginning) -> Beginning:
    return replace(beginning, item={"turns": ["and then?"]})


def test_an_episode_whose_time_is_over_fails_alone(start, monkeypatch):
    """Those that are quick never wait, so that no limit is too short for them."""

    def limited(settings, beginning: Beginning) -> Environment:
        slow = beginning.stream[-1] == 2
        return Limited(settings, Asleep() if slow else Chat(ChatSettings(), talks(beginning)))

    monkeypatch.setattr(pipeline, "begin", limited)
    talk = {"type": "chat", "turn_tokens": 6, "episode_s": 0.01}
    reports = asyncio.run(run(start("out", RL, spec={"environment": talk})))
    (done,) = of_kind(reports, StepDone)
    assert done.metrics["environment_errors"] == pytest.approx(1 / 3)
    for sample in done.samples:
        assert (sample.reward is None) == (sample.index == 2)
        if sample.index == 2:
            assert (
                sample.error == "environment: timeout: the environment took more than 0.01 s over the episode"
            )


def test_worlds_of_their_own_move_with_a_merge(start, cluster):
    rl = RL | {
        "devices": 2,
        "prompts_per_step": 4,
        "group_size": 4,
        "sample_groups": 4,
        "sampling": {"max_tokens": 300, "stop": list("abcd")},
    }
    spec = {"environment": OWN | {"turn_tokens": 60}, "grader": None}
    apart = asyncio.run(run(start("apart", rl, spec=spec), place=of_worker))
    made = start("merged", rl, spec=spec)
    orders = Orders(cluster, made)
    ordered: list[str] = []

    def may_step(name: str, left: int) -> bool:
        tails = running(made, SubStageKind.TAIL)
        source = next((node for node in tails if ".w1." in node), None)
        target = next((node for node in tails if ".w0." in node), None)
        if source and target and not ordered:
            ordered.append(source)
            order = Merge(action_id="m", sources=(source,), target=target)
            asyncio.run_coroutine_threadsafe(made.order(order), orders.loop)
        return bool(ordered) or left > 3 or made._trained > 0 or not (source or target)

    cluster.may_step = may_step
    reports = orders.run(place=of_worker)
    assert ordered
    assert texts(apart) == texts(reports)
    assert same_weights(apart, reports)
