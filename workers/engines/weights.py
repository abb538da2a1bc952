"""A decoder's weights, loaded from a Hugging Face folder without transformers.

Projections that read the same input are stored as one matrix (``models/layout.py``): fewer, larger products.
``state_dict`` gives the Hugging Face names back as views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.models.config import ModelConfig, read_config
from workers.models.describe import weight_files
from workers.models.layout import MATRICES, check_shapes, hf_names, is_norm, split_sizes


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


def load_weights(folder: Path, dtype: torch.dtype, device: torch.device) -> Weights:
    """``ValueError`` for a folder that is no supported model."""
    return from_state_dict(read_config(folder), read_tensors(folder), dtype, device)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - no iterator
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
    return found


def from_state_dict(
    config: ModelConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> Weights:
    """Weights from Hugging Face's names; every tensor's presence and shape is checked."""
    check_shapes(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})

    def joined(names: Iterable[str], to: torch.dtype) -> Tensor:
        return torch.cat([tensors[name].to(device=device, dtype=to) for name in names])

    def layer(index: int) -> Layer:
        names = hf_names(config, index)
        parts = {place: joined(names[place], torch.float32 if is_norm(place) else dtype) for place in names}
        return Layer(**{field.name: parts.get(field.name) for field in fields(Layer)})  # type: ignore[arg-type]

    embed = joined(["model.embed_tokens.weight"], dtype)
    return Weights(
        config=config,
        embed=embed,
        layers=tuple(layer(index) for index in range(config.layers)),
        norm=joined(["model.norm.weight"], torch.float32),
        head=embed if config.tied else joined(["lm_head.weight"], dtype),
    )


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
