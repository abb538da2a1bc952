"""Many requests over adapters that answer differently, while sequences join, leave, move and go on."""

from __future__ import annotations

import random

import pytest

from tests.workers.engines.adapters import random_adapter
from tests.workers.engines.requests import request, tokens_by_key
from workers.engines.engine import TorchEngine
from workers.engines.sequences import Request, Rollout
from workers.engines.weights import Weights

RUNS = "abcdefgh"
OBSERVATION = [11, 12, 13]


class Churn:
    """Two engines over the same runs, and what happens to sequences between them."""

    def __init__(self, tiny: Weights, seed: int) -> None:
        self._chance = random.Random(seed)
        self._tiny = tiny
        self._engines = [TorchEngine(tiny, max_batch=40, kv_tokens=2048) for _ in range(2)]
        self.version = 0
        self.whole: list[Rollout] = []
        self.swap(RUNS)

    def swap(self, runs: str) -> None:
        """The same weights as a new version."""
        self.version += 1
        for engine in self._engines:
            for run in runs:
                tensors = random_adapter(self._tiny.config, RUNS.index(run))
                engine.load_adapter(run, self.version, tensors, 2.0)

    def submit(self, requests: list[Request]) -> None:
        for entry in requests:
            self._chance.choice(self._engines).submit([entry])

    def move(self) -> None:
        """All, some or none of a run's sequences go to the other engine."""
        source, target = self._chance.sample(self._engines, 2)
        run = self._chance.choice(RUNS)
        some = {(key,) for key in range(1000) if self._chance.random() < 0.5}
        target.import_(source.export(run, self._chance.choice([None, some])))

    def decode(self) -> None:
        """Some steps of some runs; turns that end are answered, here or in the other engine."""
        engine = self._chance.choice(self._engines)
        runs = self._chance.sample(RUNS, self._chance.randint(1, len(RUNS)))
        progress = engine.decode(runs, max_steps=self._chance.randint(1, 6), max_tokens_per_forward=200)
        assert engine.cached_tokens <= 2048
        for sequence in progress.finished:
            if sequence.left > len(OBSERVATION):
                sequence.answer(OBSERVATION)
                self._chance.choice(self._engines).import_([sequence])
            else:
                self.whole.append(sequence)


def requests_of(run: str) -> list[Request]:
    """One in three has several turns. Runs ask the same, so that only their adapters tell them apart."""
    chance = random.Random(1)
    return [
        request(
            run,
            key,
            prompt=[chance.randrange(3, 60) for _ in range(chance.randint(2, 40))],
            max_tokens=chance.randint(3, 16),
            turn_tokens=chance.choice([None, None, 4]),
            keep=chance.random() < 0.7,
        )
        for key in range(125)
    ]


def in_peace(tiny: Weights, run: str, seed: int) -> dict[tuple[str, tuple[int, ...]], list[int]]:
    """A run's sequences in an engine of its own, without keeping caches."""
    engine = TorchEngine(tiny)
    engine.load_adapter(run, 0, random_adapter(tiny.config, seed), 2.0)
    engine.submit(requests_of(run))
    whole: list[Rollout] = []
    while engine.counts(run) != (0, 0):
        for sequence in engine.decode([run]).finished:
            if sequence.left > len(OBSERVATION):
                sequence.answer(OBSERVATION)
                engine.forget(run)
                engine.import_([sequence])
            else:
                whole.append(sequence)
    return tokens_by_key(whole)


@pytest.mark.parametrize("seed", [1, 2])
def test_no_request_gets_what_another_run_would_say(tiny: Weights, seed: int) -> None:
    expected = {}
    for index, run in enumerate(RUNS):
        expected |= in_peace(tiny, run, index)
    assert len(expected) == 1000
    told_apart = [
        key for key in range(125) if len({tuple(expected[run, (key,)]) for run in RUNS}) == len(RUNS)
    ]
    assert len(told_apart) > 80

    chance = random.Random(seed)
    waiting = [entry for run in RUNS for entry in requests_of(run)]
    chance.shuffle(waiting)
    churn = Churn(tiny, seed)
    for _ in range(5000):
        if len(churn.whole) == 1000:
            break
        batch, waiting = waiting[:20], waiting[20:]
        churn.submit(batch)
        churn.decode()
        if chance.random() < 0.3:
            churn.move()
        if chance.random() < 0.1:
            churn.swap(chance.choice(RUNS))
    assert tokens_by_key(churn.whole) == expected
    versions = [version for entry in churn.whole for version in entry.versions]
    assert max(versions) > 5
    assert max(versions) <= churn.version
