"""The pipeline actor: one attempt of a job, from its first step to its last.

    rolling, a loop per worker     PREFILL → DECODE → TAIL (→ TOOL → …)      step k: weights of k - staleness
           │ sequences that end
    grading, a loop per worker     GRADE                                     groups as they get whole
           │ groups with grades
    training, one loop             (LOGPROB) → UPDATE → SYNC → checkpoint    step k: all its groups
           └─► the next version of the weights

They wait for each other on one bell (``workers.calls.Bell``) and for nothing else. Synchronous, no rollout of
a step begins before the step before it is over; asynchronous, up to ``max_staleness`` updates early, and
whatever was rolled out is trained, in order.

It owns the job's data and decides nothing about devices: each sub-stage is offered, waits for its grant, runs
on the granted device, and is reported. Everything random comes from the job's seed and the position, so an
attempt that resumes from a checkpoint goes on as if nothing had happened; steps that were rolled out and not
trained are rolled out anew.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from workers import batches
from workers.batches import Prompt
from workers.calls import Bell, Stuck, call, together
from workers.chain import train_chain
from workers.data.cursor import row_at
from workers.data.rows import RowIndex
from workers.engines.sequences import Rollout
from workers.envs.environment import Environment, begin
from workers.envs.problems import EnvironmentProblem
from workers.failures import failure_of
from workers.fleet import Fleet
from workers.gathering import Episode, Gathering
from workers.grants import Desk
from workers.launch import grader_pool
from workers.models.chat import ChatTokenizer
from workers.outbox import Outbox
from workers.protocol import (
    CheckpointSaved,
    Ended,
    Grant,
    Launch,
    Log,
    Merge,
    Order,
    Report,
    Resize,
    StepDone,
    Stop,
    SubStageKind,
    Yield,
)
from workers.residents.errors import ModelLoad
from workers.rollouts import Rollers, Tools
from workers.training import Training

#: How long a request for reports waits for one. The daemon takes silence beyond it for death.
REPORT_WAIT_S = 20.0


class Pipeline:
    """An asyncio Ray actor. ``start``, ``order`` and ``stop`` may be called twice without harm."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._spec = launch.spec
        self._rl = launch.spec.rl
        self._outbox = Outbox(launch.attempt_id)
        self._desk = Desk(self._outbox, launch.run_key)
        self._fleet = Fleet(launch)
        self._bell = Bell()
        self._gatherings: dict[int, Gathering] = {}
        self._trained = launch.start_step
        self._task: asyncio.Task[None] | None = None
        self._ending = False
        self._graders: Any = None
        self._rollers: Rollers | None = None

    # ------------------------------------------------------------ orders

    async def start(self) -> None:
        if self._task is None:
            self._outbox.add(Log(level="info", message=self._greeting()))
            self._task = asyncio.create_task(self._live())

    async def reports(self, after: int) -> list[Report]:
        await self.start()
        return await self._outbox.after(after, REPORT_WAIT_S)

    async def order(self, order: Order) -> None:
        """An order for a sub-stage that is over changes nothing."""
        match order:
            case Grant():
                self._desk.grant(order)
            case Resize():
                await self._desk.resize(order)
            case Yield():
                await self._desk.make_room(order)
            case Merge() if self._rollers is not None:
                self._rollers.merge(order)

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
            await self._run()
            ended = Ended(outcome="succeeded")
        except asyncio.CancelledError:
            ended = Ended(outcome="stopped")
        except Exception as error:
            ended = Ended(outcome="failed", failure=failure_of(error))
        self._ending = True
        self._desk.close()
        await self._let_go()
        self._outbox.add(ended)

    async def _let_go(self) -> None:
        """Nothing computes for the run any more; who is gone has forgotten it."""
        await self._fleet.close()
        if self._graders is not None:
            with suppress(RayError, Stuck):
                await call(self._graders.close, self._launch.run_key)

    # ------------------------------------------------------------ the loops

    async def _run(self) -> None:
        await asyncio.to_thread(self._open)
        self._graders = grader_pool(own_node())
        self._rollers = Rollers(self._tools())
        workers = range(self._rl.devices)
        await together(
            *(self._roll(self._rollers, worker) for worker in workers),
            *(self._grade(worker) for worker in workers),
            self._train(self._rollers),
        )

    def _open(self) -> None:
        """The tokenizer and the data."""
        try:
            self._tokenizer = ChatTokenizer(Path(self._launch.model_path))
        except ValueError as error:
            raise ModelLoad(str(error)) from error
        self._rows = RowIndex(self._launch.dataset_path)
        self._fleet.sweep()

    def _tools(self) -> Tools:
        return Tools(
            spec=self._spec,
            run_key=self._launch.run_key,
            desk=self._desk,
            fleet=self._fleet,
            bell=self._bell,
            tokenizer=self._tokenizer,
        )

    @property
    def _steps(self) -> range:
        return range(self._launch.start_step, self._rl.steps)

    async def _roll(self, rollers: Rollers, worker: int) -> None:
        """Roll out step by step, as far ahead of training as the job allows."""
        for step in self._steps:
            await self._bell.until(partial(self._may_roll_out, step))
            await rollers.roll(step, worker, self._episodes(self._gather(step), worker))

    def _may_roll_out(self, step: int) -> bool:
        return self._trained >= step - self._rl.max_staleness

    async def _grade(self, worker: int) -> None:
        """Grade groups as they get whole: all that have by the time the graders are free."""
        for step in self._steps:
            await self._bell.until(partial(self._gatherings.__contains__, step))
            await self._grade_step(self._gatherings[step], worker)

    async def _grade_step(self, gathering: Gathering, worker: int) -> None:
        left = gathering.groups_of(worker)
        lease = None
        while left:
            await self._bell.until(partial(gathering.any_whole, left))
            whole = [group for group in left if gathering.whole(group)]
            left = [group for group in left if group not in whole]
            if lease is None:
                part = train_chain(self._spec, self._launch.streams).index(SubStageKind.GRADE)
                count = self._rl.group_size * (len(whole) + len(left))
                lease = self._desk.begin(SubStageKind.GRADE, gathering.step, worker, count, part=part)
            inputs = gathering.grade_inputs(whole)
            grades = await lease.run(self._graders.grade, self._launch.run_key, self._spec.grader, inputs)
            if not left:
                self._desk.finish(lease)
            gathering.take_grades(whole, grades)

    async def _train(self, rollers: Rollers) -> None:
        training = Training(self._launch, self._desk, self._fleet, self._bell, self._outbox)
        began = time.monotonic()
        for step in self._steps:
            await self._bell.until(partial(self._gatherings.__contains__, step))
            gathering = self._gatherings[step]
            trained = await training.run(gathering, partial(rollers.thin, step))
            saved = await self._checkpoint(step + 1) if self._checkpoint_due(step + 1) else None
            now = time.monotonic()
            self._report_step(gathering, trained, now - began)
            if saved is not None:
                self._outbox.add(saved)
            began = now
            rollers.forget(step)
            del self._gatherings[step]
            self._trained = step + 1
            self._bell.ring()

    # ------------------------------------------------------------ the data of a step

    def _gather(self, step: int) -> Gathering:
        """The step's data; whichever worker comes first reads it."""
        if step not in self._gatherings:
            self._gatherings[step] = Gathering(
                self._spec, step, self._prompts(step), self._tokenizer, self._bell
            )
            self._bell.ring()
        return self._gatherings[step]

    def _prompts(self, step: int) -> list[Prompt]:
        """The step's groups; which rows they are depends on the seed and the position alone."""
        made = []
        for group in range(self._rl.prompts_per_step):
            position = step * self._rl.prompts_per_step + group
            row = row_at(self._spec.seed, position, len(self._rows), self._rl.shuffle)
            item = self._rows[row]
            made.append(Prompt(group, row, item, tuple(self._tokenizer.encode_chat(item["messages"]))))
        return made

    def _episodes(self, gathering: Gathering, worker: int) -> list[Episode]:
        mine = gathering.groups_of(worker)
        return [
            Episode(Rollout(request), prompt, gathering, self._environment(prompt, request.stream))
            for prompt in gathering.prompts
            if prompt.group in mine
            for request in batches.requests(
                self._spec, self._launch.run_key, gathering.step, prompt, self._tokenizer.eos_ids
            )
        ]

    def _environment(self, prompt: Prompt, stream: tuple[int, ...]) -> Environment | None:
        if self._spec.environment is None:
            return None
        try:
            return begin(self._spec.environment, prompt.item, stream)
        except EnvironmentProblem as error:
            raise EnvironmentProblem(f"row {prompt.row + 1}: {error}") from None

    # ------------------------------------------------------------ keeping and telling

    def _checkpoint_due(self, steps_done: int) -> bool:
        return steps_done % self._rl.checkpoint_every == 0 or steps_done == self._rl.steps

    async def _checkpoint(self, steps_done: int) -> CheckpointSaved:
        state = {"job": self._launch.job_id, "step": steps_done, "spec": self._spec.model_dump(mode="json")}
        path, size, removed = await self._fleet.save(steps_done, state, self._rl.keep_checkpoints)
        final = steps_done == self._rl.steps
        return CheckpointSaved(step=steps_done, path=path, bytes=size, final=final, removed=tuple(removed))

    def _report_step(self, gathering: Gathering, trained: dict[str, float], seconds: float) -> None:
        """``seconds`` have gone by since the step before was reported."""
        graded = gathering.samples()
        metrics = {**batches.rollout_metrics(self._spec, graded), **trained, "seconds": seconds}
        metrics["tokens_per_s"] = metrics["tokens"] / seconds
        metrics["waiting"] = min(1.0, self._desk.waiting.take() / seconds)
        if self._rl.asynchronous:
            metrics |= batches.staleness(gathering.step, graded)
        samples = batches.records(graded, self._rl.sample_groups)
        self._outbox.add(StepDone(step=gathering.step, metrics=metrics, samples=samples))


def own_node() -> str:
    """Ray's id of the machine this runs on."""
    return ray.get_runtime_context().get_node_id()
