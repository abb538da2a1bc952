"""Rollouts by closed form against counting token by token, and steps drawn from measured lengths."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.state import Kind
from scheduler.sim.devices import A100, DEVICES, H100, H200
from scheduler.sim.measured import Sampled
from scheduler.sim.models import ARCHITECTURES, HOST, cost
from scheduler.sim.truth import (
    Rollout,
    draw,
    draw_groups,
    finished_share,
    step_tokens,
    training,
    turn_tokens,
    turns,
)
from scheduler.sim.workloads import WORKLOADS

QWEN = cost("qwen3-4b")
GSM8K = WORKLOADS["gsm8k-qwen3-4b"]
SEARCH = WORKLOADS["search128-qwen3-4b"]

sequences = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 500)), min_size=1, max_size=20)


def rollout(pairs):
    return Rollout(QWEN, [remaining for remaining, _ in pairs], [context for _, context in pairs])


def forwards(pairs):
    """Seconds of each forward, one token after the other."""
    a, b, c = QWEN.decode
    live = [list(pair) for pair in pairs]
    while live:
        yield HOST * (a + b * len(live) + c * sum(context for _, context in live)) / 1000
        live = [[left - 1, context + 1] for left, context in live if left > 1]


def test_seconds_by_hand():
    """Forwards: 2 sequences with 10 + 20 tokens, then 11 + 21, then one with 22."""
    a, b, c = QWEN.decode
    own = Rollout(QWEN, [2, 3], [10, 20])
    assert own.seconds(1) == own.forward_seconds == pytest.approx(HOST * (a + 2 * b + 30 * c) / 1000)
    assert own.seconds(3) == pytest.approx(HOST * (3 * a + 5 * b + (30 + 32 + 22) * c) / 1000)
    assert own.seconds(99) == own.seconds(3)


@given(sequences, st.integers(0, 70))
def test_seconds_are_the_sum_of_the_forwards(pairs, steps):
    assert rollout(pairs).seconds(steps) == pytest.approx(sum(list(forwards(pairs))[:steps]))


@given(sequences, st.integers(0, 60))
def test_steps_in_inverts_seconds(pairs, steps):
    own = rollout(pairs)
    steps = min(steps, own.steps_until(1))
    assert own.steps_in(own.seconds(steps)) == steps
    if steps:
        assert own.steps_in(own.seconds(steps) - 1e-6) == steps - 1
    if steps < own.steps_until(1):
        assert own.steps_in(own.seconds(steps) + 1e-6) == steps


@given(sequences, st.integers(1, 70), st.integers(0, 70))
def test_advancing_in_two_parts_is_advancing_at_once(pairs, first, second):
    apart, at_once = rollout(pairs), rollout(pairs)
    seconds = apart.seconds(first)
    tokens = apart.advance(first)
    seconds += apart.seconds(second)
    tokens += apart.advance(second)
    assert seconds == pytest.approx(at_once.seconds(first + second))
    assert tokens == at_once.advance(first + second) == apart.sampled == at_once.sampled
    assert (apart.running, apart.tokens) == (at_once.running, at_once.tokens)
    assert tokens == sum(min(left, first + second) for left, _ in pairs)


def test_steps_until_fewer_run():
    own = Rollout(QWEN, [5, 1, 9, 5], [0, 0, 0, 0])
    assert [own.steps_until(below) for below in (1, 2, 3, 4, 5)] == [9, 5, 5, 1, 0]
    own.advance(5)
    assert own.running == 1


def test_sequences_that_sample_nothing_do_not_run():
    with pytest.raises(ValueError, match="at least one token"):
        Rollout(QWEN, [3, 0], [1, 1])


def test_join_moves_sequences_and_leaves_counts():
    own, other = Rollout(QWEN, [4, 9], [1, 2]), Rollout(QWEN, [6], [30])
    own.advance(2)
    other.advance(1)
    own.join(other)
    assert (own.running, own.tokens, own.sampled) == (3, 3 + 4 + 31, 4)
    assert (other.running, other.tokens, other.sampled) == (0, 0, 1)
    assert own.seconds(99) == pytest.approx(Rollout(QWEN, [2, 7, 5], [3, 4, 31]).seconds(99))


def test_a_copy_goes_its_own_way():
    own = Rollout(QWEN, [4, 9], [1, 2])
    own.advance(1)
    twin = own.copy()
    twin.advance(3)
    assert (own.running, own.sampled, twin.running, twin.sampled) == (2, 2, 1, 8)


def test_the_cache_is_fullest_before_an_ending():
    # After 2 forwards 12 + 2 tokens; after 8 only 10.
    assert Rollout(QWEN, [2, 8], [10, 0]).peak_tokens == 14
    assert Rollout(QWEN, [2, 30], [10, 0]).peak_tokens == 30
    assert Rollout(QWEN, [], []).peak_tokens == 0


def test_nothing_takes_no_time():
    own = Rollout(QWEN, [], [])
    assert (own.seconds(5), own.steps_in(5.0), own.forward_seconds, own.bandwidth(1.0)) == (0, 0, 0, 0)
    assert own.steps_until(1) == own.advance(3) == 0


def test_bandwidth_by_hand():
    """A quarter of 8.04 GB of weights and of 1,000 tokens with 147,456 bytes each, in the time of a
    forward.
    """
    own = Rollout(QWEN, [1, 1], [400, 600])
    read = (8.04e9 + 147_456_000) / 4
    assert own.bandwidth(3.35e12) == pytest.approx(read / own.forward_seconds / 3.35e12)


@pytest.mark.parametrize("model", [m for m in ARCHITECTURES if m != "smollm2-135m"])
@pytest.mark.parametrize("profile", [H100, H200, A100], ids=lambda p: p.name)
def test_no_decode_reads_more_than_the_bus_carries(model, profile):
    for count, context in ((1, 10), (1, 8192), (128, 8192), (256, 8192)):
        own = Rollout(profile.cost(model), [1] * count, [context] * count)
        assert 0 < own.bandwidth(profile.bandwidth) < 1


# ---------------------------------------------------------------- steps


def drawn(workload=GSM8K, profile=H100, workers=2, gpus=8, seed=0, job="job", step=1, stream=False):
    return draw(workload, profile, workers, gpus, seed, job, step, stream)


def lengths(truth):
    """What each turn still has to sample, over all workers."""
    return sorted(r for chain in truth.rollout for turn in chain for r in turn.rollout._remaining)


def test_a_step_is_the_same_under_every_policy():
    one, two = drawn(), drawn()
    assert (lengths(one), one.train, one.tokens) == (lengths(two), two.train, two.tokens)


def test_lengths_depend_neither_on_device_nor_on_workers():
    assert lengths(drawn()) == lengths(drawn(profile=A100, workers=4, gpus=16))


@pytest.mark.parametrize("change", [{"seed": 1}, {"job": "other"}, {"step": 2}])
def test_other_steps_are_other(change):
    assert lengths(drawn()) != lengths(drawn(**change))


def test_every_sequence_has_one_worker():
    truth = drawn(workers=4)
    assert [turn.rollout.running for (turn,) in truth.rollout] == [64] * 4
    assert truth.tokens == sum(lengths(truth))


def test_drawn_lengths_have_the_measured_mean():
    mean = sum(drawn(step=step).tokens for step in range(40)) / 40 / 256
    assert mean == pytest.approx(1160, rel=0.05)


def test_groups_are_drawn_whole():
    pool = set(draw_groups(replace(GSM8K, prompts=2000), random.Random(0)))
    assert len(pool) == 256 and all(len(group) == 4 for group in pool)


def test_limits_cut_responses():
    truth = drawn(replace(GSM8K, max_tokens=100))
    assert lengths(truth)[-1] == 100


def test_turns_split_tokens_and_keep_contexts():
    """7 tokens over 2 turns: 4 + 3. The second turn has seen the prompt, the first, and the passages."""
    workload = replace(SEARCH, prompt_tokens=10, observation_tokens=100)
    first, second = turns(workload, H100, [Sampled(7, 2), Sampled(5, 1)], tools=[1.5])
    assert [turn_tokens(Sampled(7, 2), turn) for turn in (0, 1)] == [4, 3]
    assert (first.rollout.running, first.rollout.tokens, first.tool_seconds) == (2, 20, 1.5)
    assert (second.rollout.running, second.rollout.tokens, second.tool_seconds) == (1, 114, 0.0)
    assert first.prefill_tokens == 20
    assert second.prefill_tokens == 100
    assert second.prefill_seconds == pytest.approx(QWEN.prefill_seconds(100))
    assert step_tokens(workload, [(Sampled(7, 2), Sampled(5, 1))]) == 10 + 7 + 100 + 10 + 5


def test_a_worker_without_a_next_turn_waits_for_no_tool():
    (only,) = turns(SEARCH, H100, [Sampled(5, 1)], tools=[9.0])
    assert only.tool_seconds == 0


def test_tools_answer_the_whole_step_in_one_call():
    """80 to 82 s for 1,024 queries; 897 of 1,024 samples have a second turn."""
    truth = drawn(SEARCH)
    first, second = (chain[0].tool_seconds for chain in truth.rollout)
    queries = sum(chain[1].rollout.running for chain in truth.rollout)
    assert first == second
    assert 79.718 <= first * 1024 / queries <= 82.17


def test_the_trainers_chain():
    chain = training(GSM8K, H100, gpus=8, tokens=1e6)
    kinds = [Kind.GRADE, Kind.SYNC, Kind.LOGPROB, Kind.SYNC, Kind.LOGPROB, Kind.SYNC, Kind.UPDATE, Kind.SYNC]
    assert [s.kind for s in chain] == kinds
    # Links: 8, 2, 24 bytes of 4.02 billion parameters over 8 GPUs at 16 GB/s each. 32 sequences a GPU are 2
    # micro-batches, where 16 were measured: an eighth of the rest of the fixed 5.5, 5.3, 10.5 s.
    links = [8 * 4.02 / 8 / 16, 2 * 4.02 / 8 / 16, 24 * 4.02 / 8 / 16]
    launches = [(5.5 - 2 * links[0]) / 8, (5.3 - 2 * links[1]) / 8, (10.5 - 2 * links[2]) / 8]
    work = [4.55 + launches[0], 4.65 + launches[1], 17.15 + launches[2]]
    expected = [links[0], work[0], links[1], work[1], links[2], work[2], 3.05]
    assert [s.seconds for s in chain[1:]] == pytest.approx(expected)
    assert not any(s.early for s in chain)
    assert 0 < chain[0].seconds < 1


def test_streamed_work_is_the_same_work():
    whole, streamed = (training(GSM8K, H100, 8, 1e6, part) for part in (None, 0.25))
    for kind in (Kind.LOGPROB, Kind.UPDATE, Kind.SYNC):
        sums = [sum(s.seconds for s in chain if s.kind is kind) for chain in (whole, streamed)]
        assert sums[0] == pytest.approx(sums[1])
    early = [s.early for s in streamed]
    assert early == sorted(early, reverse=True)
    begun = sum(s.seconds for s in streamed if s.kind is Kind.UPDATE and s.early)
    assert begun == pytest.approx((17.15 + (10.5 - 24 * 4.02 / 4 / 16) / 8) / 4)
    # The same parts when nothing was finished early.
    assert [s.kind for s in training(GSM8K, H100, 8, 1e6, 0.0)] == [s.kind for s in streamed]


def test_finished_groups_are_whole():
    """8 sequences run at the end, here those of the 2 longest groups. One long sample holds its group."""
    groups = [(Sampled(10 * place, 1),) * 4 for place in range(1, 11)]
    # The 8th longest has 90 tokens: groups of 10 to 90 are whole.
    assert finished_share(groups, 1) == pytest.approx(450 / 550)
    held = [(Sampled(10, 1), Sampled(10, 1), Sampled(10, 1), Sampled(999, 1)), *groups[1:]]
    assert finished_share(held, 1) < finished_share(groups, 1)
    assert finished_share(groups[:1], 1) == 0


def test_training_noise_is_small_and_centred():
    updates = [drawn(step=step).train[6].seconds / drawn(step=step).tokens for step in range(60)]
    mean = sum(updates) / len(updates)
    spread = (sum((u - mean) ** 2 for u in updates) / len(updates)) ** 0.5
    assert 0.03 < spread / mean < 0.08


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_every_workload_can_be_drawn(workload):
    for profile in (DEVICES["H100"], DEVICES["A100"]):
        truth = drawn(workload, profile)
        assert all(turn.rollout.running for chain in truth.rollout for turn in chain)
        assert all(segment.seconds > 0 for segment in truth.train)
