"""Training: what a step's rollouts do to the weights, and bringing the weights to the engines.

    all graded ─► (LOGPROB) ─► UPDATE ─► SYNC        one gang for all workers, crossing on one grant
                                 ▲
    streaming: early UPDATE ─────┘  the micro-batches of whole groups, while the last sequences roll out

Which micro-batches there are depends on the groups alone, not on when they are computed or how often they are
interrupted, so that gradients are the same up to the order of their sum. A gang that makes room stops at the
next micro-batch, and what is left of it is offered again.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from workers import batches
from workers.calls import Bell, call, together
from workers.chain import needs_logprobs, train_chain
from workers.fleet import Fleet
from workers.gathering import Gathering
from workers.grants import Desk, Gang, Lease
from workers.outbox import Outbox
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

#: What is left of a sub-stage that has to end with an optimizer step and nothing else.
LEAST = 0.01


@dataclass
class Piece:
    """What one call to a worker's trainer takes; afterwards, the log-probs of its samples."""

    batch: Batch
    reference: bool = False
    logprobs: list[list[float]] = field(default_factory=list)


#: By worker.
Pieces = dict[int, list[Piece]]
#: Takes the first of the pieces, or several, to the trainer of the lease.
Compute = Callable[[Lease, list[Piece]], Awaitable[None]]


class Load:
    """The pieces of a sub-stage, in rounds; ``now`` are those of the round that is computed."""

    def __init__(self, rounds: Sequence[Pieces]) -> None:
        self._rounds = list(rounds)
        self.now = self._rounds[0]
        self._whole = self._count()

    def _count(self) -> dict[int, int]:
        return {worker: sum(len(pieces[worker]) for pieces in self._rounds) for worker in self.now}

    def next_round(self) -> None:
        del self._rounds[0]
        self.now = self._rounds[0]

    def left(self) -> dict[int, float]:
        """The part that is not computed yet, by worker."""
        return {
            worker: max(LEAST, count / max(1, self._whole[worker])) for worker, count in self._count().items()
        }


