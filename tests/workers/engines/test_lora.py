from __future__ import annotations

import pytest
import torch

from tests.workers.engines.adapters import logits, random_adapter
from workers.engines.decoder import head_logits, hidden_states
from workers.engines.lora import check, join, side_by_side, tensor_name
from workers.engines.packed import pack, packed_attention
from workers.engines.weights import Weights

CPU = torch.device("cpu")
TOKENS = [3, 9, 22, 7, 31, 40, 5, 5, 60]


def test_mixed_rows_equal_each_adapter_alone(tiny: Weights) -> None:
    config = tiny.config
    full = join(config, random_adapter(config, 1, rank=4), 2.0, torch.float32)
    partial = join(
        config, random_adapter(config, 2, rank=3, targets=["k_proj", "up_proj"]), 0.5, torch.float32
    )
    adapters, rows = [full, None, partial], [len(TOKENS)] * 3
    batch = pack([TOKENS] * 3, [], CPU)
    with torch.no_grad():
        mixed = side_by_side(adapters, rows, config.layers)
        hidden = hidden_states(tiny, batch.tokens_T, batch.positions_T, packed_attention(batch), mixed)
        found = head_logits(tiny, hidden).split(len(TOKENS))
    for adapter, ours in zip(adapters, found, strict=True):
        torch.testing.assert_close(ours, logits(tiny, TOKENS, adapter), atol=1e-5, rtol=1e-5)
    assert (found[0] - found[1]).abs().max() > 0.05
    assert (found[2] - found[1]).abs().max() > 0.005


def test_one_adapter_takes_the_plain_path(tiny: Weights) -> None:
    adapter = join(tiny.config, random_adapter(tiny.config, 1), 1.0, torch.float32)
    assert side_by_side([adapter], [5], tiny.config.layers) is adapter
    assert side_by_side([None, None], [2, 3], tiny.config.layers) is None


def test_bad_adapters_are_refused_by_name(tiny: Weights) -> None:
    good = random_adapter(tiny.config, 1)
    name = tensor_name(1, "q_proj", "A")
    cases = [
        ({"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": good[name]}, "does not belong"),
        ({name: good[name]}, "has no partner"),
        (good | {name: torch.zeros(4, 7)}, r"shape \(4, 7\), expected \(4, 128\)"),
        (good | {name: torch.full_like(good[name], float("nan"))}, "not finite"),
    ]
    for tensors, reason in cases:
        with pytest.raises(ValueError, match=reason):
            check(tiny.config, tensors)
