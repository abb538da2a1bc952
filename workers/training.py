"""Training: what a step's samples do to the weights, and bringing the weights to the engines.

    all graded ─► (LOGPROB) ─► UPDATE ─► SYNC        one gang for all workers, crossing on one grant
                                 ▲
    streaming: early UPDATE ─────┘  the micro-batches of whole groups, while the last sequences roll out

    examples ───► (LOGPROB) ─► UPDATE                where the data say what is learned

Which micro-batches there are depends on the groups alone, not on when they are computed or how often they are
interrupted, so that gradients are the same up to the order of their sum. A gang that makes room stops at the
next micro-batch, and what is left of it is offered again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from workers import batches
from workers.batches import Sample
from workers.calls import Bell, call, together
from workers.chain import needs_old_logprobs, needs_values, train_chain
from workers.fleet import Fleet
from workers.gangs import Trainers, kind_of
from workers.gathering import Gathering
from workers.grants import Desk, Gang, Lease
from workers.outbox import Outbox
from workers.pieces import Column, Load, Piece, Pieces, Step
from workers.protocol import Launch, Log, SubStageKind
from workers.rl.batching import (
    Batch,
    Denominator,
    denominator,
    micro_batch_chunks,
    micro_batches,
    split_updates,
)
from workers.rl.sums import Sums, step_metrics
from workers.spec import warmup_factor
from workers.telling import Advantages, advantages_of


@dataclass(frozen=True)
class Taught:
    """What came of a step. ``idle`` says why its rewards taught nothing, empty where they did."""

    metrics: dict[str, float]
    advantages: Advantages = field(default_factory=dict)
    idle: str = ""


class Training:
    def __init__(self, launch: Launch, desk: Desk, fleet: Fleet, bell: Bell, outbox: Outbox) -> None:
        self._spec, self._rl = launch.spec, launch.spec.rl
        self._key = launch.run_key
        self._desk, self._fleet, self._bell, self._outbox = desk, fleet, bell, outbox
        self._streams = launch.streams
        self._trainers = Trainers(desk, fleet, train_chain(launch.spec, launch.streams))
        self._columns = tuple(self._wanted())

    def _wanted(self) -> Iterable[Column]:
        if needs_old_logprobs(self._spec):
            yield "old"
        if self._rl.needs_reference:
            yield "reference"
        if needs_values(self._spec):
            yield "values"

    # ------------------------------------------------------------ a step

    async def run(self, gathering: Gathering, thin: Callable[[], bool]) -> Taught:
        """Train what a step rolled out and sync. ``thin``: its rollouts have nearly ended."""
        step = Step(gathering.step, self._rl.devices)
        gang = await self._stream(step, gathering, thin) if self._streams else None
        await self._bell.until(gathering.graded)
        self._warn(gathering.failures())
        samples = _with_tokens(gathering.samples())
        batch = batches.batch_of(self._spec, samples)
        metrics = {"loss": 0.0}
        if batch.trained:
            gang, batch = await self._with_columns(step, gang, batch)
            batch = batches.with_advantages(self._spec, samples, batch)
            gang, metrics = await self._update(step, gang, batch)
        self._fleet.version = step.number + 1
        await self._sync(step, gang)
        return Taught(metrics, advantages_of(samples, batch), batches.idle(self._spec, samples, batch))

    async def learn(self, number: int, batch: Batch) -> Taught:
        """Train the data's own completions."""
        step = Step(number, self._rl.devices)
        gang, batch = await self._with_columns(step, None, batch)
        gang, metrics = await self._update(step, gang, batch)
        self._fleet.version = number + 1
        self._trainers.finish(gang)
        return Taught(metrics)

    def _warn(self, text: str) -> None:
        if text:
            self._outbox.add(Log(level="warning", message=text))

    # ------------------------------------------------------------ before the update

    async def _with_columns(self, step: Step, gang: Gang | None, batch: Batch) -> tuple[Gang | None, Batch]:
        """Add what must be known of the whole step before its first update: log-probs of the weights as they
        are and of those that training started from, and values.
        """
        if not self._columns:
            return gang, batch
        shards = {worker: step.shard(batch, worker) for worker in step.workers}
        sequences = {worker: len(shard) for worker, shard in shards.items()}
        gang = await self._trainers.enter(gang, SubStageKind.LOGPROB, step.number, sequences)
        made = {
            (worker, column): [Piece(part, column) for part in self._chunks(shard)]
            for worker, shard in shards.items()
            for column in self._columns
        }
        pieces = {
            worker: [piece for column in self._columns for piece in made[worker, column]]
            for worker in step.workers
        }
        gang = await self._trainers.work(gang, Load([pieces]), self._compute)
        found = {
            column: step.unshard(batch, {worker: _joined(made[worker, column]) for worker in step.workers})
            for column in self._columns
        }
        batch = batch.with_logprobs(old=found.get("old"), reference=found.get("reference"))
        return gang, replace(batch, values=found.get("values"))

    async def _compute(self, lease: Lease, pieces: list[Piece]) -> None:
        piece, size = pieces[0], self._rl.micro_batch_size
        if piece.column == "values":
            piece.numbers = await lease.run(lease.resident.values, self._key, piece.batch, size)
        else:
            reference = piece.column == "reference"
            piece.numbers = await lease.run(lease.resident.logprobs, self._key, piece.batch, size, reference)
        pieces.pop(0)

    def _chunks(self, shard: Batch) -> list[Batch]:
        """Parts of a worker's batch that depend on no other part."""
        return [shard.of_groups(chunk) for chunk in self._chunk_names(shard.groups)]

    def _chunk_names(self, groups: list[int]) -> list[list[int]]:
        return micro_batch_chunks(groups, self._rl.micro_batch_size, self._rl.samples_per_group)

    # ------------------------------------------------------------ updates

    async def _stream(self, step: Step, gathering: Gathering, thin: Callable[[], bool]) -> Gang | None:
        """Compute the micro-batches of whole groups while others roll out. The gang, if it may keep its
        devices because there is nothing left to wait for.
        """
        waiting = {worker: self._chunk_names(gathering.groups_of(worker)) for worker in step.workers}

        def ready() -> bool:
            return any(gathering.graded(chunk) for chunks in waiting.values() for chunk in chunks)

        await self._bell.until(lambda: gathering.graded() or (thin() and ready()))
        if gathering.graded():
            return None
        gang: Gang | None = None
        while pieces := self._take_ready(step, gathering, waiting):
            if gang is None:
                sequences = {w: sum(len(piece.batch) for piece in mine) for w, mine in pieces.items()}
                gang = await self._trainers.enter_early(step.number, sequences)
            gang = await self._trainers.work(gang, Load([pieces]), step.backward(self._key, self._fleet))
        if gang is not None and not gathering.graded():
            self._trainers.finish(gang)
            return None
        return gang

    def _take_ready(self, step: Step, gathering: Gathering, waiting: dict[int, list[list[int]]]) -> Pieces:
        """The pieces of groups that have been graded since; nothing when there are none."""
        found: Pieces = {}
        for worker, chunks in waiting.items():
            whole = [chunk for chunk in chunks if gathering.graded(chunk)]
            waiting[worker] = [chunk for chunk in chunks if chunk not in whole]
            step.streamed |= {group for chunk in whole for group in chunk}
            found[worker] = self._micros(self._complete(gathering.samples(chunk)) for chunk in whole)
        return found if any(found.values()) else {}

    def _complete(self, samples: Sequence[Sample]) -> Batch:
        """The batch of whole groups whose advantages depend on nothing else."""
        samples = _with_tokens(samples)
        return batches.with_advantages(self._spec, samples, batches.batch_of(self._spec, samples))

    def _micros(self, chunks: Iterable[Batch]) -> list[Piece]:
        """What has nothing to train is no work; pairs stay whole."""
        size, pairs = self._rl.micro_batch_size, self._rl.method.objective == "preference"
        micros = (micro for chunk in chunks for micro in micro_batches(chunk, size, pairs))
        return [Piece(micro) for micro in micros if micro.trained]

    async def _update(self, step: Step, gang: Gang | None, batch: Batch) -> tuple[Gang, dict[str, float]]:
        """The step's optimizer steps; the metrics of training."""
        if gang is None or kind_of(gang) is not SubStageKind.UPDATE:
            sequences = {worker: len(step.shard(batch, worker)) for worker in step.workers}
            gang = await self._trainers.enter(gang, SubStageKind.UPDATE, step.number, sequences)
        done: list[tuple[Sums, Denominator]] = []
        norms, rate = [], 0.0
        updates = split_updates(batch, min(self._rl.updates_per_step, len(set(batch.groups))))
        load = Load([self._pieces(step, part) for part in updates])
        for index, part in enumerate(updates):
            if index:
                load.next_round()
            over = denominator(part, self._rl.sampling.max_tokens)
            if not over.sequences:
                continue
            gang = await self._trainers.work(gang, load, step.backward(self._key, self._fleet))
            rate = self._rate(step.number * self._rl.updates_per_step + index)
            norms.append(await self._optimize(gang, rate, over))
            done.append((step.take_sums(), over))
        metrics = {"grad_norm": statistics.fmean(norms), "learning_rate": rate}
        return gang, step_metrics(done) | metrics

    def _pieces(self, step: Step, update: Batch) -> Pieces:
        """What of an update was not computed early."""
        shards = {worker: step.unstreamed(step.shard(update, worker)) for worker in step.workers}
        return {worker: self._micros(self._chunks(shard)) for worker, shard in shards.items()}

    def _rate(self, optimizer_step: int) -> float:
        return self._rl.learning_rate * warmup_factor(self._rl, optimizer_step)

    async def _optimize(self, gang: Gang, rate: float, over: Denominator) -> float:
        """The gradients' sum, and the same step, on every worker; the norm of the gradient."""
        if len(gang) > 1:
            parts = [lease.resident.gradients.remote(self._key) for lease in gang.values()]
            await together(*(self._sum_gradients(lease, parts) for lease in gang.values()))
        norms: list[float] = await together(
            *(lease.run(lease.resident.optim_step, self._key, rate, over) for lease in gang.values())
        )
        self._fleet.midway = False
        return norms[0]

    async def _sum_gradients(self, lease: Lease, parts: list[object]) -> None:
        lease.cover(await call(lease.resident.sum_gradients, self._key, lease.share, *parts))

    # ------------------------------------------------------------ sync

    async def _sync(self, step: Step, gang: Gang | None) -> None:
        """The engines get the weights that later tokens are sampled from."""
        sequences = dict.fromkeys(step.workers, 0)
        gang = await self._trainers.enter(gang, SubStageKind.SYNC, step.number, sequences)
        await together(*(self._sync_worker(worker, lease) for worker, lease in gang.items()))
        self._trainers.finish(gang)

    async def _sync_worker(self, worker: int, lease: Lease) -> None:
        lease.begin()
        lease.cover(await self._fleet.sync(worker, lease.device, lease.share))


def _joined(pieces: list[Piece]) -> list[list[float]]:
    return [row for piece in pieces for row in piece.numbers]


def _with_tokens(samples: Sequence[Sample]) -> list[Sample]:
    """An episode that failed before its first token has none."""
    return [sample for sample in samples if sample.rollout.tokens]
