"""A decoder's weights, loaded from a Hugging Face folder without transformers.

Projections that read the same input are stored as one matrix (query, key and value; gate and up): fewer,
larger products. ``state_dict`` gives the Hugging Face names back as views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from workers.models.config import ModelConfig, read_config
from workers.models.describe import weight_files


@dataclass(frozen=True)
class Layer:
    """One block. Matrices are [out, in]; norms and biases are vectors; ``None`` where the family has none."""

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


MATRICES = ("qkv", "out", "gate_up", "down")


@dataclass(frozen=True)
class Weights:
    """``embed`` and ``head`` are [vocab, hidden] and the same tensor when tied; norms are always fp32."""

    config: ModelConfig
    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device

    def named(self) -> dict[str, Tensor]:
        """Every tensor once, by its place in this structure."""
        found = {"embed": self.embed, "norm": self.norm}
        if self.head is not self.embed:
            found["head"] = self.head
        for index, layer in enumerate(self.layers):
            for field in fields(layer):
                tensor = getattr(layer, field.name)
                if tensor is not None:
                    found[f"layers.{index}.{field.name}"] = tensor
        return found

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Weights:
        """The same structure with each tensor of ``named`` replaced."""
        new = {name: change(name, tensor) for name, tensor in self.named().items()}
        layers = tuple(
            replace(
                layer,
                **{
                    field.name: new[f"layers.{index}.{field.name}"]
                    for field in fields(layer)
                    if getattr(layer, field.name) is not None
                },
            )
            for index, layer in enumerate(self.layers)
        )
        return Weights(self.config, new["embed"], layers, new["norm"], new.get("head", new["embed"]))

    def state_dict(self) -> dict[str, Tensor]:
        """Views under Hugging Face's names; a tied head is left out, as there."""
        found = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm}
        if self.head is not self.embed:
            found["lm_head.weight"] = self.head
        for index, layer in enumerate(self.layers):
            for place, names in hf_names(self.config, index).items():
                tensor = getattr(layer, place)
                if tensor is not None:
                    found.update(zip(names, tensor.split(split_sizes(self.config, place)), strict=True))
        return found


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


def load_weights(folder: Path, dtype: torch.dtype, device: torch.device) -> Weights:
    """``ValueError`` for a folder that is no supported model."""
    return from_state_dict(read_config(folder), read_tensors(folder), dtype, device)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - no iterator
    return found


def from_state_dict(
    config: ModelConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> Weights:
    """Weights from Hugging Face's names; every tensor's presence and shape is checked."""

    def joined(names: Iterable[str], shape: tuple[int, ...], to: torch.dtype) -> Tensor:
        parts = []
        for name in names:
            if name not in tensors:
                raise ValueError(f"the model has no tensor {name}")
            parts.append(tensors[name])
        tensor = torch.cat([part.to(device=device, dtype=to) for part in parts])
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"tensor {parts and next(iter(names))} has shape {tuple(tensor.shape)}, expected {shape}"
            )
        return tensor

    def layer(index: int) -> Layer:
        names = hf_names(config, index)

        def part(place: str) -> Tensor | None:
            if place not in names:
                return None
            rows = sum(split_sizes(config, place))
            shape = (rows, _inputs(config, place)) if place in MATRICES else (rows,)
            return joined(names[place], shape, torch.float32 if is_norm(place) else dtype)

        return Layer(**{field.name: part(field.name) for field in fields(Layer)})  # type: ignore[arg-type]

    table = (config.vocab, config.hidden)
    embed = joined(["model.embed_tokens.weight"], table, dtype)
    return Weights(
        config=config,
        embed=embed,
        layers=tuple(layer(index) for index in range(config.layers)),
        norm=joined(["model.norm.weight"], (config.hidden,), torch.float32),
        head=embed if config.tied else joined(["lm_head.weight"], table, dtype),
    )


def _inputs(config: ModelConfig, place: str) -> int:
    return {"out": config.heads * config.head_dim, "down": config.intermediate}.get(place, config.hidden)


def blocked(weights: Weights) -> Weights:
    """The same weights with matrices in the blocked layout of oneDNN, for inference on a CPU.

    A plain matrix is re-blocked on every call, which is most of the work at small batches: decode of a 135M
    model at 4 rows takes 13 ms of matrix products blocked and 27 ms plain. The blocked copy cannot be trained
    or read.
    """
    if weights.device.type != "cpu" or weights.dtype != torch.bfloat16:
        return weights

    def pack(tensor: Tensor) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(tensor, 32)

    layers = tuple(
        replace(layer, **{name: pack(getattr(layer, name)) for name in MATRICES}) for layer in weights.layers
    )
    return replace(weights, layers=layers, head=pack(weights.head))
