"""``python -m tests.benchmarks.control [--json F]``: what a report and a decision cost the control plane.

Four jobs share two devices. First each report, and the decision after it, is made by hand and counted: its
queries, and the milliseconds of this process's CPU. Then the real daemon leads pipelines that compute nothing
(``tests.scheduler.shell.fake``). ``shared``: as fast as they are granted, so that the control plane is all
that takes time; what CPU it and its database take for each job and step. ``apart``: a device for each job,
and ``--pause`` milliseconds in each sub-stage, so that an offer waits for nothing but its grant.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from infra.embedded import hold, postgres, sweep

JOBS, DEVICES, STEPS = 4, 2, 6
#: The first steps are left out: statements and settings are read for the first time.
WARM = 1


@dataclass
class Cost:
    """Of several calls of one kind: statements sent, and milliseconds of the thread's CPU, for each."""

    queries: list[int] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        return {
            "count": len(self.ms),
            "queries": median(self.queries),
            "most_queries": max(self.queries),
            "ms": round(median(self.ms), 2),
        }


class Meter:
    """Counts what is sent to the database while something of a name runs."""

    def __init__(self) -> None:
        self.costs: dict[str, Cost] = defaultdict(Cost)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        from django.db import connection

        sent = [0]

        def count(execute: Any, *statement: Any) -> Any:
            sent[0] += 1
            return execute(*statement)

        began = time.thread_time()
        with connection.execute_wrapper(count):
            yield
        self.costs[name].ms.append(1000 * (time.thread_time() - began))
        self.costs[name].queries.append(sent[0])

    def clear(self) -> None:
        self.costs.clear()


# ---------------------------------------------------------------- by hand


class ByHand:
    """Applies the reports of pipelines in turn, and decides after each that asks for it."""

    def __init__(self, folder: Path, meter: Meter) -> None:
        from scheduler.core.state import POLICIES
        from scheduler.shell.daemon import Daemon
        from tests import factories
        from tests.scheduler.shell.fake import FakeCluster
        from tests.scheduler.shell.shared import calibrate, jobs_over_one_base

        calibrate()
        organizations = [factories.organization() for _ in range(JOBS)]
        self.jobs = jobs_over_one_base(organizations, folder, steps=STEPS)
        self.meter = meter
        self._daemon = Daemon(FakeCluster(cpus=DEVICES), POLICIES["lookahead"])
        self._seq: dict[int, int] = defaultdict(int)
        self._nodes: dict[int, int] = defaultdict(int)

    def admit(self) -> None:
        """Let the jobs in."""
        from scheduler.shell.daemon import _register
        from scheduler.shell.touch import EVERYTHING
        from tests.scheduler.shell.fake import FakeCluster

        nodes = asyncio.run(FakeCluster(cpus=DEVICES).nodes())
        _register(nodes)
        with self.meter.of("tick: everything, four admissions"):
            self._tick(EVERYTHING)
        self.attempts = [job.attempts.get() for job in self.jobs]

    def step(self, step: int) -> None:
        """A step of each attempt, the attempts in turn."""
        from tests.scheduler.shell.fake import METRICS
        from workers.protocol import StepDone, SubStageKind

        parts = [
            (SubStageKind.PREFILL, 0, 8),
            (SubStageKind.DECODE, 1, 32),
            (SubStageKind.TAIL, 2, 15),
            (SubStageKind.TAIL, 3, 7),
        ]
        nodes: dict[int, str] = {}
        for kind, part, rows in parts:
            for attempt in self.attempts:
                offer = self._offer(attempt.pk, step, kind, part, rows)
                if part == 0:
                    self.report(attempt.pk, offer)
                else:
                    self.report(attempt.pk, self._cross(nodes[attempt.pk], offer))
                nodes[attempt.pk] = offer.node
        for attempt in self.attempts:
            self.report(attempt.pk, self._finished(nodes[attempt.pk]))
            grade = self._offer(attempt.pk, step, SubStageKind.GRADE, 1, 8)
            self.report(attempt.pk, grade, "offer, no device")
            self.report(attempt.pk, self._finished(grade.node), "finished, no device")
            offer = self._offer(attempt.pk, step, SubStageKind.UPDATE, 2, 8, gang=f"s{step}.update")
            self.report(attempt.pk, offer)
            self._until_granted(attempt.pk, offer.node)
            sync = self._offer(attempt.pk, step, SubStageKind.SYNC, 3, 8, gang=f"s{step}.sync")
            self.report(attempt.pk, self._cross(offer.node, sync))
            self.report(attempt.pk, self._finished(sync.node))
            self.report(attempt.pk, StepDone(step=step, metrics=METRICS, samples=()))

    def report(self, attempt_id: int, body: Any, name: str = "") -> None:
        from scheduler.shell.reports import reports_apply
        from workers.protocol import Report

        self._seq[attempt_id] += 1
        report = Report(attempt_id=attempt_id, seq=self._seq[attempt_id], at=time.time(), body=body)
        with self.meter.of(name or body.type):
            news = reports_apply([report], self._daemon._lore)
        assert news is not None
        if news.touch:
            with self.meter.of("tick"):
                self._tick(news.touch)

    def _tick(self, touch: Any) -> None:
        _, again, _ = self._daemon._tick("benchmark", touch)
        assert not again

    def _until_granted(self, attempt_id: int, node: str) -> None:
        """It may be better to wait; here it is not waited."""
        from backend.pool.models import SubStage
        from scheduler.shell.touch import Touch

        for _ in range(10):
            if SubStage.objects.filter(attempt=attempt_id, node=node).exclude(status="ready").exists():
                return
            self._tick(Touch(pipelines={attempt_id}))
        raise AssertionError(f"{node} of attempt {attempt_id} is not granted")

    def _offer(self, attempt_id: int, step: int, kind: Any, part: int, rows: int, **more: Any) -> Any:
        from workers.protocol import Offer

        self._nodes[attempt_id] += 1
        node = f"s{step}.w0.{kind.value}.{self._nodes[attempt_id]}"
        return Offer(node=node, step=step, worker=0, kind=kind, sequences=rows, part=part, **more)

    def _finished(self, node: str) -> Any:
        from workers.protocol import Finished

        now = time.time()
        return Finished(node=node, started_at=now - 0.001, ended_at=now, tokens=64, forwards=4)

    def _cross(self, node: str, offer: Any) -> Any:
        from workers.protocol import Crossed

        return Crossed(finished=self._finished(node), offer=offer)


