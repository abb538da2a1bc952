"""Asynchronous steps: rollouts run ahead of training, within the bound, and nothing of them is lost."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.workers.local import IDLE, device, ends, of_kind, offers, run
from workers import telling
from workers.protocol import CheckpointSaved, Ended, StepDone, SubStageKind

STEPS = 6


def rl(eta: int, **more):
    return {"mode": {"type": "async", "max_staleness": eta}, "steps": STEPS, "sample_groups": 3} | more


ROLLING = (SubStageKind.PREFILL, SubStageKind.DECODE, SubStageKind.TAIL)
#: Completions of many lengths, one step ahead of training.
RL = rl(1, sampling={"max_tokens": 60, "stop": list("abcd")})


class Ahead:
    """Holds each update back until the rollouts are as far ahead as they may be."""

    def __init__(self, cluster, made, eta: int) -> None:
        self.made, self.eta = made, eta
        self.rolled: set[int] = set()
        cluster.before_micro = self.before_micro

    def before_micro(self, name: str) -> None:
        trained = self.made._trained
        wanted = min(trained + self.eta, STEPS - 1)
        while wanted not in self.rolled:
            if self.made._task.done():
                return
            IDLE.wait(0.001)

    def seen(self, report) -> None:
        for end in ends([report]):
            step, _, kind, _ = end.node.split(".")
            if kind == "grade":
                self.rolled.add(int(step[1:]))


@pytest.mark.parametrize("eta", [1, 2])
def test_the_bound_of_staleness_is_reached_and_never_exceeded(start, cluster, eta):
    made = start("out", rl(eta))
    ahead = Ahead(cluster, made, eta)
    reports = asyncio.run(run(made, seen=ahead.seen))
    assert of_kind(reports, Ended)[0].outcome == "succeeded"
    steps = of_kind(reports, StepDone)
    assert [done.step for done in steps] == list(range(STEPS))
    assert [done.metrics["staleness_max"] for done in steps] == [min(k, eta) for k in range(STEPS)]
    assert all(done.metrics["staleness"] == done.metrics["staleness_max"] for done in steps)
    assert all(0 <= done.metrics["importance_capped"] <= 1 for done in steps)
    begun = [offer.step for offer in offers(reports) if offer.kind is SubStageKind.PREFILL]
    assert begun == list(range(STEPS)), "every step rolls out once"


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_new_weights_are_taken_up_in_the_middle_of_a_completion(start, cluster, monkeypatch, tuning):
    """The last sequences of step 1 stop half-way until the weights have seen step 0."""
    made = start("out", RL | {"steps": 2, "tuning": {"type": tuning}})
    halfway = threading.Event()
    versions: list[list[int]] = []
    measure = telling.staleness

    def watch(step, graded):
        versions.extend(sample.rollout.versions for sample in graded if step == 1)
        return measure(step, graded)

    monkeypatch.setattr(telling, "staleness", watch)

    def may_step(name: str, left: int) -> bool:
        steps = {lease.offer.step for lease in made._desk._open() if lease.offer.kind in ROLLING}
        if steps != {1} or left > 3 or made._fleet._members[0].version == 1:
            return True
        halfway.set()
        return False

    cluster.may_step = may_step
    cluster.before_micro = lambda name: made._trained or halfway.wait(20)
    reports = asyncio.run(run(made))
    assert of_kind(reports, Ended)[0].outcome == "succeeded"
    done = of_kind(reports, StepDone)[1]
    assert done.metrics["staleness_max"] <= 1
    assert all(found == sorted(found) and set(found) <= {0, 1} for found in versions)
    assert any(set(found) == {0, 1} for found in versions)
    assert 0 < done.metrics["staleness"] < 1


def test_a_resumed_attempt_rolls_out_anew_what_was_not_trained(start, cluster):
    half = asyncio.run(run(start("half", RL | {"steps": 3})))
    saved = of_kind(half, CheckpointSaved)[-2]
    made = start("half", RL | {"steps": 5}, resume_from=saved.path, start_step=saved.step, run_key="half.2")
    reports = asyncio.run(run(made))
    steps = of_kind(reports, StepDone)
    assert [done.step for done in steps] == [2, 3, 4]
    assert steps[0].metrics["staleness_max"] == 0
    assert all(done.metrics["staleness_max"] <= 1 for done in steps)
    assert cluster.runs() == []


def test_rollouts_may_move_while_training_stays(start, cluster):
    """Each rollout on the other device: the trainer follows when it is free, and results stay in order."""
    made = start("out", RL)
    reports = asyncio.run(run(made, place=lambda offer: device(f"local/cpu{offer.step % 2}")))
    assert of_kind(reports, Ended)[0].outcome == "succeeded"
    assert [done.step for done in of_kind(reports, StepDone)] == list(range(STEPS))
    assert all(done.metrics["staleness_max"] <= 1 for done in of_kind(reports, StepDone))
    assert cluster.runs() == []
