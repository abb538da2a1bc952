"""Devices: scaling, interference tables, memory; numbers by hand."""

from __future__ import annotations

from itertools import product

import pytest

from scheduler.core.interference import Character
from scheduler.sim.devices import A100, COMPUTE, CPU, DECODES, DEVICES, H100, H200, falling, footprint, scaled
from scheduler.sim.models import cost
from scheduler.sim.truth import hidden


def test_a_device_is_a_group_of_4_gpus():
    assert (H100.gpus, H100.memory_bytes) == (4, 320e9)
    assert H100.price_per_hour == pytest.approx(4 * 4.916)


def test_compute_goes_with_flops_and_context_with_bandwidth():
    a, b, c = cost("qwen3-4b").decode
    assert A100.cost("qwen3-4b").decode == pytest.approx((a, b * 989 / 312, c * 3.35 / 2.04))
    assert H200.cost("qwen3-4b").decode == pytest.approx((a, b, c * 3.35 / 4.8))
    update = A100.cost("qwen3-4b").update
    assert (update.fixed, update.slope) == pytest.approx((10.5, 34.3 * 989 / 312))
    assert H100.cost("qwen3-4b") == cost("qwen3-4b")


def test_adapters_are_asked_for_by_the_device():
    assert H100.cost("qwen3-4b", adapters=True).update.slope == pytest.approx(34.3 * 2 / 3)
    # SmolLM2 was measured with adapters: nothing is taken off twice.
    assert CPU.cost("smollm2-135m", adapters=True) == CPU.cost("smollm2-135m")


def test_falling_pools_neighbours_that_rise():
    assert falling([4, 1, 3, 1]) == (4, 2, 2, 1)
    assert falling([3, 2, 0.5, 1]) == pytest.approx((4, 8 / 3, 1, 1))


def test_compute_alone_is_the_measured_row():
    for name in COMPUTE:
        assert H100.interference.alone[name] == (2.37, 1.88, 1.54, 1.34, 1.25, 1.14, 1.06, 1.0)


def test_decode_alone_by_hand():
    """Batches 128 and 256 in the mean: 1.785 1.425 1.27 1.145 1.12 1.21 0.93, then 1. Two pools: three
    values of 1.1583 and two of 0.965; by the latter all are divided, and the host's 0.27 is added.
    """
    fell = [x / 0.965 for x in (1.785, 1.425, 1.27, *[3.475 / 3] * 3, 0.965, 0.965)]
    assert H100.interference.alone[Character.DECODE] == pytest.approx([(x + 0.27) / 1.27 for x in fell])


def test_the_disturbed_measurement_is_left_out():
    """With 1.94 at 90 % in it, the tail's row would not come down to 1 before the whole device."""
    assert H100.interference.alone[Character.TAIL][4:] == (1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("name", (Character.DECODE, *COMPUTE))
def test_two_alike_and_saturated_gain_nothing_at_half_the_device(name):
    slow = H100.interference.slow((name, name), (0.5, 0.5), bandwidth=0.0)
    assert sum(1 / s for s in slow) == pytest.approx(1)


@pytest.mark.parametrize(
    ("pair", "factor"),
    [
        ((Character.TAIL, Character.THIN), 1.05),
        ((Character.TAIL, Character.UPDATE), 1.10),
        ((Character.UPDATE, Character.DECODE), 1.10),
        ((Character.SYNC, Character.SYNC), 2.0),
    ],
)
def test_central_factors(pair, factor):
    assert H100.interference.beside[pair] == factor


def test_transfers_leave_the_compute_units_alone():
    others = [c for c in Character if c is not Character.SYNC]
    beside = H100.interference.beside
    assert not any((Character.SYNC, c) in beside or (c, Character.SYNC) in beside for c in others)


def test_every_pair_that_computes_has_a_factor():
    busy = (*DECODES, *COMPUTE)
    for profile in DEVICES.values():
        assert all(pair in profile.interference.beside for pair in product(busy, busy))


def test_scaled_moves_every_factor_but_not_below_1():
    more, less = scaled(H100.interference, 1.25), scaled(H100.interference, 0.75)
    assert more.beside[Character.TAIL, Character.UPDATE] == pytest.approx(1.375)
    assert less.beside[Character.TAIL, Character.UPDATE] == 1.0
    assert less.beside[Character.SYNC, Character.SYNC] == 1.5


def test_cpu_gains_are_those_measured():
    decode, update = Character.DECODE, Character.UPDATE
    slow = CPU.interference.slow((decode, update), (0.5, 0.5), bandwidth=0.0)
    assert sum(1 / s for s in slow) == pytest.approx(1.36, abs=0.01)
    # Two pipelines that spend half of their time on each.
    assert 2 / (sum(slow) / 2) == pytest.approx(1.34, abs=0.01)


def test_the_truth_differs_from_the_table_but_not_below_1():
    table = H100.interference
    true = hidden(table, seed=3)
    assert true == hidden(table, seed=3)
    assert true.beside != hidden(table, seed=4).beside
    assert true.alone == table.alone
    ratios = [true.beside[pair] / factor for pair, factor in table.beside.items()]
    assert min(true.beside.values()) >= 1
    assert 0.7 < min(ratios) < 0.98 and 1.02 < max(ratios) < 1.4


def test_footprint_by_hand():
    own = cost("qwen3-4b")
    # 8.04 GB of bf16 weights for the engine and a half for the trainer's shard.
    # 16 bytes for each of 4.02e9 parameters on two devices, 1,000 cached tokens, and 4 micro-batches of 8,704
    # tokens: inputs of 36 layers of 2,560, logits and their gradients of 151,936, two bytes each.
    activations = 4 * 8704 * (36 * 2560 * 2 + 151_936 * 4)
    needs = footprint(own, devices=2, kv_tokens=1000)
    assert needs.weights_bytes == 12.06e9
    assert needs.run_bytes == 32.16e9 + 147_456_000 + activations


def test_adapters_need_little_memory():
    full = footprint(H100.cost("qwen3-8b"), 1, 0)
    adapters = footprint(H100.cost("qwen3-8b", adapters=True), 1, 0)
    assert adapters.weights_bytes == full.weights_bytes
    # 0.52 % of the parameters with 18 bytes each instead of all with 16.
    assert full.run_bytes - adapters.run_bytes == pytest.approx(8.19e9 * (16 - 0.0052 * 18))
