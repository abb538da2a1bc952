"""Our decoder against transformers, family by family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny import make_tiny
from tests.workers.engines.adapters import logits
from workers.engines.decoder import head_logits, hidden_states
from workers.engines.packed import pack, packed_attention
from workers.engines.weights import Weights, blocked, from_state_dict, load_weights
from workers.models.config import read_config

CPU = torch.device("cpu")
TOKENS = [3, 9, 22, 7, 31, 40, 5, 5, 60, 12, 8, 19, 44, 2, 33, 27]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-untied": {"tie_word_embeddings": False},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-3-rope": {"rope_scaling": LLAMA3},
    "llama-rope-parameters": {"rope_parameters": LLAMA3 | {"rope_theta": 50000.0}, "rope_theta": None},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3-whole-rope": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 777.0, "partial_rotary_factor": 1.0},
        "rope_theta": None,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 48,
        "attention_bias": False,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, **FAMILIES[family])
    ours = logits(load_weights(tmp_path, torch.float32, CPU), TOKENS)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.tensor([TOKENS])).logits[0]
    assert theirs.std() > 0.1
    assert (ours - theirs).abs().max() < 1e-4


def test_shared_prompt_equals_separate_sequences(tiny: Weights) -> None:
    prompts = [TOKENS[:6], TOKENS[3:14]]
    rows = [(0, [9, 9, 4]), (1, [17]), (0, []), (1, [30, 2, 2, 50, 6])]
    batch = pack(prompts, rows, CPU)
    with torch.no_grad():
        hidden = hidden_states(tiny, batch.tokens_T, batch.positions_T, packed_attention(batch), None)
        found = head_logits(tiny, hidden)
    start = sum(len(prompt) for prompt in prompts)
    for prompt, tokens in rows:
        alone = logits(tiny, prompts[prompt] + tokens)
        ours = found[start : start + len(tokens)]
        torch.testing.assert_close(ours, alone[len(prompts[prompt]) :], atol=1e-5, rtol=1e-5)
        start += len(tokens)


def test_sharded_folder_loads_the_same(tiny_folder: Path, tiny: Weights, tmp_path: Path) -> None:
    make_tiny(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = load_weights(tmp_path, torch.float32, CPU)
    for name, tensor in tiny.named().items():
        assert torch.equal(tensor, loaded.named()[name]), name


def test_state_dict_gives_the_file_back(tiny_folder: Path, tiny: Weights) -> None:
    original = load_file(tiny_folder / "model.safetensors")
    state = tiny.state_dict()
    assert state.keys() == original.keys()
    assert all(torch.equal(state[name], original[name]) for name in original)


def test_missing_and_misshapen_tensors_are_named(tiny_folder: Path) -> None:
    config = read_config(tiny_folder)
    tensors = load_file(tiny_folder / "model.safetensors")
    down = "model.layers.2.mlp.down_proj.weight"
    with pytest.raises(ValueError, match=down):
        from_state_dict(config, {k: v for k, v in tensors.items() if k != down}, torch.float32, CPU)
    with pytest.raises(ValueError, match=rf"{down} has shape \(128, 5\), expected \(128, 256\)"):
        from_state_dict(config, tensors | {down: torch.zeros(128, 5)}, torch.float32, CPU)


def test_a_swap_that_keeps_the_joined_shape_is_named(tiny_folder: Path) -> None:
    tensors = load_file(tiny_folder / "model.safetensors")
    query, key = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk")
    swapped = tensors | {query: tensors[key], key: tensors[query]}
    with pytest.raises(ValueError, match=r"q_proj.weight has shape \(64, 128\), expected \(128, 128\)"):
        from_state_dict(read_config(tiny_folder), swapped, torch.float32, CPU)


def test_a_broken_file_is_a_value_error(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        load_weights(tmp_path, torch.float32, CPU)


def test_blocked_weights_compute_the_same(tiny_folder: Path) -> None:
    weights = load_weights(tiny_folder, torch.bfloat16, CPU)
    with torch.inference_mode():
        plain, fast = logits(weights, TOKENS), logits(blocked(weights), TOKENS)
    # bf16 keeps 8 bits: two orders of summation differ in the last one.
    torch.testing.assert_close(plain, fast, atol=2e-2, rtol=2e-2)
