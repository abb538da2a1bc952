"""PPO's value head: a number per token, read off the policy's final normed hidden states.

It is trained with the run and kept in its checkpoints, in a file of its own; the rollout engine does not need
it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from workers.train.parameters import copy_into, read

FILE = "value_head.safetensors"
WEIGHT, BIAS = "value_head.weight", "value_head.bias"


class ValueHead:
    """fp32; from zero, so that the first estimates are those of no value at all."""

    def __init__(self, hidden: int, device: torch.device) -> None:
        self.named = {
            WEIGHT: torch.zeros(1, hidden, device=device, requires_grad=True),
            BIAS: torch.zeros(1, device=device, requires_grad=True),
        }

    def values(self, states_N: Tensor) -> Tensor:
        """[N, hidden] -> [N] in fp32."""
        return functional.linear(states_N.float(), self.named[WEIGHT], self.named[BIAS]).squeeze(1)

    def save(self, folder: Path) -> None:
        save_file({name: tensor.detach().cpu() for name, tensor in self.named.items()}, folder / FILE)

    def load(self, folder: Path) -> None:
        copy_into(self.named, read(folder / FILE), folder / FILE)
