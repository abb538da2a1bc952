"""Residents: the processes on a device that hold weights. One engine, one trainer, each for many runs.

Both are Ray actors whose calls may overlap. What computes goes, slice by slice (some tokens, a micro-batch),
to the resident's one computing thread: a run can be cancelled, joined or dropped while another computes, and
what libraries keep per thread (memory arenas, packed weights) is kept once. ``share`` is a real limit: the
processor threads that a call may use.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from workers.engines.engine import TorchEngine
from workers.engines.precision import choose_dtype
from workers.engines.sequences import Request, Rollout
from workers.engines.weights import Weights, load_weights
from workers.models.chat import ChatTokenizer
from workers.protocol import DeviceRef
from workers.rl.batching import Batch, Denominator, micro_batch_indices, micro_batches
from workers.spec import RLConfig
from workers.timing import Ran, Stopwatch
from workers.train import checkpoint
from workers.train.trainer import Sums, TorchTrainer

T = TypeVar("T")

#: Tokens per sequence that a decode makes before it lets others at the engine.
DECODE_SLICE = 8
#: On a CPU device the computing shares its cores with the scheduler and the web, which answer first.
CPU_NICENESS = 5
#: Closed runs that are remembered, so that a call which was overtaken by ``close`` does not open one again.
CLOSED_KEPT = 10_000


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
        self._open: set[str] = set()
        self._closed: dict[str, None] = {}
        if device.kind == "cpu":
            os.nice(CPU_NICENESS)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")

    def _weights(self) -> Weights:
        where = (
            torch.device("cuda", self._device.index) if self._device.kind == "gpu" else torch.device("cpu")
        )
        try:
            return load_weights(self._path, choose_dtype(self._precision, where), where)
        except OSError as error:
            raise ModelLoad(f"{self._path.name}: {error.strerror}") from error
        except (ValueError, KeyError) as error:
            raise ModelLoad(f"{self._path.name}: {error}") from error

    def _enter(self, run_key: str) -> None:
        if run_key in self._closed:
            raise RunClosed(run_key)
        self._open.add(run_key)

    def _leave(self, run_key: str, returns: bool) -> None:
        self._open.discard(run_key)
        if returns:
            return
        self._closed[run_key] = None
        if len(self._closed) > CLOSED_KEPT:
            del self._closed[next(iter(self._closed))]

    def _alone(self, work: Callable[[], T]) -> T:
        """Run it on the computing thread, when its turn comes."""
        return self._thread.submit(work).result()

    def _compute(self, run_key: str, share: float, work: Callable[[], T]) -> T:
        """The same for a run that is still open then, with the threads of its share."""

        def granted() -> T:
            if run_key not in self._open:
                raise RunClosed(run_key)
            torch.set_num_threads(max(1, round(self._device.threads * share)))
            return work()

        return self._alone(granted)

    def _timed(self, run_key: str, share: float, work: Callable[[], T]) -> Ran[T]:
        """The same, saying when it ran; it worked on no tokens."""

        def timed() -> Ran[T]:
            watch = Stopwatch()
            return watch.ran(work(), 0)

        return self._compute(run_key, share, timed)


@dataclass(frozen=True)
class Rolled:
    """What a prefill or decode made. ``left`` counts the run's sequences that are not finished."""

    finished: list[Rollout]
    left: int


class RolloutResident(_Resident):
    """A rollout engine over one base, with the adapters of the runs that share it."""

    _engine: TorchEngine | None = None

    def load(self) -> None:
        """Load the weights if they are not; raises ``ModelLoad``."""
        self._alone(self._load)

    def _load(self) -> None:
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
        self._enter(run_key)
        return self._timed(
            run_key, share, lambda: self._loaded.load_adapter(run_key, version, tensors, scaling)
        )

    def load_full(
        self, run_key: str, version: int, tensors: dict[str, torch.Tensor], share: float
    ) -> Ran[None]:
        """Replace the base weights: only for a resident that one run has to itself."""
        self._enter(run_key)
        return self._timed(run_key, share, lambda: self._loaded.load_weights(run_key, version, tensors))

    def prefill(self, run_key: str, requests: list[Request], share: float) -> Ran[Rolled]:
        """Take the requests in and compute their prompts; each gets its first token."""

        def fill() -> Ran[Rolled]:
            watch = Stopwatch()
            self._loaded.submit(requests)
            made = self._loaded.prefill(run_key, should_stop=lambda: run_key not in self._open)
            return watch.ran(Rolled(made.finished, made.running + made.waiting), made.prompt_tokens)

        return self._compute(run_key, share, fill)

    def decode(self, run_key: str, min_running: int, share: float) -> Ran[Rolled]:
        """Sample until at most ``min_running`` sequences of the run are unfinished."""
        watch = Stopwatch()
        finished: list[Rollout] = []
        tokens, left = 0, min_running + 1
        while left > min_running:
            made = self._compute(
                run_key,
                share,
                lambda: self._loaded.decode([run_key], min_running=min_running, max_steps=DECODE_SLICE),
            )
            if not made.sampled_tokens and not made.finished:
                raise RuntimeError("other runs hold all the memory of the engine")
            finished += made.finished
            tokens += made.sampled_tokens
            left = made.running + made.waiting
        return watch.ran(Rolled(finished, left), tokens)

    def close(self, run_key: str, returns: bool = False) -> None:
        """Forget the run; a call that computes for it ends with ``RunClosed``. It may come back or not."""
        self._leave(run_key, returns)
        if self._engine is not None:
            self._alone(lambda: self._loaded.drop_adapter(run_key))