class Training:
    def __init__(self, launch: Launch, desk: Desk, fleet: Fleet, bell: Bell, outbox: Outbox) -> None:
        self._spec, self._rl = launch.spec, launch.spec.rl
        self._key = launch.run_key
        self._desk, self._fleet, self._bell, self._outbox = desk, fleet, bell, outbox
        self._streams = launch.streams
        self._chain = train_chain(launch.spec, launch.streams)

    def _part(self, kind: SubStageKind) -> int:
        """The place of the kind in the chain; of UPDATE the last, which is not early."""
        return max(place for place, other in enumerate(self._chain) if other is kind)

    # ------------------------------------------------------------ a step

    async def run(self, gathering: Gathering, thin: Callable[[], bool]) -> dict[str, float]:
        """Train the step and sync; the metrics of training. ``thin``: its rollouts have nearly ended."""
        step = Step(gathering, self._rl.devices)
        gang = await self._stream(step, thin) if self._streams else None
        await self._bell.until(gathering.graded)
        self._warn(gathering.failures())
        batch = batches.batch(self._spec, gathering.samples())
        metrics: dict[str, float] = {}
        if batch.trained:
            gang, batch = await self._with_logprobs(step, gang, batch)
            gang, metrics = await self._update(step, gang, batch)
        else:
            self._warn(f"Step {step.number + 1} trains nothing: no completion of it may be used.")
        self._fleet.version = gathering.step + 1
        await self._sync(step, gang)
        return metrics

    def _warn(self, text: str) -> None:
        if text:
            self._outbox.add(Log(level="warning", message=text))

    # ------------------------------------------------------------ holding devices

    async def _hold(self, gang: Gang) -> Gang:
        """Bring the trainers to the gang's devices."""
        for worker, lease in gang.items():
            lease.resident = await self._fleet.train(worker, lease.device)
        return gang

    async def _enter(
        self, step: Step, gang: Gang | None, kind: SubStageKind, sequences: Mapping[int, int]
    ) -> Gang:
        """Cross into the next part, or offer it where nothing is held."""
        part = self._part(kind)
        if gang is None:
            return await self._hold(await self._desk.gang(kind, step.number, sequences, part=part))
        return await self._hold(await self._desk.cross_gang(gang, kind, sequences, part=part))

    def _finish(self, gang: Gang) -> None:
        for worker in gang:
            self._fleet.trained(worker)
        self._desk.finish(*gang.values())

    async def _work(self, gang: Gang, load: Load, compute: Compute) -> Gang:
        """Take the pieces through the trainers, also where the gang has to make room in between."""

        async def go_on(worker: int, lease: Lease) -> None:
            while load.now[worker] and not lease.leaving:
                await compute(lease, load.now[worker])

        while any(load.now.values()):
            await together(*(go_on(worker, lease) for worker, lease in gang.items()))
            if any(load.now.values()):
                gang = await self._offer_again(gang, load.left())
        return gang

    async def _offer_again(self, gang: Gang, left: Mapping[int, float]) -> Gang:
        offer = next(iter(gang.values())).offer
        sequences = {worker: lease.offer.sequences for worker, lease in gang.items()}
        self._finish(gang)
        again = await self._desk.gang(
            offer.kind,
            offer.step,
            sequences,
            part=offer.part,
            left=left,
            early=offer.early,
            yielded=True,
        )
        return await self._hold(again)

    # ------------------------------------------------------------ log-probs

    async def _with_logprobs(self, step: Step, gang: Gang | None, batch: Batch) -> tuple[Gang | None, Batch]:
        """Add the log-probs that the update compares with.

        Those before the update where it has several steps (in the first they are its own), and those of the
        starting weights where a KL penalty asks for them.
        """
        if not needs_logprobs(self._spec):
            return gang, batch
        sequences = {worker: len(step.shard(batch, worker)) for worker in step.workers}
        gang = await self._enter(step, gang, SubStageKind.LOGPROB, sequences)
        wanted = [False] if self._rl.updates_per_step > 1 else []
        wanted += [True] if self._rl.loss.kl_beta > 0 else []
        made = {
            (worker, reference): [Piece(part, reference) for part in self._chunks(step.shard(batch, worker))]
            for worker in step.workers
            for reference in wanted
        }
        pieces = {
            worker: [piece for reference in wanted for piece in made[worker, reference]]
            for worker in step.workers
        }
        gang = await self._work(gang, Load([pieces]), self._logprobs)
        columns = {
            reference: step.unshard(
                batch, {worker: _joined(made[worker, reference]) for worker in step.workers}
            )
            for reference in wanted
        }
        return gang, batch.with_logprobs(old=columns.get(False), reference=columns.get(True))

    async def _logprobs(self, lease: Lease, pieces: list[Piece]) -> None:
        piece = pieces[0]
        size = self._rl.micro_batch_size
        piece.logprobs = await lease.run(
            lease.resident.logprobs, self._key, piece.batch, size, piece.reference
        )
        pieces.pop(0)

    def _chunks(self, shard: Batch) -> list[Batch]:
        """Parts of a worker's batch that depend on no other part."""
        names = micro_batch_chunks(shard.groups, self._rl.micro_batch_size, self._rl.group_size)
        return [shard.of_groups(chunk) for chunk in names]

    # ------------------------------------------------------------ updates

    async def _stream(self, step: Step, thin: Callable[[], bool]) -> Gang | None:
        """Compute the micro-batches of whole groups while others roll out. The gang, if it may keep its
        devices because there is nothing left to wait for.
        """
        gathering = step.gathering
        waiting = {worker: self._chunk_names(gathering.groups_of(worker)) for worker in step.workers}

        def ready() -> bool:
            return any(gathering.graded(chunk) for chunks in waiting.values() for chunk in chunks)

        await self._bell.until(lambda: gathering.graded() or (thin() and ready()))
        if gathering.graded():
            return None
        gang: Gang | None = None
        while pieces := self._take_ready(step, waiting):
            if gang is None:
                sequences = {w: sum(len(piece.batch) for piece in mine) for w, mine in pieces.items()}
                part = self._chain.index(SubStageKind.UPDATE)
                gang = await self._hold(
                    await self._desk.gang(
                        SubStageKind.UPDATE, gathering.step, sequences, part=part, early=True
                    )
                )
            gang = await self._work(gang, Load([pieces]), step.backward(self._key, self._fleet))
        if gang is not None and not gathering.graded():
            self._finish(gang)
            return None
        return gang

    def _chunk_names(self, groups: list[int]) -> list[list[int]]:
        return micro_batch_chunks(groups, self._rl.micro_batch_size, self._rl.group_size)

    def _take_ready(self, step: Step, waiting: dict[int, list[list[int]]]) -> Pieces:
        """The pieces of groups that have been graded since; nothing when there are none."""
        found: Pieces = {}
        for worker, chunks in waiting.items():
            whole = [chunk for chunk in chunks if step.gathering.graded(chunk)]
            waiting[worker] = [chunk for chunk in chunks if chunk not in whole]
            samples = [step.gathering.samples(chunk) for chunk in whole]
            parts = [batches.batch(self._spec, part) for part in samples]
            step.streamed |= {group for chunk in whole for group in chunk}
            found[worker] = self._micros(parts)
        return found if any(found.values()) else {}

    def _micros(self, chunks: Iterable[Batch]) -> list[Piece]:
        """What has nothing to train is no work."""
        size = self._rl.micro_batch_size
        return [Piece(micro) for chunk in chunks for micro in micro_batches(chunk, size) if micro.trained]

    async def _update(self, step: Step, gang: Gang | None, batch: Batch) -> tuple[Gang, dict[str, float]]:
        """The step's optimizer steps; the metrics of training."""
        if gang is None or gang_kind(gang) is not SubStageKind.UPDATE:
            sequences = {worker: len(step.shard(batch, worker)) for worker in step.workers}
            gang = await self._enter(step, gang, SubStageKind.UPDATE, sequences)
        done: list[tuple[Sums, Denominator]] = []
        norms, rate = [], 0.0
        updates = split_updates(batch, self._rl.updates_per_step)
        load = Load([self._pieces(step, part) for part in updates])
        for index, part in enumerate(updates):
            if index:
                load.next_round()
            over = denominator(part, self._rl.sampling.max_tokens)
            if not over.sequences:
                continue
            gang = await self._work(gang, load, step.backward(self._key, self._fleet))
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
        gang = await self._enter(step, gang, SubStageKind.SYNC, dict.fromkeys(step.workers, 0))
        await together(*(self._sync_worker(worker, lease) for worker, lease in gang.items()))
        self._finish(gang)

    async def _sync_worker(self, worker: int, lease: Lease) -> None:
        lease.begin()
        lease.cover(await self._fleet.sync(worker, lease.device, lease.share))


