"""What a run trains, in fp32, and how it is written: an adapter in PEFT's format, or a whole Hugging Face
folder.
"""

from __future__ import annotations

import json
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from workers.engines.lora import PROJECTIONS, check, join, shapes, tensor_name
from workers.engines.weights import Weights, from_state_dict
from workers.models.config import ModelConfig
from workers.models.layout import is_norm
from workers.spec import LoRA
from workers.train.forward import Policy

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
# What makes a folder of weights a model others can load.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
MOMENTS = ("exp_avg", "exp_avg_sq")


class Parameters(ABC):
    """``named`` holds every trained tensor once: fp32 leaves whose ``.grad`` accumulates."""

    named: dict[str, Tensor]
    scaling: float

    @abstractmethod
    def compute(self, base: Weights) -> Policy:
        """What a forward pass uses, differentiable in ``named``."""

    @abstractmethod
    def frozen(self, base: Weights) -> Policy:
        """What ``compute`` gives now, as a copy that training does not change."""

    @abstractmethod
    def export(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """What the rollout engine loads to compute the same; copies, on the CPU."""

    @abstractmethod
    def save(self, folder: Path, base_model: str, model_folder: Path) -> None: ...

    @abstractmethod
    def load(self, folder: Path) -> None: ...


class LoraParameters(Parameters):
    def __init__(self, config: ModelConfig, tuning: LoRA, named: dict[str, Tensor]) -> None:
        self.config = config
        self.tuning = tuning
        self.named = named
        self.scaling = tuning.alpha / tuning.rank

    def compute(self, base: Weights) -> Policy:
        return Policy(base, join(self.config, self.named, self.scaling, base.dtype))

    @torch.no_grad()
    def frozen(self, base: Weights) -> Policy:
        return self.compute(base)  # joining copies

    def export(self, dtype: torch.dtype) -> dict[str, Tensor]:
        # fp32 whatever the compute type: the engine scales before it rounds, as ``compute`` does.
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.named.items()}

    def save(self, folder: Path, base_model: str, model_folder: Path) -> None:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.named.items()}
        save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": self.tuning.rank,
            "lora_alpha": self.tuning.alpha,
            "lora_dropout": self.tuning.dropout,
            "target_modules": list(self.tuning.targets),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def load(self, folder: Path) -> None:
        tensors = read(folder / ADAPTER_FILE)
        check(self.config, tensors)
        copy_into(self.named, tensors, folder / ADAPTER_FILE)
        self._check_scaling(folder / ADAPTER_CONFIG_FILE)

    def _check_scaling(self, path: Path) -> None:
        """The same numbers with another scaling are another adapter."""
        if not path.exists():
            raise ValueError(f"{path} is missing")
        config = json.loads(path.read_text(encoding="utf-8"))
        scaling = config["lora_alpha"] / config["r"]
        if scaling != self.scaling:
            raise ValueError(f"{path}: the adapter is scaled by {scaling:g}, expected {self.scaling:g}")


class FullParameters(Parameters):
    def __init__(self, masters: Weights) -> None:
        self.masters = masters
        self.named = masters.named()
        self.scaling = 1.0

    def compute(self, base: Weights) -> Policy:
        return Policy(self._rounded(base.dtype))

    @torch.no_grad()
    def frozen(self, base: Weights) -> Policy:
        return Policy(self._rounded(base.dtype).map(lambda _, tensor: tensor.clone()))

    def _rounded(self, dtype: torch.dtype) -> Weights:
        return self.masters.map(lambda name, tensor: tensor if is_norm(name) else tensor.to(dtype))

    def export(self, dtype: torch.dtype) -> dict[str, Tensor]:
        with torch.no_grad():
            state = self._rounded(dtype).state_dict()
        return {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}

    def save(self, folder: Path, base_model: str, model_folder: Path) -> None:
        tensors = {
            name: tensor.detach().cpu().contiguous() for name, tensor in self.masters.state_dict().items()
        }
        save_file(tensors, folder / MODEL_FILE, metadata={"format": "pt"})
        for name in COMPANIONS:
            if (model_folder / name).exists():
                shutil.copyfile(model_folder / name, folder / name)

    def load(self, folder: Path) -> None:
        config, device = self.masters.config, self.masters.device
        loaded = from_state_dict(config, read(folder / MODEL_FILE), torch.float32, device)
        copy_into(self.named, loaded.named(), folder / MODEL_FILE)


