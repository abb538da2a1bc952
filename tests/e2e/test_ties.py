"""What ``ties`` lets pass, and what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.ties import Oracle
from tests.workers.engines.adapters import random_adapter
from workers.engines.engine import TorchEngine
from workers.engines.sequences import Request, Rollout
from workers.engines.weights import Weights, load_weights
from workers.models.chat import ChatTokenizer

REQUEST = Request("run", (0,), (7, 8, 9), 40, (3, 1, 4), stop=("a",), stop_ids=frozenset({1}))


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> Weights:
    return load_weights(tiny_folder, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> ChatTokenizer:
    return ChatTokenizer(tiny_folder)


def tokens(rollouts: list[Rollout]) -> list[list[int]]:
    return [rollout.tokens for rollout in rollouts]


@pytest.mark.parametrize("seed", [None, 5])
def test_without_tolerance_there_is_one_completion_and_it_is_the_engines(
    tiny: Weights, tokenizer: ChatTokenizer, seed: int | None
) -> None:
    adapter = None if seed is None else random_adapter(tiny.config, seed)
    engine = TorchEngine(tiny, tokenizer)
    engine.load_adapter("run", 0, adapter, 2.0)
    engine.submit([REQUEST])
    expected = engine.decode().finished
    found = list(Oracle(tiny, tokenizer, adapter, 2.0).completions(REQUEST, 1e-9))
    assert tokens(found) == tokens(expected)


def test_with_tolerance_each_completion_takes_a_token_beside_the_number(
    tiny: Weights, tokenizer: ChatTokenizer
) -> None:
    oracle = Oracle(tiny, tokenizer)
    (right,) = oracle.completions(REQUEST, 1e-9)
    found = list(oracle.completions(REQUEST, 3e-4))
    assert found[0].tokens == right.tokens
    assert len(found) > 1
    for other in found[1:]:
        place = next(
            i for i, (one, two) in enumerate(zip(right.tokens, other.tokens, strict=False)) if one != two
        )
        assert abs(right.tokens[place] - other.tokens[place]) == 1, "stretches with a border in common"
        assert other.finish is not None
