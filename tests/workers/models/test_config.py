"""What a config may say, and what is refused rather than computed almost right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen3Config

from tests.tiny import CONFIG
from workers.models.config import parse_config, read_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of names"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads must be a positive whole number; got '2'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a positive whole number; got True"),
        ({"hidden_size": "128"}, "hidden_size must be a positive whole number"),
        ({"head_dim": 33}, "head_dim 33 is odd"),
        ({"head_dim": 32.0}, r"head_dim must be a positive whole number; got 32\.0"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a positive number; got None"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a positive number; got '1e-5'"),
        ({"rope_theta": -1}, "rope_theta must be a positive number; got -1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false; got 'yes'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"rope_scaling": [1.0]}, "rope_scaling must be an object"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"rope_type": ["llama3"]}}, "rope type .'llama3'. is not supported"),
        ({"rope_scaling": {"rope_type": "default", "factor": 4.0}}, "rope_scaling.factor is not supported"),
        ({"rope_scaling": LLAMA3 | {"factor": None}}, "rope_scaling.factor must be a positive number"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "high_freq_factor must be above"),
        (
            {"rope_scaling": LLAMA3 | {"attention_factor": 2}},
            "rope_scaling.attention_factor is not supported",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not supported"),
        ({"rope_parameters": {"rope_theta": "many"}}, "rope_parameters.rope_theta must be a positive number"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_parameters.full_attention is not supported",
        ),
        (
            {"rope_parameters": {"rope_theta": 500.0}, "rope_scaling": LLAMA3},
            "rope_parameters and rope_scaling disagree",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 64},
            "sliding_window 64 below the context",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192},
            "sliding_window 4096 below the context",
        ),
    ],
)
def test_what_we_cannot_compute_is_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(ValueError, match=reason):
        read_config(tmp_path)


def test_fields_left_out_are_those_of_transformers_classes() -> None:
    bare = {name: value for name, value in CONFIG.items() if name != "num_key_value_heads"}
    bare |= {"hidden_size": 256, "num_attention_heads": 64}
    qwen3 = parse_config(bare | {"architectures": ["Qwen3ForCausalLM"]})
    assert (qwen3.head_dim, qwen3.kv_heads) == (Qwen3Config().head_dim, Qwen3Config().num_key_value_heads)
    qwen2 = parse_config(bare | {"architectures": ["Qwen2ForCausalLM"]})
    assert (qwen2.head_dim, qwen2.kv_heads) == (4, Qwen2Config().num_key_value_heads)
    llama = parse_config(bare)
    assert (llama.head_dim, llama.kv_heads) == (4, 64)
