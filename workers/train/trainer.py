"""Trains several runs on one base model: an adapter each (LoRA), or a whole copy (full fine-tuning).

    forward_backward(micro-batch) … forward_backward(micro-batch) ─► [gradients, summed over workers] ─►
    optim_step(the update's totals)

Each call is one yield point: between micro-batches a run holds nothing but its accumulated gradients, so
calls of different runs may alternate. Gradients are of the loss's sum, and the step divides them by the
update's totals: micro-batches may be computed as their samples come, before the totals are known.

Parameters, gradients and AdamW's moments are fp32; products are in the base weights' type (for full
fine-tuning the fp32 masters are rounded for each pass). Forward passes go through the rollout engine's
decoder, with each prompt computed once for all its completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from workers.engines.decoder import Adapters, hidden_states
from workers.engines.errors import NotFinite
from workers.engines.logprobs import chosen_logprobs
from workers.engines.packed import pack, packed_attention
from workers.engines.weights import Weights
from workers.models.limits import ACTIVATION_BYTES
from workers.rl.averages import Denominator, divisor
from workers.rl.batching import Batch
from workers.rl.kl import k3
from workers.rl.losses import clipped_policy_loss, importance_weights, token_weights
from workers.rl.sums import Sums
from workers.spec import LoRA, RLConfig
from workers.train.parameters import (
    Parameters,
    load_optimizer,
    open_full,
    open_lora,
    save_optimizer,
)

T = TypeVar("T")


@dataclass
class _Run:
    spec: RLConfig
    parameters: Parameters
    optimizer: torch.optim.AdamW


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

    def open(self, run_key: str, spec: RLConfig, seed: int) -> None:
        """Fresh parameters and optimizer; the same seed gives the same adapter everywhere."""
        if run_key in self._runs:
            raise ValueError(f"run {run_key} is open already")
        if isinstance(spec.tuning, LoRA):
            parameters: Parameters = open_lora(self._base, spec.tuning, seed)
        else:
            parameters = open_full(self._base)
        self._runs[run_key] = _Run(spec, parameters, _optimizer(spec, parameters))

    def close(self, run_key: str) -> None:
        """Forget the run; closing an unknown run does nothing."""
        self._runs.pop(run_key, None)

    def _run(self, run_key: str) -> _Run:
        if run_key not in self._runs:
            raise ValueError(f"run {run_key} is not open")
        return self._runs[run_key]

    def parameters(self, run_key: str) -> dict[str, Tensor]:
        """The run's trained tensors themselves, fp32."""
        return self._run(run_key).parameters.named

    # ------------------------------------------------------------ computing

    @torch.no_grad()
    def logprobs(self, run_key: str, batch: Batch, reference: bool = False) -> list[list[float]]:
        """Of every token, per sample, at the job's temperature; of the starting weights if ``reference``.

        0.0 where the token was not sampled.
        """
        run = self._run(run_key)
        if reference:
            weights, adapters = self._base, None
        else:
            weights, adapters = run.parameters.compute(self._base)
        found, _ = _forward(weights, adapters, batch, run.spec.sampling.temperature, self._keep)
        values = iter(found.tolist())
        return [[next(values) if sampled else 0.0 for sampled in row] for row in batch.sampled]

    def forward_backward(self, run_key: str, micro: Batch) -> Sums:
        """Add the gradient of the micro-batch's loss, not divided yet, to the run's.

        ``NotFinite`` when the loss is not; the gradients are then as before.

        The ratio is taken to ``micro.old_logprobs``; without them to the current log-probs, detached, which
        is right for the first update after a rollout (the ratio is 1). The mismatch compares the engine with
        the same numbers: the trainer's log-probs before the update.
        """
        run = self._run(run_key)
        micro = micro.select(micro.trained)
        if not len(micro):
            return Sums()
        if run.spec.loss.kl_beta > 0 and micro.reference_logprobs is None:
            raise ValueError("a KL penalty needs reference log-probs in the batch")
        teaching = _teaching(run.spec, micro)
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
        weights, adapters = run.parameters.compute(self._base)
        logprobs, entropy = _forward(weights, adapters, micro, run.spec.sampling.temperature, self._keep)
        loss, sums = _loss(run.spec, micro, logprobs, entropy)
        if not bool(torch.isfinite(loss)):
            raise NotFinite(run_key, f"the loss is {float(loss.detach())}")
        return loss, sums

    def gradients(self, run_key: str) -> dict[str, Tensor]:
        """Accumulated gradients by parameter; the sum over workers is the update's."""
        return self._run(run_key).parameters.gradients()

    def set_gradients(self, run_key: str, gradients: Mapping[str, Tensor]) -> None:
        self._run(run_key).parameters.set_gradients(gradients)

    def optim_step(self, run_key: str, learning_rate: float, over: Denominator) -> float:
        """AdamW on the accumulated gradients, divided by what ``over`` counts for the whole update (all
        workers) and clipped to the job's norm; returns the norm before clipping.

        Gradients are cleared. ``NotFinite`` when the norm is not; the parameters then stay as they are.
        """
        run = self._run(run_key)
        parts = divisor(run.spec.loss.average, over)
        if not parts:
            raise ValueError("an update that trains no token has no gradient")
        parameters = list(run.parameters.named.values())
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
        save_optimizer(run.parameters, run.optimizer, folder)

    def load_state(self, run_key: str, folder: Path) -> None:
        """``ValueError`` when the folder holds another kind or shape of state."""
        run = self._run(run_key)
        run.parameters.load(folder)
        load_optimizer(run.parameters, run.optimizer, folder)
        run.optimizer.zero_grad()


