"""Low-rank adapters (https://arxiv.org/abs/2106.09685) in PEFT's naming, joined for the stored matrices.

PEFT keeps a pair per projection: ``lora_A`` [rank, in] and ``lora_B`` [out, rank]. Projections stored as one
matrix get one pair too: the A's stacked, the B's on a block diagonal. Several adapters go side by side in the
same way, and a mask tells each token its own columns, so any mix of adapters is two matrix products.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from workers.engines.decoder import Adapters, LowRank
from workers.models.config import ModelConfig
from workers.models.layout import input_size, split_sizes

# The stored matrix -> the projections it is joined from, in order.
PROJECTIONS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
NAME = re.compile(
    r"base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+_proj)\.lora_([AB])\.weight"
)
ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})


def tensor_name(layer: int, projection: str, side: str) -> str:
    part = "self_attn" if projection in ATTENTION else "mlp"
    return f"base_model.model.model.layers.{layer}.{part}.{projection}.lora_{side}.weight"


def shapes(config: ModelConfig, projection: str) -> tuple[int, int]:
    """(in, out) of a projection."""
    place = next(place for place, names in PROJECTIONS.items() if projection in names)
    rows = split_sizes(config, place)[PROJECTIONS[place].index(projection)]
    return input_size(config, place), rows


def check(config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """``ValueError`` for names or shapes that do not belong to the model, and for numbers that are not
    finite.
    """
    for name, tensor in tensors.items():
        match = NAME.fullmatch(name)
        if match is None or int(match[1]) >= config.layers:
            raise ValueError(f"adapter tensor {name} does not belong to the model")
        layer, projection, side = int(match[1]), match[2], match[3]
        partner = tensors.get(tensor_name(layer, projection, "B" if side == "A" else "A"))
        if partner is None:
            raise ValueError(f"adapter tensor {name} has no partner")
        inputs, outputs = shapes(config, projection)
        rank = partner.shape[1 if side == "A" else 0]
        expected = (rank, inputs) if side == "A" else (outputs, rank)
        if tuple(tensor.shape) != expected:
            raise ValueError(f"adapter tensor {name} has shape {tuple(tensor.shape)}, expected {expected}")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"adapter tensor {name} holds a number that is not finite")


def join(config: ModelConfig, tensors: Mapping[str, Tensor], scaling: float, dtype: torch.dtype) -> Adapters:
    """One adapter ready for ``decoder.linear``; differentiable in ``tensors``.

    The scaling goes into B before rounding to ``dtype``, here for engine and trainer alike.
    """

    def at(layer: int, place: str) -> LowRank | None:
        downs, ups = [], []
        for projection, rows in zip(PROJECTIONS[place], split_sizes(config, place), strict=True):
            up = tensors.get(tensor_name(layer, projection, "B"))
            if up is None:
                ups.append(torch.zeros(rows, 0, dtype=dtype, device=_device(tensors)))
                continue
            downs.append(tensors[tensor_name(layer, projection, "A")].to(dtype))
            ups.append((up * scaling).to(dtype))
        if not downs:
            return None
        up = ups[0] if len(ups) == 1 else torch.block_diag(*ups)
        return LowRank(torch.cat(downs), up, None)

    layers = ({place: at(layer, place) for place in PROJECTIONS} for layer in range(config.layers))
    return tuple({place: pair for place, pair in layer.items() if pair is not None} for layer in layers)


def _device(tensors: Mapping[str, Tensor]) -> torch.device:
    return next(iter(tensors.values())).device


def side_by_side(adapters: Sequence[Adapters | None], rows: Sequence[int], layers: int) -> Adapters | None:
    """Adapters of a batch whose first ``rows[0]`` tokens use ``adapters[0]``, the next ``rows[1]`` the
    second, …

    One adapter over all tokens keeps no mask: the plain two products.
    """
    if all(adapter is None for adapter in adapters):
        return None
    if len(adapters) == 1:
        return adapters[0]
    masks: dict[tuple[int, ...], Tensor] = {}

    def at(layer: int, place: str) -> LowRank | None:
        pairs = [None if adapter is None else adapter[layer].get(place) for adapter in adapters]
        present = [pair for pair in pairs if pair is not None]
        if not present:
            return None
        widths = tuple(0 if pair is None else pair.down.shape[0] for pair in pairs)
        if widths not in masks:
            blocks = [
                torch.ones(count, width, dtype=torch.bool) for count, width in zip(rows, widths, strict=True)
            ]
            masks[widths] = torch.block_diag(*blocks).to(present[0].down.device, torch.bool)
        downs, ups = (
            torch.cat([pair.down for pair in present]),
            torch.cat([pair.up for pair in present], dim=1),
        )
        return LowRank(downs, ups, masks[widths])

    stacked = ({place: at(layer, place) for place in PROJECTIONS} for layer in range(layers))
    return tuple({place: pair for place, pair in layer.items() if pair is not None} for layer in stacked)
