"""The pipeline actor: one attempt of a job, from its first step to its last.

    rolling, a loop per worker     PREFILL → DECODE → TAIL (→ TOOL → …)      step k: weights of k - staleness
           │ sequences that end
    grading, a loop per worker     GRADE                                     groups as they get whole
           │ groups with grades
    training, one loop             (LOGPROB) → UPDATE → SYNC → checkpoint    step k: all its groups
           └─► the next version of the weights

They wait for each other on one bell (``workers.calls.Bell``) and for nothing else. Synchronous, no rollout of
a step begins before the step before it is over; asynchronous, up to ``max_staleness`` updates early, and
whatever was rolled out is trained, in order. Groups that teach nothing may be replaced: then a worker rolls
out again, within the step. A job that learns from the data's own completions has the last loop alone.

It owns the job's data and decides nothing about devices: each sub-stage is offered, waits for its grant, runs
on the granted device, and is reported. Everything random comes from the job's seed and the position, so an
attempt that resumes from a checkpoint goes on as if nothing had happened; steps that were rolled out and not
trained are rolled out anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from workers import batches, telling
from workers.batches import Prompt
from workers.calls import Bell, Stuck, call, together
from workers.chain import train_chain
from workers.engines.sequences import Rollout
from workers.envs.environment import Beginning, Environment
from workers.envs.episodes import begin
from workers.envs.helpers import Helpers
from workers.envs.problems import EnvironmentProblem
from workers.failures import failure_of
from workers.fleet import Fleet
from workers.gathering import Episode, Gathering
from workers.graders.run import GradeInput, GradeResult
from workers.grants import Desk, Lease
from workers.idleness import FIELD, Idleness
from workers.launch import grader_pool
from workers.material import Material
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
    SampleRecord,
    StepDone,
    Stop,
    SubStageKind,
    Yield,
)
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
        training = Training(self._launch, self._desk, self._fleet, self._bell, self._outbox)
        if not self._rl.method.rolls_out:
            await self._study(training)
            return
        self._graders = grader_pool(own_node())
        self._helpers = self._help()
        self._rollers = Rollers(self._tools())
        workers = range(self._rl.devices)
        await together(
            *(self._roll(self._rollers, worker) for worker in workers),
            *(self._grade(worker) for worker in workers),
            self._train(training, self._rollers),
        )

    def _open(self) -> None:
        self._material = Material(self._launch)
        self._idleness = Idleness(self._rl.max_idle_steps, self._launch.resume_from)
        self._fleet.sweep()

    def _tools(self) -> Tools:
        return Tools(
            spec=self._spec,
            run_key=self._launch.run_key,
            desk=self._desk,
            fleet=self._fleet,
            bell=self._bell,
            tokenizer=self._material.tokenizer,
        )

    def _help(self) -> Helpers:
        """What graders and environments may ask for."""
        launch = self._launch
        secrets = {name: value.get_secret_value() for name, value in launch.secrets.items()}
        return Helpers(self._graders, launch.run_key, launch.corpora, secrets)

    @property
    def _steps(self) -> range:
        return range(self._launch.start_step, self._rl.steps)

    async def _roll(self, rollers: Rollers, worker: int) -> None:
        """Roll out step by step, as far ahead of training as the job allows."""
        for step in self._steps:
            await self._bell.until(partial(self._may_roll_out, step))
            await self._roll_step(rollers, self._gather(step), worker)

    async def _roll_step(self, rollers: Rollers, gathering: Gathering, worker: int) -> None:
        """The first round, and those that replace groups."""
        for round in range(self._rl.sampling_rounds or 1):
            if round:
                await self._bell.until(partial(gathering.round_over, worker, round - 1))
            prompts = gathering.prompts_of(worker, round)
            if not prompts:
                return
            await rollers.roll(gathering.step, worker, self._episodes(gathering, prompts))

    def _may_roll_out(self, step: int) -> bool:
        return self._trained >= step - self._rl.max_staleness

    async def _grade(self, worker: int) -> None:
        """Grade groups as they get whole: all that have by the time the graders are free."""
        for step in self._steps:
            await self._bell.until(partial(self._gatherings.__contains__, step))
            gathering = self._gatherings[step]
            while left := gathering.ungraded(worker):
                await self._grade_round(gathering, worker, left)

    async def _grade_round(self, gathering: Gathering, worker: int, left: list[int]) -> None:
        lease = None
        while left:
            await self._bell.until(partial(gathering.any_whole, left))
            whole = [group for group in left if gathering.whole(group)]
            left = [group for group in left if group not in whole]
            if lease is None:
                part = train_chain(self._spec, self._launch.streams).index(SubStageKind.GRADE)
                count = self._rl.group_size * (len(whole) + len(left))
                lease = self._desk.begin(SubStageKind.GRADE, gathering.step, worker, count, part=part)
            grades = await self._grades(lease, gathering.grade_inputs(whole))
            if not left:
                self._desk.finish(lease)
            gathering.take_grades(whole, grades)

    async def _grades(self, lease: Lease, inputs: list[GradeInput]) -> list[GradeResult]:
        """None where the environment gives the rewards, or nothing came that could be graded."""
        grader = self._spec.grader
        if grader is None or not inputs:
            return []
        return await lease.run(
            self._graders.grade, self._launch.run_key, grader, inputs, self._helpers.secrets
        )

    async def _train(self, training: Training, rollers: Rollers) -> None:
        began = time.monotonic()
        for step in self._steps:
            await self._bell.until(partial(self._gatherings.__contains__, step))
            gathering = self._gatherings[step]
            taught = await training.run(gathering, partial(rollers.thin, step))
            self._warn(self._idleness.note(step, taught.idle))
            graded = gathering.all_samples()
            metrics = telling.rollout_metrics(self._spec, graded) | taught.metrics
            if self._rl.asynchronous:
                metrics |= telling.staleness(step, graded)
            samples = telling.records(gathering.samples(), self._rl.sample_groups, taught.advantages)
            began = await self._close_step(step, metrics, samples, began)
            rollers.forget(step)
            del self._gatherings[step]
            if step + 1 < self._rl.steps:
                self._idleness.check()
            self._trained = step + 1
            self._bell.ring()

    async def _study(self, training: Training) -> None:
        """Train on the data's own completions."""
        began = time.monotonic()
        for step in self._steps:
            batch = await asyncio.to_thread(self._material.examples, step)
            taught = await training.learn(step, batch)
            began = await self._close_step(step, telling.example_metrics(batch) | taught.metrics, (), began)

    # ------------------------------------------------------------ the data of a step

    def _gather(self, step: int) -> Gathering:
        """The step's data; whichever worker comes first reads it."""
        if step not in self._gatherings:
            again = partial(self._material.prompts, step)
            self._gatherings[step] = Gathering(
                self._spec, step, again(0), self._material.tokenizer, self._bell, again
            )
            self._bell.ring()
        return self._gatherings[step]

    def _episodes(self, gathering: Gathering, prompts: Sequence[Prompt]) -> list[Episode]:
        eos_ids = self._material.tokenizer.eos_ids
        return [
            Episode(Rollout(request), prompt, gathering, self._environment(prompt, request.stream))
            for prompt in prompts
            for request in batches.requests(self._spec, self._launch.run_key, gathering.step, prompt, eos_ids)
        ]

    def _environment(self, prompt: Prompt, stream: tuple[int, ...]) -> Environment | None:
        if self._spec.environment is None:
            return None
        try:
            return begin(self._spec.environment, Beginning(prompt.item, stream, self._helpers))
        except EnvironmentProblem as error:
            raise EnvironmentProblem(f"row {prompt.row + 1}: {error}") from None

    # ------------------------------------------------------------ keeping and telling

    def _checkpoint_due(self, steps_done: int) -> bool:
        return steps_done % self._rl.checkpoint_every == 0 or steps_done == self._rl.steps

    async def _checkpoint(self, steps_done: int) -> CheckpointSaved:
        state = {
            "job": self._launch.job_id,
            "step": steps_done,
            "spec": self._spec.model_dump(mode="json"),
            FIELD: self._idleness.steps,
        }
        path, size, removed = await self._fleet.save(steps_done, state, self._rl.keep_checkpoints)
        final = steps_done == self._rl.steps
        return CheckpointSaved(step=steps_done, path=path, bytes=size, final=final, removed=tuple(removed))

    async def _close_step(
        self, step: int, metrics: dict[str, float], samples: tuple[SampleRecord, ...], began: float
    ) -> float:
        """Save what is to be saved, and report the step; when that was. The step before was at ``began``."""
        saved = await self._checkpoint(step + 1) if self._checkpoint_due(step + 1) else None
        now = time.monotonic()
        seconds = now - began
        told = metrics | {
            "seconds": seconds,
            "tokens_per_s": metrics["tokens"] / seconds,
            "waiting": min(1.0, self._desk.waiting.take() / seconds),
        }
        self._outbox.add(StepDone(step=step, metrics=told, samples=samples))
        if saved is not None:
            self._outbox.add(saved)
        return now

    def _warn(self, text: str) -> None:
        if text:
            self._outbox.add(Log(level="warning", message=text))


def own_node() -> str:
    """Ray's id of the machine this runs on."""
    return ray.get_runtime_context().get_node_id()
