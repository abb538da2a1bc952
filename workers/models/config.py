"""What a Hugging Face ``config.json`` says about a decoder, checked: no torch in here.

Supported are the decoders that share one skeleton (RMSNorm, rotary positions, grouped-query attention, gated
SiLU feed-forward): Llama, Mistral, Qwen2 and Qwen3. Whatever a config asks for beyond that is refused with
the field's name, because a model that is computed almost right trains silently wrong.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# What transformers' classes assume where a config leaves the field out.
DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
DEFAULT_HEAD_DIM = {"qwen3": 128}
DEFAULT_WINDOW = 4096
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
WHOLE_HEAD = ("partial_rotary_factor", 1)


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
    heads = _positive(raw, "num_attention_heads")
    hidden = _positive(raw, "hidden_size")
    context = _positive(raw, "max_position_embeddings")
    _refuse_unsupported(raw, family, context)
    kv_heads = _positive(raw, "num_key_value_heads", DEFAULT_KV_HEADS.get(family), heads)
    if heads % kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = _positive(raw, "head_dim", DEFAULT_HEAD_DIM.get(family), hidden // heads)
    if head_dim % 2:
        raise ValueError(f"config.json: head_dim {head_dim} is odd; rotary positions turn pairs")
    theta, scaling = _rope(raw)
    llama_bias = family == "llama" and _flag(raw, "attention_bias")
    return ModelConfig(
        architecture=architecture,
        vocab=_positive(raw, "vocab_size"),
        hidden=hidden,
        intermediate=_positive(raw, "intermediate_size"),
        layers=_positive(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=context,
        norm_eps=_number({"rms_norm_eps": 1e-6} | raw, "rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=family == "qwen2" or llama_bias,
        out_bias=llama_bias,
        mlp_bias=family == "llama" and _flag(raw, "mlp_bias"),
        qk_norm=family == "qwen3",
        tied=_flag(raw, "tie_word_embeddings"),
    )


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"config.json: architectures must be a list of names; got {names!r}")
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    supported = ", ".join(ARCHITECTURES)
    raise ValueError(
        f"config.json: architecture {', '.join(names) or '(none)'} is not supported; supported: {supported}"
    )


def _refuse_unsupported(raw: dict[str, Any], family: str, context: int) -> None:
    if raw.get("quantization_config"):
        raise ValueError("config.json: quantization_config: quantized weights are not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act {raw['hidden_act']!r} is not supported; only silu")
    uses_window = family == "mistral" or _flag(raw, "use_sliding_window")
    if uses_window:
        # A Mistral config without the field has the class's window.
        window = raw.get("sliding_window", DEFAULT_WINDOW)
        if window is not None and _positive({"sliding_window": window}, "sliding_window") < context:
            raise ValueError(f"config.json: sliding_window {window} below the context is not supported")
    if family == "qwen3" and _flag(raw, "attention_bias"):
        raise ValueError("config.json: attention_bias is not supported for Qwen3")
    if raw.get("partial_rotary_factor") not in (None, 1):
        raise ValueError("config.json: partial_rotary_factor is not supported")


def _rope(raw: dict[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """Base and scaling, from the older pair of fields or the newer ``rope_parameters``."""
    given = [name for name in ("rope_parameters", "rope_scaling") if raw.get(name)]
    if len(given) == 2 and raw["rope_parameters"] != raw["rope_scaling"]:
        raise ValueError("config.json: rope_parameters and rope_scaling disagree; keep one of them")
    name = given[0] if given else "rope_parameters"
    parameters = raw.get(name) or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"config.json: {name} must be an object; got {parameters!r}")  # noqa: TRY004 - as above
    if parameters.get("rope_theta") is not None:
        theta = _number(parameters, "rope_theta", f"{name}.")
    else:
        theta = 10_000.0 if raw.get("rope_theta") is None else _number(raw, "rope_theta")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if not isinstance(kind, str) or kind not in ROPE_FIELDS:
        raise ValueError(
            f"config.json: {name}: rope type {kind!r} is not supported; supported: {', '.join(ROPE_FIELDS)}"
        )
    known = {"rope_type", "type", "rope_theta", *ROPE_FIELDS[kind]}
    # Also catches parameters nested by the layer's type, and a factor that turns only a part of each head.
    unknown = sorted(
        key for key, value in parameters.items() if key not in known and (key, value) != WHOLE_HEAD
    )
    if unknown:
        raise ValueError(
            f"config.json: {name}.{unknown[0]} is not supported with rope type {kind}; "
            f"supported: {', '.join(sorted(known))}"
        )
    if kind == "default":
        return theta, None
    factor, low, high, original = (_number(parameters, key, f"{name}.") for key in ROPE_FIELDS[kind])
    if high <= low:
        raise ValueError(f"config.json: {name}.high_freq_factor must be above low_freq_factor")
    return theta, Llama3Scaling(factor, low, high, int(original))


def _positive(raw: dict[str, Any], name: str, absent: int | None = None, null: int | None = None) -> int:
    """A whole number; ``absent`` and ``null`` stand in for a field that is not there or is null.

    transformers' classes tell the two apart: without ``absent``, ``null`` serves both.
    """
    value = raw.get(name)
    if value is None:
        value = absent if name not in raw and absent is not None else null
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"config.json: {name} must be a positive whole number; got {value!r}")
    return value


def _number(raw: dict[str, Any], name: str, prefix: str = "") -> float:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {prefix}{name} must be a positive number; got {value!r}")
    return float(value)


def _flag(raw: dict[str, Any], name: str) -> bool:
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"config.json: {name} must be true or false; got {value!r}")
    return bool(value)
