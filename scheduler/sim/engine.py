"""The world around a planner: a virtual clock, and the truth that the planner does not see.

    next event ─► tell the board ─► decide ─► do the actions ─► new speeds, new ends ─► next event
                      ▲                            │ something new is offered
                      └────────────────────────────┘

The board is what a daemon would believe: sub-stages move on by prediction. The tasks are what is true: each
has solo seconds left, and its speed is that of ``rates.speeds`` over the true segments with the hidden
table. All that crosses over is what a daemon sees: offers, ends, how long something took, how many
sequences run, tokens.

Kept simple: a sub-stage that yields stops at once, and moving a resident's weights takes no time (the
measured SYNC and loading times of every step are there).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

from scheduler.core.board import Board
from scheduler.core.invariants import check as contradictions
from scheduler.core.invariants import check_decision
from scheduler.core.plan import decide as decide_by_policy
from scheduler.core.profile import SURPRISE, relative_error, surprising
from scheduler.core.state import (
    Action,
    Admit,
    Device,
    DeviceState,
    Kind,
    Merge,
    Plan,
    Policy,
    Refusal,
    RefusalCode,
    Resize,
    Snapshot,
    Start,
    Tenant,
    Wait,
    Yield,
)
from scheduler.sim.attempt import Attempt, Task
from scheduler.sim.clock import Clock
from scheduler.sim.events import Arrive, Cancel, Due, Event, Lose, Overdue, Remind, Return
from scheduler.sim.floor import Floor
from scheduler.sim.ledger import Broken, Ledger
from scheduler.sim.nature import Measured, Nature
from scheduler.sim.record import Record
from scheduler.sim.result import KindError, Result, Sample, TenantResult
from scheduler.sim.scenario import Scenario, SimJob, streamed

Decide = Callable[[Board, Policy], Plan]

#: Bounds against looping for ever: events for each sub-stage of all jobs, and decisions without time passing.
EVENTS_PER_NODE = 100
MAX_ROUNDS = 1_000
#: The part of capacity by which used and idle time may miss it: rounding.
ACCOUNTING = 1e-6
#: Why a job waits that waits on purpose.
CHOSEN = "chosen"


class Stuck(RuntimeError):
    """Jobs are unfinished and nothing will happen any more, or too much does."""


class Simulation:
    def __init__(
        self, scenario: Scenario, policy: Policy, seed: int, check: bool, nature: Nature, decide: Decide
    ) -> None:
        self._scenario, self._policy, self._seed = scenario, policy, seed
        self._check, self._nature, self._decide = check, nature, decide
        self._clock: Clock[Event] = Clock()
        self._board = Board(0.0, seed, {nature.device_type: nature.table}, policy.shares)
        self._records = {job.id: Record(job, nature.queued(job)) for job in scenario.jobs}
        self._attempts: dict[int, Attempt] = {}
        self._of_job: dict[str, Attempt] = {}
        self._ledger = Ledger(scenario.device_names, scenario.tenants)
        hidden = nature.hidden(seed)
        self._floor = Floor(scenario.device_names, policy, hidden, self._board, self._ledger)
        self._samples: dict[int, list[Sample]] = {tenant: [] for tenant in scenario.tenants}
        self._errors: dict[Kind, list[float]] = defaultdict(list)
        self._unfinished = len(scenario.jobs)
        # Of this moment:
        self._news = False
        self._concerned: dict[str, None] = {}
        # Counted:
        self._counts: dict[type[Action], int] = defaultdict(int)
        self._decisions = 0
        self._decision_seconds = 0.0

    # ------------------------------------------------------------ time

    def run(self) -> Result:
        self._set_up()
        events, limit = 0, self._event_limit()
        while self._unfinished:
            if not self._clock:
                raise Stuck(self._story("nothing will happen any more"))
            self._handle(self._clock.next())
            events += 1
            while self._clock.moment_goes_on:
                self._handle(self._clock.next())
                events += 1
            if events > limit:
                raise Stuck(self._story(f"{events} events and no end"))
            self._settle_the_moment()
        return self._result()

    def _event_limit(self) -> int:
        nodes = 0
        for record in self._records.values():
            job, expected = record.job, record.queued.outlook
            nodes += job.steps * job.devices * (len(expected.rollout) + len(expected.train))
        return EVENTS_PER_NODE * (nodes + len(self._scenario.jobs) + len(self._scenario.outages))

    def _set_up(self) -> None:
        scenario = self._scenario
        for name in scenario.device_names:
            self._board.set_device(Device(name, self._nature.device_type, self._nature.memory_bytes))
        for tenant in scenario.tenants:
            weight, limit = scenario.weights.get(tenant, 1.0), scenario.quotas.get(tenant)
            self._board.tenants[tenant] = Tenant(tenant, weight, max_devices=limit)
        for job in scenario.jobs:
            self._clock.at(job.arrival, Arrive(job))
            if job.cancel_at is not None:
                self._clock.at(job.cancel_at, Cancel(job))
        for outage in scenario.outages:
            self._clock.at(outage.at, Lose(outage))
            self._clock.at(outage.until, Return(outage))

    def _handle(self, event: Event) -> None:
        self._board.tick(self._clock.now)
        match event:
            case Arrive():
                self._arrive(event.job)
            case Cancel():
                self._cancel(self._records[event.job.id])
            case Lose():
                self._lose(event.outage.device)
            case Return():
                self._return(event.outage.device)
            case Due():
                if event.task.version == event.version:
                    self._end(event.task)
            case Overdue():
                if event.task.version == event.version and not event.task.warned:
                    event.task.warned = True
                    self._touch(name for name in event.task.places.values() if name is not None)
            case Remind():
                if event.pipeline in self._attempts:
                    self._touch(self._board.pipelines[event.pipeline].home)

    def _settle_the_moment(self) -> None:
        """Decide until nothing is new, then let time go on at the new speeds."""
        rounds = 0
        while self._news:
            self._news = False
            rounds += 1
            if rounds > MAX_ROUNDS:
                raise Stuck(self._story(f"{rounds} decisions at {self._clock.now} and no end"))
            self._plan()
        for task in self._floor.refresh(self._clock.now):
            self._time(task)
        self._remember_waiting()

    def _time(self, task: Task) -> None:
        """When it ends at its speed, and when it is late."""
        now = self._clock.now
        due = now + max(0.0, task.left) / task.speed
        self._clock.at(due, Due(task, task.version))
        overdue = now + max(0.0, (1 + SURPRISE) * task.expected - task.seen) / task.predicted_speed
        if task.on_device and overdue < due and not task.warned:
            self._clock.at(overdue, Overdue(task, task.version))

    def _touch(self, devices: Iterable[str]) -> None:
        self._board.touched.update(devices)
        self._news = True

    # ------------------------------------------------------------ jobs

    def _arrive(self, job: SimJob) -> None:
        self._lift(job.tenant)
        self._submit(self._records[job.id])

    def _submit(self, record: Record) -> None:
        self._board.submit(record.queued)
        self._concerned[record.job.id] = None
        self._news = True

    def _busy_tenants(self) -> set[int]:
        board = self._board
        return {job.tenant for job in board.queue.values()} | {p.tenant for p in board.pipelines.values()}

    def _lift(self, tenant: int) -> None:
        """Who comes back begins where the others are: idle time is not saved up."""
        tenants, busy = self._board.tenants, self._busy_tenants()
        if tenant not in busy and busy:
            least = min(tenants[other].service for other in busy)
            tenants[tenant] = replace(tenants[tenant], service=max(tenants[tenant].service, least))

    def _cancel(self, record: Record) -> None:
        if not record.open:
            return
        record.cancelled = True
        self._close(record)
        self._board.withdraw(record.job.id)
        attempt = self._of_job.get(record.job.id)
        if attempt is not None:
            self._stop(attempt)

    def _close(self, record: Record) -> None:
        self._unfinished -= 1
        self._concerned[record.job.id] = None
        self._news = True

    def _stop(self, attempt: Attempt) -> None:
        """The attempt is over, whatever of it runs."""
        for task in dict.fromkeys(attempt.open.values()):
            self._floor.leave(task)
        self._board.end(attempt.pipeline)
        del self._attempts[attempt.pipeline]
        del self._of_job[attempt.job.id]
        self._news = True

    def _lose(self, device: str) -> None:
        lost = [self._attempts[id] for id in list(self._board.at_home[device]) if id in self._attempts]
        for attempt in lost:
            self._stop(attempt)
            self._submit(self._records[attempt.job.id])
        self._floor.lose(device)
        self._set_device(device, DeviceState.LOST)

    def _return(self, device: str) -> None:
        if self._floor.bring_back(device):
            self._set_device(device, DeviceState.READY)

    def _set_device(self, device: str, state: DeviceState) -> None:
        self._board.set_device(replace(self._board.devices[device], state=state))
        self._news = True

    # ------------------------------------------------------------ sub-stages

    def _offer(self, task: Task) -> None:
        for node in task.attempt.offers(task, self._clock.now):
            self._board.offer(node)
        task.seen, task.warned = 0.0, False
        self._concerned[task.attempt.job.id] = None
        self._news = True

    def _end(self, task: Task) -> None:
        attempt, board = task.attempt, self._board
        task.settle(self._clock.now)
        self._errors[task.kind].append(relative_error(task.expected, task.seen))
        self._floor.leave(task)
        for node in task.nodes:
            board.finish(attempt.pipeline, node.id)
        surprised = surprising(task.expected, task.seen)
        if task.chain is None:
            attempt.observe_train(task.part, task.seen)
        else:
            task.chain.finish(task.seen)
            attempt.learn(task.chain)
        piece = attempt.next_piece(task)
        if piece is not None:
            task.do(piece)
            self._offer(task)
        else:
            if task.chain is not None:
                attempt.learn(task.chain)
            self._follow(attempt, task)
        if surprised and attempt.pipeline in self._attempts:
            board.expect(attempt.pipeline, attempt.outlook)
        self._concerned[attempt.job.id] = None
        self._news = True

    def _follow(self, attempt: Attempt, task: Task) -> None:
        """The task has no more pieces: what waited for it is offered."""
        following = attempt.follow(task)
        over, attempt.over = attempt.over, []
        for step in over:
            self._step_over(attempt, step)
        if attempt.updates == attempt.job.steps:
            record = self._records[attempt.job.id]
            record.finished = self._clock.now
            self._stop(attempt)
            self._close(record)
            return
        for new in following:
            self._offer(new)

    def _step_over(self, attempt: Attempt, number: int) -> None:
        step, record = attempt.step(number), self._records[attempt.job.id]
        if step.sampled != step.to_sample:
            raise Broken(f"{record.job.id} step {number}: {step.sampled} of {step.to_sample} tokens sampled")
        if step.version is not None:
            behind = number - step.version
            if behind > attempt.max_staleness:
                raise Broken(f"{record.job.id} step {number}: weights {behind} steps old")
            record.staleness = max(record.staleness, behind)
        attempt.forget(number)
        record.tokens += step.truth.tokens
        record.step_ends.append(self._clock.now)
        self._board.step_done(attempt.pipeline)
        self._board.expect(attempt.pipeline, attempt.outlook)
        received = tuple(sorted(self._ledger.received_by(self._clock.now).items()))
        self._samples[record.job.tenant].append(Sample(self._clock.now, received))

    # ------------------------------------------------------------ decisions

    def _plan(self) -> None:
        before = self._board.snapshot() if self._check else None
        began = time.perf_counter()
        plan = self._decide(self._board, self._policy)
        self._decision_seconds += time.perf_counter() - began
        self._decisions += 1
        for action in plan.actions:
            self._counts[type(action)] += 1
            self._do(action)
        for refusal in plan.refusals:
            self._refuse(refusal)
        self._floor.require_whole_gangs()
        if before is not None:
            self._require_legal(before, plan)

    def _require_legal(self, before: Snapshot, plan: Plan) -> None:
        wrong = check_decision(before, plan, self._policy)
        wrong += contradictions(self._board.snapshot(), self._policy)
        if wrong:
            raise Broken(f"at {self._clock.now}: {'; '.join(wrong)}")

    def _refuse(self, refusal: Refusal) -> None:
        job = refusal.job
        if refusal.pipeline is not None:
            job = self._attempts[refusal.pipeline].job.id
        if job is not None:
            self._records[job].refusal = refusal
            self._concerned[job] = None

    def _do(self, action: Action) -> None:
        """Carry out what the board already believes."""
        match action:
            case Admit():
                self._admit(action)
            case Start():
                self._start(action)
            case Resize():
                self._floor.resize(self._task(action.pipeline, action.node), action.node, action.share)
            case Yield():
                self._yield(action)
            case Merge():
                self._merge(action)
            case Wait():
                self._clock.at(action.until, Remind(action.pipeline))
                self._concerned[self._attempts[action.pipeline].job.id] = None

    def _admit(self, action: Admit) -> None:
        record = self._records[action.job]
        pipeline = next(p.id for p in self._board.pipelines.values() if p.job == action.job)
        done = len(record.step_ends)
        attempt = Attempt(record.job, record.queued, pipeline, done, self._nature, self._seed)
        self._attempts[pipeline] = self._of_job[action.job] = attempt
        record.attempts += 1
        record.refusal = None
        if record.admitted is None:
            record.admitted = self._clock.now
        for task in attempt.first():
            self._offer(task)

    def _task(self, pipeline: int, node: str) -> Task:
        task = self._attempts[pipeline].open.get(node)
        if task is None:
            raise Broken(f"{self._attempts[pipeline].job.id} does not offer {node}")
        return task

    def _start(self, action: Start) -> None:
        task = self._task(action.pipeline, action.node)
        self._floor.start(task, action.node, action.device, action.share, self._clock.now)
        task.attempt.starts(task)
        self._records[task.attempt.job.id].refusal = None
        self._concerned[task.attempt.job.id] = None

    def _yield(self, action: Yield) -> None:
        task = self._task(action.pipeline, action.node)
        task.settle(self._clock.now)
        self._floor.stop(task, action.node)
        self._concerned[task.attempt.job.id] = None

    def _merge(self, action: Merge) -> None:
        """The target takes the sources' sequences over; what followed their part of the chain is free."""
        attempt, now = self._attempts[action.pipeline], self._clock.now
        target = self._task(action.pipeline, action.target)
        sources = [self._task(action.pipeline, node) for node in action.sources]
        for task in (target, *sources):
            task.settle(now)
        chains = [(task.chain, task.whole - task.left) for task in sources]
        if target.chain is None or any(chain is None for chain, _ in chains):
            raise Broken(f"{action}: not all of them roll out")
        taken = [(chain, done) for chain, done in chains if chain is not None]
        target.do(target.chain.absorb(taken, target.whole - target.left))
        target.expected = target.seen + self._board.nodes[action.pipeline][action.target].left
        self._floor.change(target)
        for task in sources:
            self._floor.leave(task)
            self._follow(attempt, task)

    # ------------------------------------------------------------ waiting

    def _remember_waiting(self) -> None:
        now = self._clock.now
        for job in self._concerned:
            self._ledger.wait(job, now, self._waits_for(self._records[job]))
        for tenant in {self._records[job].job.tenant for job in self._concerned}:
            self._ledger.backlog(tenant, now, self._backlogged(tenant))
        self._concerned = {}

    def _waits_for(self, record: Record) -> str | None:
        """The code of why nothing of the job runs; None when something does, or it does not want to."""
        if not record.open:
            return None
        attempt = self._of_job.get(record.job.id)
        code = record.refusal.code.value if record.refusal is not None else None
        if attempt is None:
            return code or RefusalCode.NO_DEVICES.value
        tasks = dict.fromkeys(attempt.open.values())
        if not tasks or any(task.runs for task in tasks):
            return None
        if self._board.waits.get(attempt.pipeline, 0.0) > self._clock.now:
            return CHOSEN
        return code or RefusalCode.DEVICE.value

    def _backlogged(self, tenant: int) -> bool:
        return any(
            task.on_device and not task.runs
            for attempt in self._attempts.values()
            if attempt.job.tenant == tenant
            for task in attempt.open.values()
        )

    def _story(self, what: str) -> str:
        lines = [f"{self._scenario.name}, {self._policy.name}, second {self._clock.now:.3f}: {what}"]
        for record in self._records.values():
            if not record.open:
                continue
            attempt = self._of_job.get(record.job.id)
            nodes = sorted(attempt.open) if attempt is not None else "queued"
            why = f"{record.refusal.code}: {record.refusal.text}" if record.refusal else "no refusal"
            lines.append(f"{record.job.id} after {len(record.step_ends)} steps: {nodes} ({why})")
        return "\n  ".join(lines)

    # ------------------------------------------------------------ the end

    def _result(self) -> Result:
        now, ledger = self._clock.now, self._ledger
        ledger.close(now)
        capacity = self._scenario.devices * now - ledger.lost
        if abs(ledger.used + ledger.idle - capacity) > ACCOUNTING * max(1.0, capacity):
            raise Broken(f"{ledger.used} used and {ledger.idle} idle of {capacity} device-seconds")
        first = min((job.arrival for job in self._scenario.jobs), default=0.0)
        last = max((r.finished for r in self._records.values() if r.finished is not None), default=first)
        return Result(
            scenario=self._scenario.name,
            policy=self._policy.name,
            seed=self._seed,
            jobs=tuple(record.result(ledger.waits[job]) for job, record in self._records.items()),
            tenants=tuple(self._tenant(tenant) for tenant in self._scenario.tenants),
            timeline=tuple(sorted(ledger.timeline, key=lambda i: (i.start, i.device, i.pipeline, i.kind))),
            makespan=last - first,
            capacity=capacity,
            used=ledger.used,
            idle=ledger.idle,
            decisions=self._decisions,
            merges=self._counts[Merge],
            waits=self._counts[Wait],
            resizes=self._counts[Resize],
            yields=self._counts[Yield],
            prediction=tuple(
                KindError(kind, len(errors), sum(errors) / len(errors))
                for kind, errors in sorted(self._errors.items())
            ),
            decision_seconds=self._decision_seconds,
        )

    def _tenant(self, tenant: int) -> TenantResult:
        return TenantResult(
            id=tenant,
            weight=self._board.tenants[tenant].weight,
            device_seconds=self._ledger.received[tenant],
            backlogged=tuple(self._ledger.backlogged[tenant]),
            samples=tuple(self._samples[tenant]),
        )


def simulate(
    scenario: Scenario,
    policy: Policy,
    seed: int,
    check: bool = False,
    *,
    nature: Nature | None = None,
    decide: Decide = decide_by_policy,
) -> Result:
    """Run the scenario to the end of its last job.

    ``check`` judges every decision by ``invariants``. ``nature`` is where the truth comes from: the
    calibrated one where it is left out. Raises ``Stuck`` when jobs can never end, ``Broken`` when a promise
    of the simulation or of the planner does not hold.
    """
    if policy.stream:
        scenario = streamed(scenario)
    return Simulation(scenario, policy, seed, check, nature or Measured(scenario), decide).run()
