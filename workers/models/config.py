"""What a Hugging Face ``config.json`` says about a decoder, checked: no torch in here.

Supported are the decoders that share one skeleton (RMSNorm, rotary positions, grouped-query attention, gated
SiLU feed-forward): Llama, Mistral, Qwen2 and Qwen3. Whatever a config asks for beyond that is refused with
the field's name, because a model that is computed almost right trains silently wrong.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True)
class Llama3Scaling:
    """Frequency-dependent stretching of the rotary wavelengths (https://arxiv.org/abs/2407.21783)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool


def read_config(folder: Path) -> ModelConfig:
    """The folder's ``config.json``; ``ValueError`` when it is missing, broken or asks for something
    unsupported.
    """
    return parse_config(read_json(folder, "config.json"))


def read_json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"model folder {folder} has no {name}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")  # noqa: TRY004 - one error type for bad folders
    return content


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    architecture = _architecture(raw)
    family = ARCHITECTURES[architecture]
    _refuse_unsupported(raw, family)
    heads = _positive(raw, "num_attention_heads")
    hidden = _positive(raw, "hidden_size")
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    theta, scaling = _rope(raw)
    llama_bias = family == "llama" and bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab=_positive(raw, "vocab_size"),
        hidden=hidden,
        intermediate=_positive(raw, "intermediate_size"),
        layers=_positive(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        context=_positive(raw, "max_position_embeddings"),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=family == "qwen2" or llama_bias,
        out_bias=llama_bias,
        mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        tied=bool(raw.get("tie_word_embeddings", False)),
    )


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    supported = ", ".join(ARCHITECTURES)
    raise ValueError(
        f"config.json: architecture {', '.join(names) or '(none)'} is not supported; supported: {supported}"
    )


def _refuse_unsupported(raw: dict[str, Any], family: str) -> None:
    if raw.get("quantization_config"):
        raise ValueError("config.json: quantization_config: quantized weights are not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act {raw['hidden_act']!r} is not supported; only silu")
    window = raw.get("sliding_window")
    uses_window = family == "mistral" or bool(raw.get("use_sliding_window", False))
    if uses_window and window and window < raw.get("max_position_embeddings", 0):
        raise ValueError(f"config.json: sliding_window {window} below the context is not supported")
    if family == "qwen3" and raw.get("attention_bias"):
        raise ValueError("config.json: attention_bias is not supported for Qwen3")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("config.json: partial_rotary_factor is not supported")


def _rope(raw: dict[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """Base and scaling, from the older pair of fields or the newer ``rope_parameters``."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"config.json: rope type {kind!r} is not supported; supported: default, llama3")
    try:
        return theta, Llama3Scaling(
            factor=float(parameters["factor"]),
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
            original_context=int(parameters["original_max_position_embeddings"]),
        )
    except KeyError as missing:
        raise ValueError(f"config.json: rope type llama3 lacks the field {missing}") from None


def _positive(raw: dict[str, Any], name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"config.json: {name} must be a positive whole number; got {value!r}")
    return value