def by_hand(folder: Path, steps: int = STEPS) -> dict[str, dict[str, float]]:
    """Queries and milliseconds of each kind of report, and of a decision."""
    meter = Meter()
    hand = ByHand(folder, meter)
    hand.admit()
    for step in range(steps):
        if step == WARM:
            meter.clear()
        hand.step(step)
    return {name: cost.row() for name, cost in sorted(meter.costs.items())}


# ---------------------------------------------------------------- the daemon leads


def led(folder: Path, devices: int, pause_s: float) -> dict[str, float]:
    """Latency from a step's first offer to its grant, and CPU for each job and step: that of the pipelines,
    which is little, counts too.
    """
    from tests import factories
    from tests.scheduler.shell import fake
    from tests.scheduler.shell.shared import calibrate, jobs_over_one_base
    from tests.scheduler.shell.test_daemon import drive, ended, leading
    from workers.protocol import Grant, SubStageKind

    offered: dict[tuple[int, str], float] = {}
    waited: list[float] = []
    reports = [0]

    class Outbox(fake.Outbox):
        def add(self, *bodies: Any) -> None:
            reports[0] += len(bodies)
            for body in bodies:
                # The others may be made to wait on purpose, for what computes already.
                if body.type == "offer" and body.kind is SubStageKind.PREFILL:
                    offered[self._attempt_id, body.node] = time.monotonic()
            super().add(*bodies)

    class Pipeline(fake.FakePipeline):
        async def order(self, order: Any) -> None:
            if isinstance(order, Grant) and (self.launch.attempt_id, order.node) in offered:
                began = offered.pop((self.launch.attempt_id, order.node))
                waited.append(1000 * (time.monotonic() - began))
            await super().order(order)

    async def during(pipeline: Any, offer: Any) -> None:
        await asyncio.sleep(pause_s)

    calibrate()
    organizations = [factories.organization() for _ in range(JOBS)]
    jobs_over_one_base(organizations, folder, steps=STEPS)
    cluster = fake.FakeCluster(cpus=devices, during=during)
    real = fake.Outbox, fake.FakePipeline
    fake.Outbox, fake.FakePipeline = Outbox, Pipeline
    own, theirs, began = time.process_time(), database_seconds(), time.monotonic()

    async def story() -> None:
        async with leading(cluster):
            await ended(cluster, JOBS)

    try:
        drive(story)
    finally:
        fake.Outbox, fake.FakePipeline = real
    work = JOBS * STEPS
    cpu, wall = time.process_time() - own, time.monotonic() - began
    wait_for_disconnects()
    return {
        "offer_to_grant_ms": round(median(waited), 1),
        "grants": len(waited),
        "reports_per_job_and_step": round(reports[0] / work, 1),
        "cpu_ms_per_job_and_step": round(1000 * cpu / work, 1),
        "database_cpu_ms_per_job_and_step": round(1000 * (database_seconds() - theirs) / work, 1),
        "cpu_ms_per_report": round(1000 * cpu / reports[0], 2),
        "seconds": round(wall, 2),
    }


