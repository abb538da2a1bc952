"""Trains several runs on one base model: an adapter each (LoRA), or a whole copy (full fine-tuning).

    forward_backward(micro-batch) … forward_backward(micro-batch) ─► [gradients, summed over workers] ─►
    optim_step

Each call is one yield point: between micro-batches a run holds nothing but its accumulated gradients, so
calls of different runs may alternate. Parameters, gradients and AdamW's moments are fp32; products are in the
base weights' type (for full fine-tuning the fp32 masters are rounded for each pass). Forward passes go
through the rollout engine's decoder, with each prompt computed once for all its completions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workers.engines.decoder import Adapters, hidden_states
from workers.engines.errors import NotFinite
from workers.engines.logprobs import chosen_logprobs
from workers.engines.packed import pack, packed_attention
from workers.engines.weights import Weights
from workers.models.limits import ACTIVATION_BYTES
from workers.rl.batching import Batch, Denominator
from workers.rl.kl import k3
from workers.rl.losses import clipped_policy_loss, token_weights
from workers.spec import LoRA, RLConfig
from workers.train.parameters import (
    Parameters,
    load_optimizer,
    open_full,
    open_lora,
    save_optimizer,
)


@dataclass(frozen=True)
class Sums:
    """Sums over trained tokens, to be added over micro-batches and workers; ``mismatch_max`` is a maximum.

    ``kl`` is None where there was no reference to measure it against.
    """

    tokens: int = 0
    loss: float = 0.0
    kl: float | None = None
    entropy: float = 0.0
    clipped: float = 0.0
    mismatch: float = 0.0
    mismatch_max: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        measured = [sums.kl for sums in (self, other) if sums.kl is not None]
        return Sums(
            tokens=self.tokens + other.tokens,
            loss=self.loss + other.loss,
            kl=sum(measured) if measured else None,
            entropy=self.entropy + other.entropy,
            clipped=self.clipped + other.clipped,
            mismatch=self.mismatch + other.mismatch,
            mismatch_max=max(self.mismatch_max, other.mismatch_max),
        )

    def metrics(self) -> dict[str, float]:
        """The step's metrics by their names in ``workers.protocol.METRICS``. ``loss`` is averaged already."""
        count = max(1, self.tokens)
        measured = {} if self.kl is None else {"kl": self.kl / count}
        return measured | {
            "loss": self.loss,
            "entropy": self.entropy / count,
            "clip_fraction": self.clipped / count,
            "mismatch": self.mismatch / count,
            "mismatch_max": self.mismatch_max,
        }


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
        """Of every sampled token, per sample, at the job's temperature; of the starting weights if
        ``reference``.
        """
        run = self._run(run_key)
        if reference:
            weights, adapters = self._base, None
        else:
            weights, adapters = run.parameters.compute(self._base)
        found, _ = _forward(weights, adapters, batch, run.spec.sampling.temperature, self._keep)
        return [part.tolist() for part in found.split([len(tokens) for tokens in batch.completions])]

    def forward_backward(self, run_key: str, micro: Batch, denominator: Denominator) -> Sums:
        """Add the micro-batch's gradient to the run's. ``denominator`` covers the whole update, all workers.

        ``NotFinite`` when the loss is not; the gradients are then as before.

        The ratio is taken to ``micro.old_logprobs``; without them to the current log-probs, detached, which
        is right for the first update after a rollout (the ratio is 1). The mismatch compares the engine with
        the same numbers: the trainer's log-probs at the weights that sampled.
        """
        run = self._run(run_key)
        micro = micro.select([index for index, kept in enumerate(micro.keep) if kept])
        if not len(micro):
            return Sums()
        if run.spec.loss.kl_beta > 0 and micro.reference_logprobs is None:
            raise ValueError("a KL penalty needs reference log-probs in the batch")
        # Advantages of zero have a gradient of exactly zero: measure only.
        teaches = run.spec.loss.kl_beta > 0 or any(micro.advantages)
        with torch.set_grad_enabled(teaches):
            weights, adapters = run.parameters.compute(self._base)
            logprobs, entropy = _forward(weights, adapters, micro, run.spec.sampling.temperature, self._keep)
            loss, sums = _loss(run.spec, micro, denominator, logprobs, entropy)
        if not bool(torch.isfinite(loss)):
            raise NotFinite(run_key, f"the loss is {float(loss.detach())}")
        if teaches:
            loss.backward()
        return sums

    def gradients(self, run_key: str) -> dict[str, Tensor]:
        """Accumulated gradients by parameter; the sum over workers is the update's."""
        return self._run(run_key).parameters.gradients()

    def set_gradients(self, run_key: str, gradients: Mapping[str, Tensor]) -> None:
        self._run(run_key).parameters.set_gradients(gradients)

    def optim_step(self, run_key: str, learning_rate: float) -> float:
        """AdamW on the accumulated gradients, clipped to the job's norm; returns the norm before clipping.

        Gradients are cleared. ``NotFinite`` when the norm is not; the parameters then stay as they are.
        """
        run = self._run(run_key)
        parameters = list(run.parameters.named.values())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
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


