"""Trains several runs on one base model: an adapter each (LoRA), or a whole copy (full fine-tuning).

    forward_backward(micro-batch) … forward_backward(micro-batch) ─► [gradients, summed over workers] ─►
    optim_step(the update's totals)

Each call is one yield point: between micro-batches a run holds nothing but its accumulated gradients, so
calls of different runs may alternate. Gradients are of the loss's sum, and the step divides them by the
update's totals: micro-batches may be computed as their samples come, before the totals are known.

Parameters, gradients and AdamW's moments are fp32; products are in the base weights' type (for full
fine-tuning the fp32 masters are rounded for each pass). The reference that penalties compare with is a frozen
copy of the weights that the run started from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workers.engines.errors import NotFinite
from workers.engines.logprobs import chosen_logprobs
from workers.engines.weights import Weights
from workers.models.limits import ACTIVATION_BYTES
from workers.rl.averages import Denominator, averaging, divisor
from workers.rl.batching import Batch
from workers.rl.objective import Found, objective
from workers.rl.sums import Sums
from workers.spec import LoRA, RLConfig
from workers.train import value_head
from workers.train.forward import Drawing, Policy, by_sample, predicting_states, targets
from workers.train.parameters import (
    Parameters,
    gradients,
    load_optimizer,
    open_full,
    open_lora,
    save_optimizer,
    set_gradients,
)
from workers.train.value_head import ValueHead


@dataclass
class _Run:
    """``reference`` None: none was kept, for nothing compares with it."""

    spec: RLConfig
    seed: int
    parameters: Parameters
    head: ValueHead | None
    reference: Policy | None
    optimizer: torch.optim.AdamW

    @property
    def named(self) -> dict[str, Tensor]:
        return _trained(self.parameters, self.head)

    @property
    def optimizer_steps(self) -> int:
        state = next(iter(self.optimizer.state.values()), None)
        return 0 if state is None else int(state["step"])


class TorchTrainer:
    def __init__(self, weights: Weights, activation_bytes: int = ACTIVATION_BYTES) -> None:
        """``weights`` are frozen, and may be shared with an engine of this process.

        A micro-batch that would keep more than ``activation_bytes`` computes its blocks again on the way
        back.
        """
        self._base = weights
        self._keep = activation_bytes
        self._runs: dict[str, _Run] = {}

    # ------------------------------------------------------------ runs

    def open(self, run_key: str, spec: RLConfig, seed: int, start: Path | None = None) -> None:
        """Fresh parameters and optimizer; the same seed gives the same adapter everywhere.

        With ``start``, a checkpoint folder, the parameters are those in it, and a copy of them is the
        reference. ``ValueError`` when it holds another kind or shape of parameters.
        """
        if run_key in self._runs:
            raise ValueError(f"run {run_key} is open already")
        if isinstance(spec.tuning, LoRA):
            parameters: Parameters = open_lora(self._base, spec.tuning, seed)
        else:
            parameters = open_full(self._base)
        has_value = spec.method.baseline == "value"
        head = ValueHead(self._base.config.hidden, self._base.device) if has_value else None
        reference: Policy | None = Policy(self._base)
        if start is not None:
            parameters.load(start)
            # What was trained without a value starts with none.
            if head is not None and (start / value_head.FILE).exists():
                head.load(start)
            reference = parameters.frozen(self._base) if spec.needs_reference else None
        optimizer = _optimizer(spec, _trained(parameters, head))
        self._runs[run_key] = _Run(spec, seed, parameters, head, reference, optimizer)

    def close(self, run_key: str) -> None:
        """Forget the run; closing an unknown run does nothing."""
        self._runs.pop(run_key, None)

    def _run(self, run_key: str) -> _Run:
        if run_key not in self._runs:
            raise ValueError(f"run {run_key} is not open")
        return self._runs[run_key]

    def parameters(self, run_key: str) -> dict[str, Tensor]:
        """The run's trained tensors themselves, fp32."""
        return self._run(run_key).named

    # ------------------------------------------------------------ computing

    @torch.no_grad()
    def logprobs(self, run_key: str, batch: Batch, reference: bool = False) -> list[list[float]]:
        """Of every token, per sample, at the job's temperature; of the starting weights if ``reference``.

        0.0 where the token was not sampled.
        """
        run = self._run(run_key)
        policy = run.reference if reference else run.parameters.compute(self._base)
        if policy is None:
            raise ValueError(f"run {run_key} keeps no reference: nothing compares with it")
        states = predicting_states(policy, batch, self._keep)
        chosen = targets(batch, self._base.device)
        found, _ = chosen_logprobs(states, policy.weights.head, chosen, run.spec.sampling.temperature)
        return by_sample(batch, found.tolist())

    @torch.no_grad()
    def values(self, run_key: str, batch: Batch) -> list[list[float]]:
        """What the value head expects before every token, per sample; 0.0 where it was not sampled."""
        run = self._run(run_key)
        if run.head is None:
            raise ValueError(f"run {run_key} has no value head")
        states = predicting_states(run.parameters.compute(self._base), batch, self._keep)
        return by_sample(batch, run.head.values(states).tolist())

    def forward_backward(self, run_key: str, micro: Batch) -> Sums:
        """Add the gradient of the micro-batch's loss, not divided yet, to the run's.

        ``NotFinite`` when the loss is not; the gradients are then as before.

        The ratio is taken to ``micro.old_logprobs``; without them to the current log-probs, detached, which
        is right for the first update after a rollout (the ratio is 1). The mismatch compares the engine with
        the same numbers: the trainer's log-probs before the update.
        """
        spec = self._run(run_key).spec
        micro = micro.select(micro.trained)
        if not len(micro):
            return Sums()
        teaching = _teaching(spec, micro)
        with torch.no_grad():
            _, measured = self._summed(run_key, micro.of_groups(set(micro.groups) - teaching))
        loss, taught = self._summed(run_key, micro.of_groups(teaching))
        if loss is not None:
            loss.backward()
        return measured + taught

    def _summed(self, run_key: str, micro: Batch) -> tuple[Tensor | None, Sums]:
        if not len(micro):
            return None, Sums()
        run = self._run(run_key)
        loss, sums = objective(run.spec, micro, self._found(run, micro))
        if not bool(torch.isfinite(loss)):
            raise NotFinite(run_key, f"the loss is {float(loss.detach())}")
        return loss, sums

    def _found(self, run: _Run, micro: Batch) -> Found:
        policy = run.parameters.compute(self._base)
        states = predicting_states(policy, micro, self._keep, _drawing(run))
        logprobs, entropy = chosen_logprobs(
            states,
            policy.weights.head,
            targets(micro, self._base.device),
            run.spec.sampling.temperature,
            run.spec.loss.entropy_coef > 0,
        )
        return Found(logprobs, entropy, None if run.head is None else run.head.values(states))

    def gradients(self, run_key: str) -> dict[str, Tensor]:
        """Accumulated gradients by parameter, on the CPU; the sum over workers is the update's."""
        return gradients(self._run(run_key).named)

    def set_gradients(self, run_key: str, gradients: Mapping[str, Tensor]) -> None:
        set_gradients(self._run(run_key).named, gradients)

    def optim_step(self, run_key: str, learning_rate: float, over: Denominator) -> float:
        """AdamW on the accumulated gradients, divided by what ``over`` counts for the whole update (all
        workers) and clipped to the job's norm; returns the norm before clipping.

        Gradients are cleared. ``NotFinite`` when the norm is not; the parameters then stay as they are.
        """
        run = self._run(run_key)
        parts = divisor(averaging(run.spec), over)
        if not parts:
            raise ValueError("an update that trains no token has no gradient")
        parameters = list(run.named.values())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.div_(parts)
        norm = torch.nn.utils.clip_grad_norm_(parameters, run.spec.optimizer.max_grad_norm)
        if not bool(torch.isfinite(norm)):
            run.optimizer.zero_grad()
            raise NotFinite(run_key, f"the gradient's norm is {float(norm)}")
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate
        run.optimizer.step()
        run.optimizer.zero_grad()
        return float(norm)

    # ------------------------------------------------------------ weights and state

    def adapter(self, run_key: str) -> dict[str, Tensor]:
        """What the engine loads: LoRA in PEFT's names (fp32), or the whole model in the compute type."""
        return self._run(run_key).parameters.export(self._base.dtype)

    def scaling(self, run_key: str) -> float:
        return self._run(run_key).parameters.scaling

    def save_state(self, run_key: str, folder: Path, base_model: str, model_folder: Path) -> None:
        """Adapter in PEFT's format, or the model as a Hugging Face folder, and the optimizer's fp32 state.

        ``base_model`` is the name an adapter is said to belong to; a whole model takes its configuration and
        tokenizer from ``model_folder``.
        """
        run = self._run(run_key)
        run.parameters.save(folder, base_model, model_folder)
        if run.head is not None:
            run.head.save(folder)
        save_optimizer(run.named, run.optimizer, folder)

    def load_state(self, run_key: str, folder: Path) -> None:
        """``ValueError`` when the folder holds another kind or shape of state."""
        run = self._run(run_key)
        run.parameters.load(folder)
        if run.head is not None:
            run.head.load(folder)
        load_optimizer(run.named, run.optimizer, folder)
        run.optimizer.zero_grad()


