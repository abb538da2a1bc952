"""Costs of models: the arithmetic by hand, and the fits against what was measured."""

from __future__ import annotations

import pytest

from scheduler.sim.measured import decode_ms, step_times
from scheduler.sim.models import (
    ARCHITECTURES,
    HOST,
    Line,
    cost,
    fit,
    least_squares,
    lora,
    through,
)

GPU_MODELS = [name for name in ARCHITECTURES if name != "smollm2-135m"]


def test_fit_is_least_squares():
    line = fit([(1, 5), (2, 7), (3, 9)])
    assert (line.fixed, line.slope) == (3, 2)


def test_fit_keeps_both_parts_at_least_0():
    assert fit([(1, 4), (2, 2)]) == Line(3, 0)
    # The free line is -1 + 2 x; through the origin the slope is (1 * 1 + 2 * 3) / (1 + 4).
    assert fit([(1, 1), (2, 3)]) == Line(0, 7 / 5)


def test_a_line_through_the_mean():
    assert through([(1, 5), (3, 9)], slope=1) == Line(5, 1)
    assert through([(1, 1), (3, 3)], slope=5).fixed == 0


def test_kv_bytes():
    # Keys and values, 36 layers, 8 heads of 128, bf16.
    assert cost("qwen3-4b").architecture.kv_bytes_per_token == 2 * 36 * 8 * 128 * 2 == 147_456


def test_prefill_goes_in_chunks():
    own = cost("qwen3-4b")
    assert own.prefill_seconds(0) == 0
    assert own.prefill_seconds(8192) == pytest.approx(HOST * (28 + 0.0035 * 8192) / 1000)
    assert own.prefill_seconds(8193) == pytest.approx(HOST * (56 + 0.0035 * 8193) / 1000)


def test_token_work_is_divided_by_the_gpus():
    own = cost("qwen3-4b")
    assert own.token_seconds(own.update, 2e6, gpus=4) == pytest.approx(68.6)
    assert own.token_seconds(own.update, 2e6, gpus=8) == pytest.approx(34.3)


def test_the_14b_lies_between_its_neighbours():
    small, own, large = (cost(m) for m in ("qwen3-8b", "deepseek-r1-distill-14b", "qwen3-32b"))
    part = (14.77 - 8.19) / (32.76 - 8.19)
    assert own.decode[0] == pytest.approx(4.62 + part * (10.3 - 4.62))
    assert own.decode[2] == pytest.approx(1.37e-5 + part * (2.5e-5 - 1.37e-5))
    assert small.prefill.slope < own.prefill.slope < large.prefill.slope
    assert own.update.slope == pytest.approx(small.update.slope * 14.77 / 8.19)


def test_lora_drops_weight_gradients_and_optimizer_moves():
    full = cost("qwen3-8b")
    adapters = lora(full)
    assert adapters.update.slope == pytest.approx(full.update.slope * 2 / 3)
    # 4 bytes of 8.19 billion parameters cross the links of 4 GPUs instead of 24.
    assert adapters.update.fixed == pytest.approx(full.update.fixed - 20 * 8.19 / 4 / 16)
    assert adapters.link_seconds(adapters.update, 4.0, 4, 16e9) == pytest.approx(4 * 8.19 / 4 / 16)
    launches = [c.launch_seconds(c.update, c.moved[2], 256, 8) for c in (full, adapters)]
    assert launches[0] == pytest.approx(launches[1])
    assert (adapters.reference, adapters.decode) == (full.reference, full.decode)
    assert adapters.lora and not full.lora


def test_the_fixed_part_is_what_was_measured_where_it_was_measured():
    """1,024 sequences on 4 GPUs: link and launches together."""
    own = cost("qwen3-4b")
    for line, moved in own.phases:
        parts = own.link_seconds(line, moved, 4, 16e9), own.launch_seconds(line, moved, 1024, 4)
        assert sum(parts) == pytest.approx(line.fixed)
    # A micro-batch is the least: 4 sequences a GPU on 64 GPUs are one of 16.
    line, moved = own.phases[2]
    assert own.launch_seconds(line, moved, 256, 64) == pytest.approx((10.5 - 24 * 4.02 / 4 / 16) / 16)
    assert own.link_seconds(line, moved, 64, 8e9) == pytest.approx(24 * 4.02 / 64 / 8)


@pytest.mark.parametrize("model", GPU_MODELS)
def test_no_cost_is_beyond_the_peak_of_4_h100(model):
    """A token needs 2 N flops forward and 6 N for an update, one decode step the weights and each cached
    token.
    """
    own = cost(model)
    per_token = own.architecture.parameters / (4 * 989e12)
    assert own.prefill.slope / 1000 > 2 * per_token
    assert own.old_logprob.slope > 2e6 * per_token
    assert own.reference.slope > 2e6 * per_token
    assert own.update.slope > 6e6 * per_token
    assert own.decode[0] / 1000 > own.architecture.weights_bytes / 4 / 3.35e12
    assert HOST * own.decode[2] / 1000 > own.architecture.kv_bytes_per_token / 4 / 3.35e12


@pytest.mark.parametrize(
    ("model", "run"),
    [
        ("qwen3-0.6b", "gsm8k_qwen3-0.6b"),
        ("qwen3-4b", "math_qwen3-4b-instruct"),
        ("qwen3-8b", "gsm8k_qwen3-8b"),
        ("llama3.1-8b", "math_llama3.1-8b"),
        ("qwen3-32b", "gsm8k_qwen3-32b"),
    ],
)
def test_a_thin_decode_step_takes_what_was_measured(model, run):
    """Where few sequences run, their contexts hardly matter."""
    a, b, _ = cost(model).decode
    assert a + b == pytest.approx(decode_ms(run)["1"], rel=0.25)
    assert a + 6 * b == pytest.approx(decode_ms(run)["5–8"], rel=0.25)


@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-4b", "qwen3-8b", "llama3.1-8b"])
def test_training_agrees_with_the_runs_in_the_mean(model):
    own = cost(model)
    rows = [row for row in step_times().values() if model in row.run and "instruct" not in row.run]
    measured = sum(row.old_logprob + row.reference + row.update for row in rows)
    modelled = sum(
        line.at(row.tokens / 1e6) for row in rows for line in (own.old_logprob, own.reference, own.update)
    )
    assert modelled == pytest.approx(measured, rel=0.1)


def test_old_logprobs_and_reference_share_their_slope():
    own = cost("qwen3-8b")
    rows = [step_times()[run] for run in ("gsm8k_qwen3-8b", "math_qwen3-8b", "multiturn_gsm8k_qwen3-8b")]
    old = least_squares([(row.tokens / 1e6, row.old_logprob) for row in rows])
    reference = least_squares([(row.tokens / 1e6, row.reference) for row in rows])
    assert own.old_logprob.slope == own.reference.slope == pytest.approx((old + reference) / 2)


def test_smollm2_on_two_threads_takes_what_was_measured_on_two():
    """Full fine-tuning of 7,168 tokens took 22 to 23 s there; a pass without gradients 5 to 6 s."""
    own = cost("smollm2-135m")
    assert own.update.at(7168 / 1e6) == pytest.approx(22.5, rel=0.15)
    assert own.old_logprob.at(7168 / 1e6) == pytest.approx(5.5, rel=0.15)
