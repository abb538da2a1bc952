"""Episodes of several turns: their tokens, the device they leave while their world thinks, and its faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.workers.local import (
    Orders,
    ends,
    of_kind,
    of_worker,
    offers,
    run,
    running,
    same_weights,
    texts,
)
from workers import pipeline, rollouts
from workers.envs.environment import Observation
from workers.envs.problems import EnvironmentProblem
from workers.gathering import Episode, Gathering
from workers.protocol import Ended, FailureKind, Merge, Offer, StepDone, SubStageKind

GAME = {"type": "guessing_game", "max_turns": 3, "turn_tokens": 6}
SPEC = {"environment": GAME}
RL = {"sampling": {"max_tokens": 120}, "sample_groups": 3}
ROLLING = (SubStageKind.PREFILL, SubStageKind.DECODE, SubStageKind.TAIL)


@pytest.fixture
def brought(monkeypatch) -> list[Episode]:
    """Every episode, as it ended."""
    found: list[Episode] = []
    bring = Gathering.bring

    def watch(self, episode):
        found.append(episode)
        bring(self, episode)

    monkeypatch.setattr(Gathering, "bring", watch)
    return found


class World:
    """Answers when ``ready`` says so, with a word that depends on the turn alone."""

    def __init__(self, ready: Callable[[], bool], turns: int = 3) -> None:
        self._ready, self._left = ready, turns

    async def step(self, turn: str) -> Observation:
        while not self._ready():
            await asyncio.sleep(0.001)
        self._left -= 1
        return Observation(f"you said {len(turn)} letters" if self._left else None)


def worlds(monkeypatch, ready: Callable[[], bool]) -> None:
    monkeypatch.setattr(pipeline, "begin", lambda settings, beginning: World(ready))


def test_an_episode_holds_its_turns_and_marks_what_was_not_sampled(start, brought, tokenizer):
    reports = asyncio.run(run(start("out", RL | {"steps": 1}, spec=SPEC)))
    assert of_kind(reports, Ended)[0].outcome == "succeeded"
    assert len(brought) == 9
    for episode in brought:
        sequence = episode.sequence
        assert len(sequence.tokens) == len(sequence.sampled) == len(sequence.logprobs)
        answers = tokenizer.decode(
            [t for t, sampled in zip(sequence.tokens, sequence.sampled, strict=True) if not sampled],
            skip_special=False,
        )
        said = answers.split("\n<user>")[1:]
        assert len(said) == episode.turns - 1
        assert all(
            text.removesuffix("\n<assistant>") in ("higher.", "lower.", "say a number.") for text in said
        )
        assert all(
            (version == 0) == sampled
            for version, sampled in zip(sequence.versions, sequence.sampled, strict=True)
        )
        assert all(sequence.sampled[sequence.turn_start :])
        assert len(sequence.tokens) - sequence.turn_start <= 6
    metrics = of_kind(reports, StepDone)[0].metrics
    assert metrics["turns"] == pytest.approx(sum(episode.turns for episode in brought) / 9)
    assert 1 < metrics["turns"] <= 3
    assert metrics["tokens"] == sum(sum(episode.sequence.sampled) for episode in brought)
    assert metrics["mismatch_max"] < 1e-3, "the trainer reads the tokens that the engine has seen"


def test_the_grader_reads_the_last_turn(start, brought, tokenizer):
    source = "def grade(sample, item):\n    return len(sample['output_text'])\n"
    grader = {"type": "python", "name": "length", "source": source}
    reports = asyncio.run(run(start("out", RL | {"steps": 1}, spec=SPEC | {"grader": grader})))
    samples = of_kind(reports, StepDone)[0].samples
    last = {e.key[1:]: e.sequence.tokens[e.sequence.turn_start :] for e in brought}
    for sample in samples:
        assert sample.parts.get("grader", sample.reward) == len(
            tokenizer.decode(last[sample.group, sample.index])
        )


def test_between_steps_nothing_is_kept_of_episodes(start, cluster):
    kept = []

    def look(report):
        if isinstance(report.body, StepDone):
            engines = [handle for key, handle in cluster.residents.items() if key[0] == "rollout"]
            kept.extend(handle.actor._engine.cached_tokens for handle in engines)

    asyncio.run(run(start("out", RL | {"steps": 2}, spec=SPEC), seen=look))
    assert kept == [0, 0]


def test_an_answer_without_room_ends_the_episode_as_cut(start, brought):
    rl = RL | {"steps": 1, "sampling": {"max_tokens": 20}}
    reports = asyncio.run(run(start("out", rl, spec=SPEC)))
    assert of_kind(reports, Ended)[0].outcome == "succeeded"
    assert all(len(episode.sequence.tokens) <= 20 for episode in brought)
    assert all(episode.sequence.finish == "length" for episode in brought if episode.turns == 1)
    assert of_kind(reports, StepDone)[0].metrics["truncated"] > 0


def test_while_all_think_the_device_is_free(start, cluster, monkeypatch):
    made = start("out", RL | {"steps": 1}, spec=SPEC)
    on_device: list[bool] = []

    def ready() -> bool:
        open_now = [lease.offer.kind for lease in made._desk._open()]
        if SubStageKind.TOOL in open_now:
            on_device.append(any(kind in ROLLING for kind in open_now))
        return SubStageKind.TOOL in open_now

    worlds(monkeypatch, ready)
    reports = asyncio.run(run(made))
    assert on_device and not any(on_device)
    rolled = [offer for offer in offers(reports) if offer.kind in (*ROLLING, SubStageKind.TOOL)]
    tools = [offer for offer in rolled if offer.kind is SubStageKind.TOOL]
    assert len(tools) >= 3
    assert {offer.part for offer in tools} == {5}
    asked = [report.body for report in reports if isinstance(report.body, Offer)]
    returned = [offer for offer in asked if offer.kind in ROLLING]
    assert returned[0].kind is SubStageKind.PREFILL
    assert len(returned) >= 3
    assert {offer.kind for offer in returned[1:]} <= {SubStageKind.DECODE, SubStageKind.TAIL}
    spans = {end.node: end for end in ends(reports)}
    assert spans.keys() == {offer.node for offer in offers(reports)}
    assert all(spans[offer.node].tokens == 0 for offer in tools)


def test_a_batch_that_grows_by_answers_is_told_of_again(start, cluster, monkeypatch):
    """The first answer comes when all wait, the others once its sequence is back on the device."""
    made = start("out", RL | {"steps": 1}, spec=SPEC)
    waited = returned = False
    worlds_made = 0

    def all_wait() -> bool:
        nonlocal waited
        waited |= any(lease.offer.kind is SubStageKind.TOOL for lease in made._desk._open())
        return waited

    def one_is_back() -> bool:
        nonlocal returned
        open_now = [lease.offer for lease in made._desk._open()]
        returned |= waited and any(offer.kind in ROLLING and offer.sequences == 1 for offer in open_now)
        return returned

    def begin(settings, beginning):
        nonlocal worlds_made
        worlds_made += 1
        return World(all_wait if worlds_made == 1 else one_is_back, turns=2)

    monkeypatch.setattr(pipeline, "begin", begin)
    reports = asyncio.run(run(made))
    rolled = [offer for offer in offers(reports) if offer.kind in ROLLING]
    back = next(place for place, offer in enumerate(rolled) if offer.sequences == 1)
    assert rolled[back + 1].sequences >= 2
    assert of_kind(reports, Ended)[0].outcome == "succeeded"


def test_when_answers_come_changes_no_token(start, cluster, monkeypatch):
    """At once, so that they join the batch; or only when all wait, so that they come back together."""
    worlds(monkeypatch, lambda: True)
    at_once = asyncio.run(run(start("once", RL, spec=SPEC)))
    made = start("late", RL, spec=SPEC)
    worlds(monkeypatch, lambda: any(lease.offer.kind == "tool" for lease in made._desk._open()))
    late = asyncio.run(run(made))
    assert texts(at_once) == texts(late)
    assert same_weights(at_once, late)


def test_sequences_whose_tools_run_move_with_a_merge(start, cluster, monkeypatch):
    """Worker 1 is merged while some of its sequences think; they come back at worker 0."""
    rl = {
        "devices": 2,
        "prompts_per_step": 4,
        "group_size": 4,
        "sample_groups": 4,
        "sampling": {"max_tokens": 300, "stop": list("abcd")},
    }
    spec = {"environment": GAME | {"turn_tokens": 60}}
    worlds(monkeypatch, lambda: True)
    apart = asyncio.run(run(start("apart", rl, spec=spec), place=of_worker))
    made = start("merged", rl, spec=spec)
    orders = Orders(cluster, made)
    ordered: list[str] = []
    moved: list[int] = []

    def over() -> bool:
        return bool(ordered) and ordered[0] not in running(made, SubStageKind.TAIL)

    worlds(monkeypatch, over)
    hand_over = rollouts.Roller._hand_over

    def watch(self, target):
        moved.append(len(self._thinking))
        hand_over(self, target)

    monkeypatch.setattr(rollouts.Roller, "_hand_over", watch)

    def may_step(name: str, left: int) -> bool:
        tails = running(made, SubStageKind.TAIL)
        source = next((node for node in tails if ".w1." in node), None)
        target = next((node for node in tails if ".w0." in node), None)
        if source and target and not ordered:
            ordered.append(source)
            order = Merge(action_id="m", sources=(source,), target=target)
            asyncio.run_coroutine_threadsafe(made.order(order), orders.loop)
        return left > 3 or over() or made._trained > 0

    cluster.may_step = may_step
    reports = orders.run(place=of_worker)
    assert moved and moved[0] > 0
    assert texts(apart) == texts(reports)
    assert same_weights(apart, reports)
    assert cluster.runs() == []


def failure(reports):
    return of_kind(reports, Ended)[0].failure


def test_faults_of_an_environment_are_told(start, cluster, monkeypatch):
    game = SPEC["environment"] | {"number_field": "missing"}
    told = failure(asyncio.run(run(start("row", RL, spec={"environment": game}))))
    assert told.kind is FailureKind.BAD_DATA
    assert "row " in told.message and "missing must be a whole number" in told.message

    async def refuse(self, turn):
        raise EnvironmentProblem("this world is closed")

    monkeypatch.setattr(World, "step", refuse)
    worlds(monkeypatch, lambda: True)
    told = failure(asyncio.run(run(start("closed", RL, spec=SPEC))))
    assert (told.kind, told.message) == (FailureKind.BAD_DATA, "this world is closed")

    async def never(self, turn):
        await asyncio.Event().wait()

    monkeypatch.setattr(World, "step", never)
    monkeypatch.setattr(rollouts, "ANSWER_LIMIT_S", 0.01)
    told = failure(asyncio.run(run(start("silent", RL, spec=SPEC))))
    assert told.kind is FailureKind.GRADER_FAILED
    assert "environment: timeout: the environment thought" in told.message
    assert cluster.runs() == []