def wait_for_disconnects() -> None:
    """What a connection took is counted once its process is gone."""
    from django.db import connection

    with connection.cursor() as cursor:
        others = 1
        while others:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            (others,) = cursor.fetchone()


def database_seconds() -> float:
    """CPU of the server's processes so far; of connections that ended as the server has counted them."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (backend,) = cursor.fetchone()
    server = int(Path(f"/proc/{backend}/stat").read_text().rpartition(")")[2].split()[1])
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, fields = stat.parent.name, stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(name) == server:
            ticks += sum(map(int, fields[11:15]))
        elif int(fields[1]) == server:
            ticks += sum(map(int, fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------- the program


@contextmanager
def database() -> Iterator[Path]:
    """A folder with a server of its own, and Django on it."""
    with tempfile.TemporaryDirectory(prefix="control-") as name:
        var = Path(name)
        os.environ["JIGSAW_VAR"] = str(var)
        os.environ["DJANGO_SETTINGS_MODULE"] = "backend.settings"
        os.environ["DATABASE_URL"] = postgres.ensure(var, durable=False)
        guard = hold.start_guard(var)
        try:
            import django

            django.setup()
            from django.core.management import call_command

            call_command("migrate", verbosity=0)
            yield var
        finally:
            sweep.everything(var)
            hold.dismiss_guard(guard)


def empty() -> None:
    """As after ``migrate``."""
    from django.core.management import call_command

    call_command("flush", interactive=False, verbosity=0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.control", description=__doc__)
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    parser.add_argument("--pause", type=float, default=50.0, help="milliseconds in each sub-stage, apart")
    parser.add_argument("--repeats", type=int, default=3, help="runs of the daemon; medians are printed")
    options = parser.parse_args(arguments)
    with database() as var:
        kinds = by_hand(var / "by-hand")
        runs: dict[str, list[dict[str, float]]] = {"shared": [], "apart": []}
        for number in range(options.repeats):
            empty()
            runs["shared"].append(led(var / f"shared-{number}", DEVICES, 0.0))
            empty()
            runs["apart"].append(led(var / f"apart-{number}", JOBS, options.pause / 1000))
    print(f"{'':34} {'count':>6} {'queries':>8} {'most':>5} {'CPU ms':>7}")
    for name, row in kinds.items():
        print(f"{name:34} {row['count']:6} {row['queries']:8} {row['most_queries']:5} {row['ms']:7.2f}")
    found = {how: {name: median(run[name] for run in of) for name in of[0]} for how, of in runs.items()}
    print(f"\n{'':34} {'shared':>8} {'apart':>8}")
    for name, value in found["shared"].items():
        print(f"{name.replace('_', ' '):34} {value:8} {found['apart'][name]:8}")
    if options.json:
        options.json.write_text(json.dumps({"kinds": kinds, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