def _optimizer(spec: RLConfig, parameters: Parameters) -> torch.optim.AdamW:
    """AdamW (https://arxiv.org/abs/1711.05101); only matrices decay, norms and biases do not."""
    matrices = [tensor for tensor in parameters.named.values() if tensor.ndim > 1]
    vectors = [tensor for tensor in parameters.named.values() if tensor.ndim == 1]
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


def _teaching(spec: RLConfig, micro: Batch) -> set[int]:
    """The groups that have a gradient: where no sample did better than another it is exactly zero, and half
    the work is enough to measure them.
    """
    penalized = spec.loss.kl_beta > 0
    pairs = zip(micro.groups, micro.advantages, strict=True)
    return {group for group, advantage in pairs if penalized or advantage}


def _forward(
    weights: Weights, adapters: Adapters | None, batch: Batch, temperature: float, keep: int
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of all sampled tokens, one sample after the other, [N] each."""
    prompts: dict[tuple[int, ...], int] = {}
    for prompt in batch.prompts:
        prompts.setdefault(prompt, len(prompts))
    places = [[at for at, sampled in enumerate(row) if sampled] for row in batch.sampled]
    # From its last sampled token on, a completion predicts nothing that was sampled.
    rows = [
        (prompts[prompt], tokens[: found[-1] if found else 0])
        for prompt, tokens, found in zip(batch.prompts, batch.completions, places, strict=True)
    ]
    device = weights.device
    packed = pack(list(prompts), rows, device)
    recompute = (
        torch.is_grad_enabled() and packed.activation_bytes(weights.config, weights.dtype.itemsize) > keep
    )
    hidden = hidden_states(
        weights, packed.tokens_T, packed.positions_T, packed_attention(packed), adapters, recompute
    )
    predicting: list[int] = []
    cursor = sum(len(prompt) for prompt in prompts)
    last_R = packed.last_P[packed.row_prompt_R].tolist()
    for (_, tokens), last, found in zip(rows, last_R, places, strict=True):
        # A token is predicted by the one before it, the first by the prompt's last.
        predicting += [cursor + at - 1 if at else last for at in found]
        cursor += len(tokens)
    targets = _sampled(batch, batch.completions)
    chosen = hidden[torch.tensor(predicting, dtype=torch.int64, device=device)]
    return chosen_logprobs(
        chosen, weights.head, torch.tensor(targets, dtype=torch.int64, device=device), temperature
    )


def _sampled(batch: Batch, rows: Sequence[Sequence[T]]) -> list[T]:
    """The entries of the sampled tokens, one sample after the other."""
    return [
        value
        for row, marks in zip(rows, batch.sampled, strict=True)
        for value, sampled in zip(row, marks, strict=True)
        if sampled
    ]


def _loss(spec: RLConfig, micro: Batch, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Sums]:
    """The sum over the micro-batch's sampled tokens, not divided yet."""
    device = logprobs.device
    lengths = torch.tensor([sum(marks) for marks in micro.sampled], device=device)

    def per_token(values: Tensor) -> Tensor:
        return values.to(device, torch.float32).repeat_interleave(lengths)

    def column(lists: list[list[float]]) -> Tensor:
        return torch.tensor(_sampled(micro, lists), device=device)

    current, engine = logprobs.detach(), column(micro.engine_logprobs)
    old = current if micro.old_logprobs is None else column(micro.old_logprobs)
    weights = per_token(token_weights(lengths, spec.loss.average))
    advantages = per_token(torch.tensor(micro.advantages, dtype=torch.float64))
    losses, clipped = clipped_policy_loss(logprobs, old, advantages, spec.loss.clip_low, spec.loss.clip_high)
    capped_sum = None
    if spec.asynchronous:
        importance, capped = importance_weights(old, engine, spec.loss.importance_cap)
        losses = losses * importance
        capped_sum = float(capped.sum())
    kl_sum = None
    if micro.reference_logprobs is not None:
        divergence = k3(logprobs, column(micro.reference_logprobs))
        kl_sum = float(divergence.detach().sum())
        if spec.loss.kl_beta > 0:
            losses = losses + spec.loss.kl_beta * divergence
    loss = (losses * weights).sum()
    mismatch = (engine - old).abs()
    return loss, Sums(
        tokens=len(logprobs),
        loss=float(loss.detach()),
        kl=kl_sum,
        entropy=float(entropy.sum()),
        clipped=float(clipped.sum()),
        capped=capped_sum,
        mismatch=float(mismatch.sum()),
        mismatch_max=float(mismatch.max()),
        average=spec.loss.average,
    )