class TrainerResident(_Resident):
    """A trainer over one base, with the adapters and optimizers of the runs that share it."""

    _trainer: TorchTrainer | None = None

    def open(self, run_key: str, spec: RLConfig, seed: int, state: str | None) -> None:
        """Load the weights if need be and set the run up, from the state folder ``state`` if given."""
        self._alone(lambda: self._set_up(run_key, spec, seed, state))

    def _set_up(self, run_key: str, spec: RLConfig, seed: int, state: str | None) -> None:
        if self._trainer is None:
            self._trainer = TorchTrainer(self._weights())
        self._enter(run_key)
        try:
            self._trainer.open(run_key, spec, seed)
            if state is not None:
                self._trainer.load_state(run_key, Path(state))
        except BaseException:
            self._open.discard(run_key)
            self._trainer.close(run_key)
            raise

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
        made: dict[int, list[float]] = {}
        for indices in micro_batch_indices(batch, micro_batch_size):
            part = batch.select(indices)
            found = self._compute(run_key, share, lambda p=part: self._loaded.logprobs(run_key, p, reference))
            made.update(zip(indices, found, strict=True))
        return watch.ran([made[index] for index in range(len(batch))], _tokens(batch))

    def forward_backward(
        self, run_key: str, batch: Batch, denominator: Denominator, micro_batch_size: int, share: float
    ) -> Ran[Sums]:
        """Add the batch's gradients to the run's; others may compute between micro-batches."""
        watch = Stopwatch()
        sums = Sums()
        for micro in micro_batches(batch, micro_batch_size):
            sums += self._compute(
                run_key, share, lambda m=micro: self._loaded.forward_backward(run_key, m, denominator)
            )
        return watch.ran(sums, _tokens(batch))

    def gradients(self, run_key: str) -> dict[str, torch.Tensor]:
        return self._alone(lambda: self._loaded.gradients(run_key))

    def sum_gradients(self, run_key: str, share: float, *parts: dict[str, torch.Tensor]) -> Ran[None]:
        """Replace the run's gradients by the sum over data-parallel workers, added in the order given."""

        def add() -> None:
            total = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
            self._loaded.set_gradients(run_key, total)

        return self._timed(run_key, share, add)

    def optim_step(self, run_key: str, learning_rate: float, share: float) -> Ran[float]:
        """The norm of the gradient before it was clipped."""
        return self._timed(run_key, share, lambda: self._loaded.optim_step(run_key, learning_rate))

    def adapter(self, run_key: str) -> tuple[dict[str, torch.Tensor], float]:
        """The weights to sync, and the adapter's scaling."""
        return self._alone(lambda: (self._loaded.adapter(run_key), self._loaded.scaling(run_key)))

    def save(
        self, run_key: str, parent: str, step: int, state: dict[str, Any], base_model: str, keep: int
    ) -> tuple[str, int, list[str]]:
        """Write ``parent/step-N`` atomically; its path, its bytes, and the older folders removed.

        Older ones go first, and one always stays: until the new one is reported, a resume needs it.
        """
        removed = checkpoint.prune(Path(parent), max(1, keep - 1))
        write = self._writer(run_key, base_model)
        folder = self._alone(lambda: checkpoint.write(Path(parent), step, state, write))
        return str(folder), checkpoint.folder_bytes(folder), [str(path) for path in removed]

    def export_state(self, run_key: str, folder: str, base_model: str) -> None:
        """Write the run's state for another trainer to open."""
        Path(folder).mkdir(parents=True)
        write = self._writer(run_key, base_model)
        self._alone(lambda: write(Path(folder)))

    def _writer(self, run_key: str, base_model: str) -> Callable[[Path], None]:
        return lambda folder: self._loaded.save_state(run_key, folder, base_model, self._path)

    def close(self, run_key: str, returns: bool = False) -> None:
        self._leave(run_key, returns)
        if self._trainer is not None:
            self._alone(lambda: self._loaded.close(run_key))


def _tokens(batch: Batch) -> int:
    return sum(map(len, batch.prompts)) + sum(map(len, batch.completions))
