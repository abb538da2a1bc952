"""The pipeline actor: one attempt of a job, from its first step to its last.

    ┌─ step k ──────────────────────────────────────────────────────────────────────────────┐
    │ worker 0: PREFILL → DECODE → TAIL → GRADE ┐                                            │
    │ worker 1: PREFILL → DECODE → TAIL → GRADE ┼─► (LOGPROB) ─► UPDATE ─► SYNC ─► checkpoint │
    │ …                                         ┘   all workers, together                    │
    └────────────────────────────────────────────────────────────────────────────────────────┘

It owns the job's data and decides nothing about devices: each sub-stage is offered, waits for its grant, runs
on the granted device, and is reported. LOGPROB runs only where its values are used: with several optimizer
steps per rollout, or a KL penalty. Everything random comes from the job's seed and the position, so an
attempt that resumes from a checkpoint goes on as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import OutOfMemoryError as RayOutOfMemoryError
from ray.exceptions import RayActorError, RayError

from workers import batches
from workers.batches import Prompt, Sample
from workers.data.cursor import row_at
from workers.data.rows import RowIndex, RowProblem
from workers.engines.sequences import Rollout
from workers.fleet import Fleet
from workers.grants import Desk, Stuck, Turn, call, together
from workers.launch import grader_pool
from workers.models.chat import ChatTokenizer
from workers.outbox import Outbox
from workers.protocol import (
    CheckpointSaved,
    Ended,
    Failure,
    FailureKind,
    Grant,
    Launch,
    Log,
    Report,
    StepDone,
    Stop,
    SubStageKind,
)
from workers.residents import ModelLoad, Rolled
from workers.rl.batching import Batch, Denominator, denominator, split_updates
from workers.spec import warmup_factor
from workers.train.trainer import NotFinite, Sums

log = logging.getLogger(__name__)

#: How long a request for reports waits for one. The daemon takes silence beyond it for death.
REPORT_WAIT_S = 20.0
#: Above this share of failed grades a step's rewards say nothing, and the job fails.
MAX_GRADE_ERRORS = 0.5


class GraderFailed(Exception):
    """Too many grades of a step failed."""


class Pipeline:
    """An asyncio Ray actor. ``start``, ``grant`` and ``stop`` may be called twice without harm."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._spec = launch.spec
        self._rl = launch.spec.rl
        self._outbox = Outbox(launch.attempt_id)
        self._desk = Desk(self._outbox)
        self._fleet = Fleet(launch)
        self._task: asyncio.Task[None] | None = None
        self._ending = False
        self._graders: Any = None

    # ------------------------------------------------------------ orders

    async def start(self) -> None:
        if self._task is None:
            self._outbox.add(Log(level="info", message=self._greeting()))
            self._task = asyncio.create_task(self._live())

    async def reports(self, after: int) -> list[Report]:
        await self.start()
        return await self._outbox.after(after, REPORT_WAIT_S)

    async def grant(self, grant: Grant) -> None:
        self._desk.grant(grant)

    async def stop(self, stop: Stop) -> None:
        if self._task is not None and not self._ending:
            self._ending = True
            self._task.cancel(stop.reason)

    def _greeting(self) -> str:
        if self._launch.resume_from is None:
            return f"Attempt {self._launch.attempt} starts."
        return f"Attempt {self._launch.attempt} resumes after step {self._launch.start_step}."

    async def _live(self) -> None:
        """Run to the end, whatever it is; residents forget the run before the end is reported."""
        try:
            await self._train()
            ended = Ended(outcome="succeeded")
        except asyncio.CancelledError:
            ended = Ended(outcome="stopped")
        except Exception as error:
            ended = Ended(outcome="failed", failure=failure_of(error))
        self._ending = True
        await self._let_go()
        self._outbox.add(ended)

    async def _let_go(self) -> None:
        """Nothing computes for the run any more; who is gone has forgotten it."""
        await self._fleet.close()
        if self._graders is not None:
            with suppress(RayError, Stuck):
                await call(self._graders.close, self._launch.run_key)

    # ------------------------------------------------------------ the loop

    async def _train(self) -> None:
        await asyncio.to_thread(self._open)
        self._graders = grader_pool(own_node())
        for step in range(self._launch.start_step, self._rl.steps):
            began = time.monotonic()
            prompts = self._prompts(step)
            graded = await self._roll_out(step, prompts)
            trained = await self._update(step, batches.batch(self._spec, graded))
            await self._sync(step)
            saved = await self._checkpoint(step + 1) if self._checkpoint_due(step + 1) else None
            self._report_step(step, graded, trained, time.monotonic() - began)
            if saved is not None:
                self._outbox.add(saved)

    def _open(self) -> None:
        """The tokenizer and the data."""
        try:
            self._tokenizer = ChatTokenizer(Path(self._launch.model_path))
        except ValueError as error:
            raise ModelLoad(str(error)) from error
        self._rows = RowIndex(self._launch.dataset_path)
        self._fleet.sweep()

    def _prompts(self, step: int) -> list[Prompt]:
        """The step's groups; which rows they are depends on the seed and the position alone."""
        made = []
        for group in range(self._rl.prompts_per_step):
            position = step * self._rl.prompts_per_step + group
            row = row_at(self._spec.seed, position, len(self._rows), self._rl.shuffle)
            item = self._rows[row]
            made.append(Prompt(group, row, item, tuple(self._tokenizer.encode_chat(item["messages"]))))
        return made

    # ------------------------------------------------------------ rollouts

    async def _roll_out(self, step: int, prompts: list[Prompt]) -> list[Sample]:
        chains = await together(
            *(self._chain(step, worker, self._of_worker(prompts, worker)) for worker in self._workers)
        )
        graded = [sample for chain in chains for sample in chain]
        failed = [sample.grade.error for sample in graded if sample.grade.score is None]
        if len(failed) > MAX_GRADE_ERRORS * len(graded):
            raise GraderFailed(
                f"{len(failed)} of {len(graded)} grades failed at step {step + 1}; the first: {failed[0]}"
            )
        if failed:
            text = f"Step {step + 1}: {len(failed)} of {len(graded)} grades failed; the first: {failed[0]}"
            self._outbox.add(Log(level="warning", message=text))
        return sorted(graded, key=lambda sample: (sample.prompt.group, sample.index))

    @property
    def _workers(self) -> range:
        return range(self._rl.devices)

    def _of_worker(self, prompts: list[Prompt], worker: int) -> list[Prompt]:
        return [prompt for prompt in prompts if prompt.group % self._rl.devices == worker]

    async def _chain(self, step: int, worker: int, prompts: list[Prompt]) -> list[Sample]:
        """One worker's rollouts and their grades."""
        rollouts = await self._sample(step, worker, prompts)
        outputs = batches.texts(self._spec, rollouts, self._tokenizer)
        inputs = batches.grade_inputs(prompts, rollouts, outputs)
        async with self._desk.substages(SubStageKind.GRADE, step, {worker: len(inputs)}) as turns:
            grades = await turns[worker].run(
                self._graders.grade, self._launch.run_key, self._spec.grader, inputs
            )
        return batches.samples(self._spec, prompts, rollouts, outputs, grades)

    async def _sample(self, step: int, worker: int, prompts: list[Prompt]) -> list[Rollout]:
        """Prefill, then decode; below the device's saturation batch the rest is a tail of its own."""
        wanted = batches.requests(self._spec, self._launch.run_key, step, prompts, self._tokenizer.eos_ids)
        async with self._desk.substages(SubStageKind.PREFILL, step, {worker: len(wanted)}) as turns:
            turn = turns[worker]
            engine = await self._fleet.rollout(worker, turn.device, version=step)
            rolled: Rolled = await turn.run(engine.prefill, self._launch.run_key, wanted)
        finished = list(rolled.finished)
        saturated = turn.device.saturation_batch
        while rolled.left:
            tail = rolled.left < saturated
            kind = SubStageKind.TAIL if tail else SubStageKind.DECODE
            async with self._desk.substages(kind, step, {worker: rolled.left}) as turns:
                turn = turns[worker]
                engine = await self._fleet.rollout(worker, turn.device, version=step)
                floor = 0 if tail else saturated - 1
                rolled = await turn.run(engine.decode, self._launch.run_key, floor)
            finished += rolled.finished
        if {rollout.request.key for rollout in finished} != {request.key for request in wanted}:
            raise RuntimeError(f"{len(finished)} of {len(wanted)} sequences came back")
        return sorted(finished, key=lambda rollout: rollout.request.key)

    # ------------------------------------------------------------ training

    async def _update(self, step: int, batch: Batch) -> dict[str, float]:
        """The step's optimizer steps; the metrics of training."""
        if not any(batch.keep):
            text = f"Step {step + 1} trains nothing: no completion of it may be used."
            self._outbox.add(Log(level="warning", message=text))
            return {}
        batch = await self._with_logprobs(step, batch)
        sums, norms, rate = Sums(), [], 0.0
        sequences = {worker: len(self._shard(batch, worker).groups) for worker in self._workers}
        async with self._desk.substages(SubStageKind.UPDATE, step, sequences) as turns:
            trainers = {w: await self._fleet.trainer(w, turn.device) for w, turn in turns.items()}
            for index, part in enumerate(split_updates(batch, self._rl.updates_per_step)):
                over = denominator(part, self._rl.sampling.max_tokens)
                if over.sequences == 0:
                    continue
                sums = sums + await self._backward(turns, trainers, part, over)
                rate = self._rate(step * self._rl.updates_per_step + index)
                norms.append(await self._optimize(turns, trainers, rate))
        metrics = sums.metrics()
        metrics["loss"] /= len(norms)
        return {**metrics, "grad_norm": statistics.fmean(norms), "learning_rate": rate}

    def _rate(self, optimizer_step: int) -> float:
        return self._rl.learning_rate * warmup_factor(self._rl, optimizer_step)

    def _shard(self, batch: Batch, worker: int) -> Batch:
        mine = [i for i, group in enumerate(batch.groups) if group % self._rl.devices == worker]
        return batch.select(mine)

    async def _with_logprobs(self, step: int, batch: Batch) -> Batch:
        """Add the log-probs that the update compares with.

        Those before the update where it has several steps (in the first they are its own), and those of the
        starting weights where a KL penalty asks for them.
        """
        if self._rl.updates_per_step > 1:
            batch = batch.with_logprobs(old=await self._logprobs(step, batch, reference=False))
        if self._rl.loss.kl_beta > 0:
            batch = batch.with_logprobs(reference=await self._logprobs(step, batch, reference=True))
        return batch

    async def _logprobs(self, step: int, batch: Batch, *, reference: bool) -> list[list[float]]:
        shards = {worker: self._shard(batch, worker) for worker in self._workers}
        sequences = {worker: len(shard.groups) for worker, shard in shards.items()}
        size, key = self._rl.micro_batch_size, self._launch.run_key

        async def of_worker(worker: int, turn: Turn) -> list[list[float]]:
            trainer = await self._fleet.trainer(worker, turn.device)
            return await turn.run(trainer.logprobs, key, shards[worker], size, reference)

        async with self._desk.substages(SubStageKind.LOGPROB, step, sequences) as turns:
            made = await together(*(of_worker(worker, turn) for worker, turn in turns.items()))
        return self._unshard(batch, dict(zip(turns, made, strict=True)))

    def _unshard(self, batch: Batch, parts: dict[int, list[list[float]]]) -> list[list[float]]:
        """Values per worker, back in the batch's order."""
        queues = {worker: iter(values) for worker, values in parts.items()}
        return [next(queues[group % self._rl.devices]) for group in batch.groups]

    async def _backward(
        self, turns: dict[int, Turn], trainers: dict[int, Any], part: Batch, over: Denominator
    ) -> Sums:
        """Gradients of one optimizer step: each worker its shard, then the sum on every worker."""
        key, size = self._launch.run_key, self._rl.micro_batch_size
        made: list[Sums] = await together(
            *(
                turn.run(trainers[w].forward_backward, key, self._shard(part, w), over, size)
                for w, turn in turns.items()
            )
        )
        if len(turns) > 1:
            parts = [trainers[w].gradients.remote(key) for w in turns]
            await together(*(self._sum_gradients(turn, trainers[w], parts) for w, turn in turns.items()))
        return sum(made, Sums())

    async def _sum_gradients(self, turn: Turn, trainer: Any, parts: Sequence[Any]) -> None:
        turn.cover(await call(trainer.sum_gradients, self._launch.run_key, turn.share, *parts))

    async def _optimize(self, turns: dict[int, Turn], trainers: dict[int, Any], rate: float) -> float:
        """The same step on every worker; the norm of the gradient."""
        norms = await together(
            *(turn.run(trainers[w].optim_step, self._launch.run_key, rate) for w, turn in turns.items())
        )
        return norms[0]

    async def _sync(self, step: int) -> None:
        """The engines get the weights that the next step samples from."""
        async with self._desk.substages(SubStageKind.SYNC, step, dict.fromkeys(self._workers, 0)) as turns:
            await together(*(self._sync_worker(w, turn, step + 1) for w, turn in turns.items()))

    async def _sync_worker(self, worker: int, turn: Turn, version: int) -> None:
        turn.cover(await self._fleet.sync(worker, turn.device, version, turn.share))

    # ------------------------------------------------------------ keeping and telling

    def _checkpoint_due(self, steps_done: int) -> bool:
        return steps_done % self._rl.checkpoint_every == 0 or steps_done == self._rl.steps

    async def _checkpoint(self, steps_done: int) -> CheckpointSaved:
        state = {"job": self._launch.job_id, "step": steps_done, "spec": self._spec.model_dump(mode="json")}
        path, size, removed = await self._fleet.save(steps_done, state, self._rl.keep_checkpoints)
        final = steps_done == self._rl.steps
        return CheckpointSaved(step=steps_done, path=path, bytes=size, final=final, removed=tuple(removed))

    def _report_step(
        self, step: int, graded: list[Sample], trained: dict[str, float], seconds: float
    ) -> None:
        metrics = {**batches.rollout_metrics(graded), **trained, "seconds": seconds}
        metrics["tokens_per_s"] = metrics["tokens"] / seconds
        samples = batches.records(graded, self._rl.sample_groups)
        self._outbox.add(StepDone(step=step, metrics=metrics, samples=samples))