def _trained(parameters: Parameters, head: ValueHead | None) -> dict[str, Tensor]:
    return parameters.named if head is None else parameters.named | head.named


def _optimizer(spec: RLConfig, named: Mapping[str, Tensor]) -> torch.optim.AdamW:
    """AdamW (https://arxiv.org/abs/1711.05101); only matrices decay, norms and biases do not."""
    matrices = [tensor for tensor in named.values() if tensor.ndim > 1]
    vectors = [tensor for tensor in named.values() if tensor.ndim == 1]
    groups = [{"params": matrices, "weight_decay": spec.optimizer.weight_decay}]
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    return torch.optim.AdamW(
        groups,
        lr=spec.learning_rate,
        betas=(spec.optimizer.beta1, spec.optimizer.beta2),
        eps=spec.optimizer.eps,
        fused=True,
    )


def _drawing(run: _Run) -> Drawing | None:
    """How dropout is drawn in the run's present update."""
    dropout = run.spec.tuning.dropout if isinstance(run.spec.tuning, LoRA) else 0.0
    return Drawing(dropout, run.seed, run.optimizer_steps) if dropout else None


def _teaching(spec: RLConfig, micro: Batch) -> set[int]:
    """The groups that have a gradient.

    Where no sample did better than another, and nothing but advantages teaches, it is exactly zero, and half
    the work is enough to measure them.
    """
    if _always_teaches(spec):
        return set(micro.groups)
    rows = zip(micro.groups, micro.advantages, strict=True)
    return {group for group, advantages in rows if any(advantages)}


def _always_teaches(spec: RLConfig) -> bool:
    penalized = spec.loss.kl_in == "loss" or spec.loss.entropy_coef > 0
    return penalized or spec.value is not None or not spec.method.rolls_out