def _forward(
    weights: Weights, adapters: Adapters | None, batch: Batch, temperature: float, keep: int
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of all sampled tokens, one sample after the other, [N] each."""
    prompts: dict[tuple[int, ...], int] = {}
    for prompt in batch.prompts:
        prompts.setdefault(prompt, len(prompts))
    # The last token of a completion predicts nothing that was sampled.
    rows = [
        (prompts[prompt], tokens[:-1])
        for prompt, tokens in zip(batch.prompts, batch.completions, strict=True)
    ]
    device = weights.device
    packed = pack(list(prompts), rows, device)
    recompute = (
        torch.is_grad_enabled() and packed.activation_bytes(weights.config, weights.dtype.itemsize) > keep
    )
    hidden = hidden_states(
        weights, packed.tokens_T, packed.positions_T, packed_attention(packed), adapters, recompute
    )
    predicting = []
    cursor = sum(len(prompt) for prompt in prompts)
    for (_, tokens), last in zip(rows, packed.last_P[packed.row_prompt_R].tolist(), strict=True):
        predicting += [last, *range(cursor, cursor + len(tokens))]
        cursor += len(tokens)
    targets = torch.tensor([token for tokens in batch.completions for token in tokens], device=device)
    chosen = hidden[torch.tensor(predicting, device=device)]
    return chosen_logprobs(chosen, weights.head, targets, temperature)


def _loss(
    spec: RLConfig, micro: Batch, denominator: Denominator, logprobs: Tensor, entropy: Tensor
) -> tuple[Tensor, Sums]:
    device = logprobs.device
    lengths = torch.tensor([len(tokens) for tokens in micro.completions], device=device)

    def per_token(values: Tensor) -> Tensor:
        return values.to(device, torch.float32).repeat_interleave(lengths)

    def column(lists: list[list[float]]) -> Tensor:
        return torch.tensor([number for entry in lists for number in entry], device=device)

    current = logprobs.detach()
    old = current if micro.old_logprobs is None else column(micro.old_logprobs)
    weights = per_token(token_weights(lengths, spec.loss.average, denominator))
    advantages = per_token(torch.tensor(micro.advantages, dtype=torch.float64))
    losses, clipped = clipped_policy_loss(logprobs, old, advantages, spec.loss.clip_low, spec.loss.clip_high)
    kl_sum = None
    if micro.reference_logprobs is not None:
        divergence = k3(logprobs, column(micro.reference_logprobs))
        kl_sum = float(divergence.detach().sum())
        if spec.loss.kl_beta > 0:
            losses = losses + spec.loss.kl_beta * divergence
    loss = (losses * weights).sum()
    mismatch = (column(micro.engine_logprobs) - old).abs()
    return loss, Sums(
        tokens=len(logprobs),
        loss=float(loss.detach()),
        kl=kl_sum,
        entropy=float(entropy.sum()),
        clipped=float(clipped.sum()),
        mismatch=float(mismatch.sum()),
        mismatch_max=float(mismatch.max()),
    )