def open_lora(base: Weights, tuning: LoRA, seed: int) -> LoraParameters:
    """PEFT's start: A uniform within 1/sqrt(in) (Kaiming with a = sqrt 5), B zero; drawn on the CPU in a
    fixed order.
    """
    generator = torch.Generator().manual_seed(seed)
    named: dict[str, Tensor] = {}
    for layer in range(base.config.layers):
        for projection in (name for names in PROJECTIONS.values() for name in names):
            if projection not in tuning.targets:
                continue
            inputs, outputs = shapes(base.config, projection)
            bound = 1 / math.sqrt(inputs)
            start = torch.empty(tuning.rank, inputs).uniform_(-bound, bound, generator=generator)
            named[tensor_name(layer, projection, "A")] = start.to(base.device).requires_grad_()
            zero = torch.zeros(outputs, tuning.rank, device=base.device)
            named[tensor_name(layer, projection, "B")] = zero.requires_grad_()
    return LoraParameters(base.config, tuning, named)


def open_full(base: Weights) -> FullParameters:
    return FullParameters(base.map(lambda _, tensor: tensor.detach().float().clone().requires_grad_()))


def gradients(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.zeros(tensor.shape) if tensor.grad is None else tensor.grad.cpu()
        for name, tensor in named.items()
    }


def set_gradients(named: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    if gradients.keys() != named.keys():
        raise ValueError("the gradients are those of other parameters")
    for name, tensor in named.items():
        tensor.grad = gradients[name].to(tensor.device, tensor.dtype, copy=True)


def save_optimizer(named: Mapping[str, Tensor], optimizer: torch.optim.AdamW, folder: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for name, parameter in named.items():
        state = optimizer.state.get(parameter, {})
        tensors.update({f"{key}.{name}": value.cpu().contiguous() for key, value in state.items()})
    save_file(tensors, folder / OPTIMIZER_FILE, metadata={"format": "pt"})


def load_optimizer(named: Mapping[str, Tensor], optimizer: torch.optim.AdamW, folder: Path) -> None:
    """A file without state is that of an optimizer that has not stepped yet."""
    path = folder / OPTIMIZER_FILE
    tensors = read(path)
    expected = {f"{key}.{name}" for name in named for key in ("step", *MOMENTS)}
    if tensors and tensors.keys() != expected:
        raise ValueError(f"{path} holds the state of other parameters")
    optimizer.state.clear()
    if not tensors:
        return
    for name, parameter in named.items():
        moments = {key: tensors[f"{key}.{name}"].to(parameter.device) for key in MOMENTS}
        if any(moment.shape != parameter.shape for moment in moments.values()):
            raise ValueError(f"{path}: the moments of {name} have another shape")
        optimizer.state[parameter] = {"step": tensors[f"step.{name}"].to(parameter.device), **moments}


def read(path: Path) -> dict[str, Tensor]:
    """``ValueError`` where there is no such file, or no tensors in it."""
    if not path.exists():
        raise ValueError(f"{path} is missing")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def copy_into(named: Mapping[str, Tensor], loaded: Mapping[str, Tensor], path: Path) -> None:
    """``ValueError`` where names or shapes, read from ``path``, are not those of ``named``."""
    if named.keys() != loaded.keys():
        raise ValueError(f"{path} holds other parameters than the run trains")
    with torch.no_grad():
        for name, tensor in named.items():
            if tensor.shape != loaded[name].shape:
                raise ValueError(
                    f"{path}: {name} has shape {tuple(loaded[name].shape)}, expected {tuple(tensor.shape)}"
                )
            tensor.copy_(loaded[name])
