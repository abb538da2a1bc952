from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.workers.engines.adapters import random_adapter
from tests.workers.residents.devices import cpu
from tests.workers.residents.runs import SEEDS, tokens
from workers.engines.engine import TorchEngine
from workers.engines.sequences import Rollout
from workers.engines.weights import Weights
from workers.residents.rollout import RolloutResident


@pytest.fixture(autouse=True)
def polite_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """Residents give way to other processes for good; the tests' process must not, once per resident."""
    monkeypatch.setattr("os.nice", lambda by: 0)


@pytest.fixture
def callers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def engine(tiny_folder: Path, tiny: Weights) -> Callable[[], RolloutResident]:
    def make() -> RolloutResident:
        resident = RolloutResident(cpu(), str(tiny_folder), "fp32")
        resident.load()
        for key, seed in SEEDS.items():
            resident.load_adapter(key, 0, random_adapter(tiny.config, seed), 2.0, 1.0)
        return resident

    return make


@pytest.fixture
def resident(engine: Callable[[], RolloutResident]) -> RolloutResident:
    return engine()


@pytest.fixture
def alone(tiny: Weights) -> Callable[[list[Rollout]], list[list[int]]]:
    """What each sequence comes to when its run has an engine to itself."""

    def sample(wanted: list[Rollout]) -> list[list[int]]:
        engine = TorchEngine(tiny)
        key = wanted[0].request.run_key
        engine.load_adapter(key, 0, random_adapter(tiny.config, SEEDS[key]), 2.0)
        engine.import_(wanted)
        return tokens(sorted(engine.decode().finished, key=lambda rollout: rollout.request.key))

    return sample
