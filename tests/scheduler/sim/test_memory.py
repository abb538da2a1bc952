"""What the KV cache must hold, by hand; and which device of a job is the fullest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.core.state import Mode
from scheduler.sim.devices import H100, footprint
from scheduler.sim.measured import Sampled
from scheduler.sim.memory import Needs, kv_tokens, memory, most_in_turn
from scheduler.sim.workloads import WORKLOADS
from tests.scheduler.sim.tiny import job

SMALL = replace(WORKLOADS["gsm8k-qwen3-0.6b"], prompt_tokens=10, observation_tokens=5)


def test_sequences_that_end_make_room() -> None:
    """After 2 tokens both hold 12; after 4 only one is left, with 14."""
    assert most_in_turn(SMALL, [Sampled(2, 1), Sampled(4, 1)], 0) == 24


def test_sequences_that_only_end_a_turn_stay() -> None:
    """The first ends its turn after 2 tokens and keeps 12; the second has 13 after 3. In the second turn: 10
    + 5 + 2 in the cache, 2 more to sample."""
    own = [Sampled(4, 2), Sampled(3, 1)]
    assert most_in_turn(SMALL, own, 0) == 12 + 13
    assert most_in_turn(SMALL, own, 1) == 19


def test_more_workers_hold_less_each() -> None:
    one, two = (kv_tokens(WORKLOADS["math-qwen3-4b"], workers) for workers in (1, 2))
    assert two == pytest.approx(one / 2, rel=0.05)


def test_only_overlap_needs_cache_and_optimizer_at_once() -> None:
    workload = WORKLOADS["aime-qwen3-4b"]
    cost = H100.cost(workload.model)
    cache = kv_tokens(workload, 2) * cost.architecture.kv_bytes_per_token
    training = footprint(cost, 2, 0).run_bytes

    sync = job("a", workload=workload, workers=2)
    overlapping = job("a", workload=workload, workers=2, mode=Mode.ASYNC, max_staleness=1)
    apart = replace(overlapping, layout="disaggregated", train_workers=2)
    beside = max(0, training - cache)  # offload: the cache is gone while it trains
    assert memory(sync, cost) == Needs(memory(sync, cost).weights_bytes, cache, beside)
    assert memory(overlapping, cost).peak_bytes == training
    streaming = memory(replace(sync, mode=Mode.STREAM), cost)
    last = 32 * (workload.prompt_tokens + workload.max_tokens) * cost.architecture.kv_bytes_per_token
    assert streaming.peak_bytes == beside
    both = cache + streaming.peak_bytes + streaming.overlap_bytes
    assert both == pytest.approx(max(cache, last + training), rel=0.01)
    assert memory(apart, cost) == Needs(cost.architecture.weights_bytes, cache, beside)
