"""Residents: the processes on a device that hold weights. One engine, one trainer, each for many runs.

Both are threaded Ray actors. A lock lets one call compute at a time, and computing yields it between slices
(some tokens, a micro-batch), so that a run can be cancelled, joined or dropped while another computes.
``share`` is a real limit: the threads that a call may use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workers.engines.engine import TorchEngine
from workers.engines.precision import choose_dtype
from workers.engines.sequences import Request, Sequence
from workers.engines.weights import Weights, load_weights
from workers.models.chat import ChatTokenizer
from workers.protocol import DeviceRef
from workers.rl.batching import Batch, Denominator, micro_batches
from workers.spec import RLConfig
from workers.timing import Ran, Stopwatch
from workers.train import checkpoint
from workers.train.trainer import Sums, TorchTrainer

#: Tokens per sequence that a decode makes before it lets others at the engine.
DECODE_SLICE = 8


class RunClosed(Exception):
    """The run was closed while, or before, it computed here."""


class ModelLoad(Exception):
    """The weights could not be loaded."""


class _Resident:
    """Weights on a device, loaded on first use, and the set of runs that are open on them."""

    def __init__(self, device: DeviceRef, model_path: str, precision: str) -> None:
        self._device = device
        self._path = Path(model_path)
        self._precision = precision
        self._lock = threading.Lock()
        self._open: set[str] = set()
        torch.set_num_threads(device.threads)

    def ping(self) -> str:
        return self._device.name

    def _weights(self) -> Weights:
        where = (
            torch.device("cuda", self._device.index) if self._device.kind == "gpu" else torch.device("cpu")
        )
        try:
            return load_weights(self._path, choose_dtype(self._precision, where), where)
        except (OSError, ValueError, KeyError) as error:
            raise ModelLoad(f"{self._path.name}: {error}") from error

    @contextmanager
    def _computing(self, run_key: str, share: float) -> Iterator[None]:
        """The lock, the granted threads, and the run still open."""
        with self._lock:
            if run_key not in self._open:
                raise RunClosed(run_key)
            torch.set_num_threads(max(1, round(self._device.threads * share)))
            yield


@dataclass(frozen=True)
class Rolled:
    """What a prefill or decode made. ``left`` counts the run's sequences that are not finished."""

    finished: list[Sequence]
    left: int


class RolloutResident(_Resident):
    """A rollout engine over one base, with the adapters of the runs that share it."""

    _engine: TorchEngine | None = None

    def load(self) -> None:
        """Load the weights if they are not; raises ``ModelLoad``."""
        with self._lock:
            if self._engine is None:
                self._engine = TorchEngine(self._weights(), ChatTokenizer(self._path))

    @property
    def _loaded(self) -> TorchEngine:
        if self._engine is None:
            raise RuntimeError("load() comes first")
        return self._engine

    def load_adapter(
        self, run_key: str, version: int, tensors: dict[str, torch.Tensor], scaling: float, share: float
    ) -> Ran[None]:
        """Use these adapter weights for the run's next tokens."""
        self._open.add(run_key)
        with self._computing(run_key, share):
            watch = Stopwatch()
            self._loaded.load_adapter(run_key, version, tensors, scaling)
            return watch.ran(None, 0)

    def load_full(
        self, run_key: str, version: int, tensors: dict[str, torch.Tensor], share: float
    ) -> Ran[None]:
        """Replace the base weights: only for a resident that one run has to itself."""
        self._open.add(run_key)
        with self._computing(run_key, share):
            watch = Stopwatch()
            self._loaded.load_weights(run_key, version, tensors)
            return watch.ran(None, 0)

    def prefill(self, run_key: str, requests: list[Request], share: float) -> Ran[Rolled]:
        """Take the requests in and compute their prompts; each gets its first token."""
        with self._computing(run_key, share):
            watch = Stopwatch()
            self._loaded.submit(requests)
            made = self._loaded.prefill(run_key, should_stop=lambda: run_key not in self._open)
            rolled = Rolled(made.finished, made.running + made.waiting)
            return watch.ran(rolled, made.prompt_tokens)

    def decode(self, run_key: str, min_running: int, share: float) -> Ran[Rolled]:
        """Sample until at most ``min_running`` sequences of the run are unfinished."""
        watch = Stopwatch()
        finished: list[Sequence] = []
        tokens, left = 0, min_running + 1
        while left > min_running:
            with self._computing(run_key, share):
                made = self._loaded.decode([run_key], min_running=min_running, max_steps=DECODE_SLICE)
            finished += made.finished
            tokens += made.sampled_tokens
            left = made.running + made.waiting
        return watch.ran(Rolled(finished, left), tokens)

    def close(self, run_key: str) -> None:
        """Forget the run; a call that computes for it ends with ``RunClosed``."""
        self._open.discard(run_key)
        with self._lock:
            if self._engine is not None:
                self._engine.drop_adapter(run_key)