def own_node() -> str:
    """Ray's id of the machine this runs on."""
    return ray.get_runtime_context().get_node_id()


def failure_of(error: Exception) -> Failure:
    """An exception as a value that travels. Errors of residents arrive as subclasses of their own type.

    What nobody foresaw is told by a number only: its text may name what is not the customer's business.
    """
    said = str(error).strip().splitlines()[-1:] or [type(error).__name__]
    match error:
        case NotFinite():
            return Failure(kind=FailureKind.NOT_FINITE, message=said[0])
        case GraderFailed():
            return Failure(kind=FailureKind.GRADER_FAILED, message=said[0])
        case RowProblem():
            return Failure(kind=FailureKind.BAD_DATA, message=said[0])
        case ModelLoad():
            return Failure(kind=FailureKind.MODEL_LOAD, message=said[0])
        case Stuck():
            return Failure(kind=FailureKind.TIME_LIMIT, message=said[0])
        case RayActorError():
            return Failure(kind=FailureKind.WORKER_LOST, message="a process on the device is gone")
    if is_out_of_memory(error):
        message = "a smaller micro_batch_size, group_size or max_tokens needs less"
        return Failure(kind=FailureKind.OUT_OF_MEMORY, message=message)
    number = uuid.uuid4().hex[:12]
    log.error("error %s", number, exc_info=error)
    return Failure(kind=FailureKind.INTERNAL, message=f"error {number}")


def is_out_of_memory(error: Exception) -> bool:
    """torch says it in words only when it is the processor's memory that has run out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | RayOutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
