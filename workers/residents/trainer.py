"""The trainer resident: several runs on one base, each run's work piece by piece (a micro-batch, a step).

    run a: forward_backward ─┐            ┌─ computing thread 1: a's piece, b's piece, …
    run b: logprobs ─────────┼─► pieces ──┼─ computing thread 2: c's piece, …
    run c: optim_step ───────┘            └─ … as many as a CPU device has threads; one on a GPU

Of one run one piece computes at a time. Between two pieces a run takes on a new share, makes room, or is
closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import torch

from workers.protocol import DeviceRef
from workers.residents.base import Resident, joined, timed
from workers.residents.errors import ModelLoad
from workers.residents.lanes import Lanes
from workers.rl.averages import Denominator
from workers.rl.batching import Batch, micro_batch_indices
from workers.rl.sums import Sums, Trained
from workers.spec import RLConfig
from workers.timing import Ran
from workers.train import checkpoint
from workers.train.trainer import TorchTrainer

T = TypeVar("T")


class TrainerResident(Resident):
    """A trainer over one base, with the adapters and optimizers of the runs that share it."""

    _trainer: TorchTrainer | None = None

    def __init__(self, device: DeviceRef, model_path: str, precision: str) -> None:
        super().__init__(device, model_path, precision)
        self._lanes = Lanes(device.threads if device.kind == "cpu" else 1)
        self._loading = Lock()
        self._shares: dict[str, float] = {}
        self._making_room: set[str] = set()

    def open(
        self, run_key: str, spec: RLConfig, seed: int, state: str | None, start: str | None = None
    ) -> None:
        """Load the weights if need be and set the run up: from the checkpoint folder ``start`` instead of the
        base, whose weights are then the reference too, and where the state folder ``state`` has left off.

        ``ModelLoad`` when ``start`` cannot be used.
        """
        self._compute(run_key, lambda: self._set_up(run_key, spec, seed, state, start))

    def _set_up(self, run_key: str, spec: RLConfig, seed: int, state: str | None, start: str | None) -> None:
        with self._loading:
            if self._trainer is None:
                self._trainer = TorchTrainer(self._weights())
        self._enter(run_key)
        try:
            self._begin(run_key, spec, seed, start)
            if state is not None:
                self._trainer.load_state(run_key, Path(state))
        except BaseException:
            self._open.discard(run_key)
            self._trainer.close(run_key)
            raise

    def _begin(self, run_key: str, spec: RLConfig, seed: int, start: str | None) -> None:
        try:
            self._loaded.open(run_key, spec, seed, None if start is None else Path(start))
        except (OSError, ValueError) as error:
            if start is None:
                raise
            # The text would name a path.
            raise ModelLoad(f"the checkpoint {Path(start).name} to start from cannot be used") from error

    @property
    def _loaded(self) -> TorchTrainer:
        if self._trainer is None:
            raise RuntimeError("open() comes first")
        return self._trainer

    # ------------------------------------------------------------ computing

    def logprobs(
        self, run_key: str, batch: Batch, micro_batch_size: int, reference: bool, share: float
    ) -> Ran[list[list[float]]]:
        """Log-probs of the sampled tokens, in the batch's order, by the run's or the reference weights."""
        compute = partial(self._loaded.logprobs, run_key, reference=reference)
        return self._each_token(run_key, batch, micro_batch_size, compute, share)

    def values(
        self, run_key: str, batch: Batch, micro_batch_size: int, share: float
    ) -> Ran[list[list[float]]]:
        """What the run's value head expects before each sampled token, in the batch's order."""
        compute = partial(self._loaded.values, run_key)
        return self._each_token(run_key, batch, micro_batch_size, compute, share)

    def _each_token(
        self,
        run_key: str,
        batch: Batch,
        micro_batch_size: int,
        compute: Callable[[Batch], list[list[float]]],
        share: float,
    ) -> Ran[list[list[float]]]:
        self.resize(run_key, share)
        made: dict[int, list[float]] = {}
        pieces: list[Ran[list[list[float]]]] = []
        for indices in micro_batch_indices(batch, micro_batch_size):
            part = batch.select(indices)
            piece = self._piece(run_key, partial(compute, part), _tokens(part))
            made.update(zip(indices, piece.value, strict=True))
            pieces.append(piece)
        return joined([made[index] for index in range(len(batch))], pieces)

    def forward_backward(self, run_key: str, micros: Sequence[Batch], share: float) -> Ran[Trained]:
        """Add the micro-batches' gradients to the run's, in order: all of them, or until ``make_room``."""
        self.resize(run_key, share)
        sums = Sums()
        pieces: list[Ran[Sums]] = []
        for micro in micros:
            compute = partial(self._loaded.forward_backward, run_key, micro)
            piece = self._piece(run_key, compute, _tokens(micro))
            sums += piece.value
            pieces.append(piece)
            if run_key in self._making_room:
                break
        self._making_room.discard(run_key)
        return joined(Trained(sums, len(pieces)), pieces)

    def make_room(self, run_key: str) -> None:
        """The run's ``forward_backward`` returns after its current micro-batch, and the next after its first
        where none is under way: that call may have been overtaken by this one.
        """
        if run_key in self._open:
            self._making_room.add(run_key)

    def resize(self, run_key: str, share: float) -> None:
        """Compute with another share, from the next micro-batch on."""
        if run_key in self._open:
            self._shares[run_key] = share

    def gradients(self, run_key: str) -> dict[str, torch.Tensor]:
        """The run's own gradients by parameter, of the sum: not divided yet."""
        return self._piece(run_key, lambda: self._loaded.gradients(run_key)).value

    def sum_gradients(self, run_key: str, share: float, *parts: dict[str, torch.Tensor]) -> Ran[None]:
        """Replace the run's gradients by the sum over data-parallel workers, added in the order given."""
        self.resize(run_key, share)

        def add() -> None:
            total = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
            self._loaded.set_gradients(run_key, total)

        return self._piece(run_key, add)

    def optim_step(self, run_key: str, learning_rate: float, over: Denominator, share: float) -> Ran[float]:
        """The norm of the gradient, divided by ``over`` and before it was clipped."""
        self.resize(run_key, share)
        self._making_room.discard(run_key)
        return self._piece(run_key, lambda: self._loaded.optim_step(run_key, learning_rate, over))

    def _piece(self, run_key: str, work: Callable[[], T], tokens: int = 0) -> Ran[T]:
        """Compute it for a run that is still open when its turn comes, with the share it has then."""

        def piece() -> Ran[T]:
            self._refuse_closed(run_key)
            return timed(work, tokens)

        return self._compute(run_key, piece)

    def _compute(self, run_key: str, work: Callable[[], T]) -> T:
        def limited() -> T:
            with self._limit(self._shares.get(run_key, 1.0)):
                return work()

        return self._lanes.run(run_key, limited)

    # ------------------------------------------------------------ weights and state

    def adapter(self, run_key: str) -> tuple[dict[str, torch.Tensor], float]:
        """The weights to sync, and the adapter's scaling."""
        return self._piece(
            run_key, lambda: (self._loaded.adapter(run_key), self._loaded.scaling(run_key))
        ).value

    def save(
        self, run_key: str, parent: str, step: int, state: dict[str, Any], base_model: str, keep: int
    ) -> tuple[str, int, list[str]]:
        """Write ``parent/step-N`` atomically; its path, its bytes, and the older folders removed.

        Older ones go first, and one always stays: until the new one is reported, a resume needs it.
        """
        removed = checkpoint.prune(Path(parent), max(1, keep - 1))
        write = self._writer(run_key, base_model)
        folder = self._piece(run_key, lambda: checkpoint.write(Path(parent), step, state, write)).value
        return str(folder), checkpoint.folder_bytes(folder), [str(path) for path in removed]

    def export_state(self, run_key: str, folder: str, base_model: str) -> None:
        """Write the run's state for another trainer to open."""
        Path(folder).mkdir(parents=True)
        write = self._writer(run_key, base_model)
        self._piece(run_key, lambda: write(Path(folder)))

    def _writer(self, run_key: str, base_model: str) -> Callable[[Path], None]:
        return lambda folder: self._loaded.save_state(run_key, folder, base_model, self._path)

    def close(self, run_key: str, returns: bool = False) -> None:
        """Forget the run; a call that computes for it ends with ``RunClosed``. It may come back or not."""
        self._leave(run_key, returns)
        self._compute(run_key, lambda: self._forget(run_key))

    def _forget(self, run_key: str) -> None:
        self._shares.pop(run_key, None)
        self._making_room.discard(run_key)
        if self._trainer is not None:
            self._trainer.close(run_key)


def _tokens(batch: Batch) -> int:
    return sum(map(len, batch.prompts)) + sum(map(len, batch.completions))
