"""Names and shapes of a decoder's tensors: Hugging Face's, and how they are joined here.

Projections that read the same input are stored as one matrix (query, key and value; gate and up).
"""

from __future__ import annotations

from collections.abc import Mapping

from workers.models.config import ModelConfig

MATRICES = ("qkv", "out", "gate_up", "down")


def is_norm(name: str) -> bool:
    return name.rpartition(".")[2] in {"norm", "attn_norm", "mlp_norm", "q_norm", "k_norm"}


def split_sizes(config: ModelConfig, place: str) -> list[int]:
    """Rows of the parts a stored tensor is joined from."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    sizes = {
        "qkv": [queries, keys, keys],
        "out": [config.hidden],
        "gate_up": [config.intermediate, config.intermediate],
        "down": [config.hidden],
        "attn_norm": [config.hidden],
        "mlp_norm": [config.hidden],
        "q_norm": [config.head_dim],
        "k_norm": [config.head_dim],
    }
    return sizes[place.removesuffix("_bias")]


def input_size(config: ModelConfig, place: str) -> int:
    """Columns of a stored matrix."""
    return {"out": config.heads * config.head_dim, "down": config.intermediate}.get(place, config.hidden)


def hf_names(config: ModelConfig, layer: int) -> dict[str, list[str]]:
    """Hugging Face's names of the parts of each stored tensor of a layer."""
    prefix = f"model.layers.{layer}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    names = {
        "attn_norm": [prefix + "input_layernorm.weight"],
        "qkv": [f"{attention}{part}_proj.weight" for part in "qkv"],
        "out": [attention + "o_proj.weight"],
        "mlp_norm": [prefix + "post_attention_layernorm.weight"],
        "gate_up": [mlp + "gate_proj.weight", mlp + "up_proj.weight"],
        "down": [mlp + "down_proj.weight"],
    }
    biases = {
        "qkv": config.qkv_bias,
        "out": config.out_bias,
        "gate_up": config.mlp_bias,
        "down": config.mlp_bias,
    }
    for place, present in biases.items():
        if present:
            names[f"{place}_bias"] = [name.removesuffix("weight") + "bias" for name in names[place]]
    if config.qk_norm:
        names |= {"q_norm": [attention + "q_norm.weight"], "k_norm": [attention + "k_norm.weight"]}
    return names


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model under Hugging Face's name; a tied head has none of its own."""
    table = (config.vocab, config.hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": table,
        "model.norm.weight": (config.hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = table
    for layer in range(config.layers):
        for place, names in hf_names(config, layer).items():
            for name, rows in zip(names, split_sizes(config, place), strict=True):
                shapes[name] = (rows, input_size(config, place)) if place in MATRICES else (rows,)
    return shapes


def check_shapes(config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """``ValueError`` names the first tensor that is missing, misshapen, or none of the model's.

    A copy of the tied head and the rotary frequencies may be there: both follow from the rest.
    """
    expected = tensor_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            raise ValueError(f"the model has no tensor {name}")
        if found[name] != shape:
            raise ValueError(f"tensor {name} has shape {found[name]}, expected {shape}")
    for name in found:
        derived = name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight")
        if name not in expected and not derived:
            raise ValueError(f"tensor {name} is not one of the model's: {config.architecture} has none such")