class Step:
    """A step's training under way: its samples by worker, and the sums of what was computed."""

    def __init__(self, gathering: Gathering, devices: int) -> None:
        self.gathering = gathering
        self.number = gathering.step
        self.workers = range(devices)
        self.streamed: set[int] = set()
        self._sums = Sums()

    def shard(self, batch: Batch, worker: int) -> Batch:
        return batch.of_groups(self.gathering.groups_of(worker))

    def unshard(self, batch: Batch, parts: Mapping[int, list[list[float]]]) -> list[list[float]]:
        """Values per worker, back in the batch's order."""
        queues = {worker: iter(values) for worker, values in parts.items()}
        return [next(queues[group % len(self.workers)]) for group in batch.groups]

    def unstreamed(self, batch: Batch) -> Batch:
        """What was not computed early."""
        return batch.of_groups(set(batch.groups) - self.streamed)

    def backward(self, run_key: str, fleet: Fleet) -> Compute:
        async def compute(lease: Lease, pieces: list[Piece]) -> None:
            fleet.midway = True
            micros = [piece.batch for piece in pieces]
            trained = await lease.run(lease.resident.forward_backward, run_key, micros)
            self._sums += trained.sums
            del pieces[: trained.done]

        return compute

    def take_sums(self) -> Sums:
        sums, self._sums = self._sums, Sums()
        return sums


def gang_kind(gang: Gang) -> SubStageKind:
    return next(iter(gang.values())).offer.kind


def _joined(pieces: list[Piece]) -> list[list[float]]:
    return [row for piece in pieces for row in piece.logprobs]