class TrainerResident(_Resident):
    """A trainer over one base, with the adapters and optimizers of the runs that share it."""

    _trainer: TorchTrainer | None = None

    def open(self, run_key: str, spec: RLConfig, seed: int, state: str | None) -> None:
        """Load the weights if need be and set the run up, from the state folder ``state`` if given."""
        with self._lock:
            if self._trainer is None:
                self._trainer = TorchTrainer(self._weights())
            self._trainer.open(run_key, spec, seed)
            self._open.add(run_key)
            if state is not None:
                self._trainer.load_state(run_key, Path(state))

    @property
    def _loaded(self) -> TorchTrainer:
        if self._trainer is None:
            raise RuntimeError("open() comes first")
        return self._trainer

    def logprobs(
        self, run_key: str, batch: Batch, micro_batch_size: int, reference: bool, share: float
    ) -> Ran[list[list[float]]]:
        """Log-probs of the sampled tokens, in the batch's order, by the run's or the reference weights."""
        watch = Stopwatch()
        made: list[list[float]] = []
        size = micro_batch_size
        for first in range(0, len(batch.groups), size):
            part = batch.select(range(first, min(first + size, len(batch.groups))))
            with self._computing(run_key, share):
                made += self._loaded.logprobs(run_key, part, reference=reference)
        return watch.ran(made, _tokens(batch))

    def forward_backward(
        self, run_key: str, batch: Batch, denominator: Denominator, micro_batch_size: int, share: float
    ) -> Ran[Sums]:
        """Add the batch's gradients to the run's; others may compute between micro-batches."""
        watch = Stopwatch()
        sums = Sums()
        for micro in micro_batches(batch, micro_batch_size):
            with self._computing(run_key, share):
                sums = sums + self._loaded.forward_backward(run_key, micro, denominator)
        return watch.ran(sums, _tokens(batch))

    def gradients(self, run_key: str) -> dict[str, torch.Tensor]:
        with self._lock:
            return self._loaded.gradients(run_key)

    def sum_gradients(self, run_key: str, share: float, *parts: dict[str, torch.Tensor]) -> Ran[None]:
        """Replace the run's gradients by the sum over data-parallel workers, added in the order given."""
        with self._computing(run_key, share):
            watch = Stopwatch()
            total = {name: sum(part[name] for part in parts) for name in parts[0]}
            self._loaded.set_gradients(run_key, total)
            return watch.ran(None, 0)

    def optim_step(self, run_key: str, learning_rate: float, share: float) -> Ran[float]:
        """The norm of the gradient before it was clipped."""
        with self._computing(run_key, share):
            watch = Stopwatch()
            return watch.ran(self._loaded.optim_step(run_key, learning_rate), 0)

    def adapter(self, run_key: str) -> tuple[dict[str, torch.Tensor], float]:
        """The weights to sync, and the adapter's scaling."""
        with self._lock:
            return self._loaded.adapter(run_key), self._loaded.scaling(run_key)

    def save(
        self, run_key: str, parent: str, step: int, state: dict[str, Any], base_model: str, keep: int
    ) -> tuple[str, int, list[str]]:
        """Write ``parent/step-N`` atomically; its path, its bytes, and the older folders removed."""
        with self._lock:
            folder = checkpoint.write(Path(parent), step, state, self._saver(run_key, base_model))
        removed = checkpoint.prune(Path(parent), keep)
        return str(folder), checkpoint.folder_bytes(folder), [str(path) for path in removed]

    def export_state(self, run_key: str, folder: str, base_model: str) -> None:
        """Write the run's state for another trainer to open."""
        with self._lock:
            Path(folder).mkdir(parents=True)
            self._saver(run_key, base_model)(Path(folder))

    def _saver(self, run_key: str, base_model: str) -> Callable[[Path], None]:
        return lambda folder: self._loaded.save_state(run_key, folder, base_model, self._path)

    def close(self, run_key: str) -> None:
        self._open.discard(run_key)
        with self._lock:
            if self._trainer is not None:
                self._trainer.close(run_key)


def _tokens(batch: Batch) -> int:
    return sum(map(len, batch.prompts)) + sum(map(len, batch.completions))
