"""What packing tenants together gains, on real processes: whole services, real training, every policy.

    python -m tests.benchmarks.multiplex [--mixes a,b] [--policies exclusive,lookahead] [--repeats 1]
                                         [--json F]

One device of all this machine's threads. Each policy runs the same jobs to the same steps, the policies in
turn and all of that ``--repeats`` times; medians are printed, and ratios to ``exclusive``. ``alone`` is one
job of the mix with the pool to itself, against which a step's latency is compared. A run lasts from the first
job's admission to the last one's end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from infra.embedded import paths
from infra.embedded.stack import Stack
from tests.benchmarks.mixes import HALF, MIXES, MODEL, Task, make_half
from tests.e2e.service import OVER, Service, Tenant
from workers.models.smollm2 import ensure_smollm2

POLICIES = (
    "exclusive",
    "phase",
    "greedy",
    "lookahead",
    "lookahead-no-fuse",
    "lookahead-no-merge",
    "lookahead-no-shares",
    "lookahead-no-wait",
)
STEPS = {"a": 4, "b": 3, "c": 4, "d": 4}
#: A run that takes longer is said to hang.
LIMIT_S = 1800.0
#: Of a run's numbers those that are lists, a value for each job and step.
PER_STEP = ("rewards", "lengths")

#: Read in a process of the service: how long the jobs took, how full the pool was, whether the books add up.
READ = """
import json
from datetime import datetime, UTC
from backend.jobs.models import Job
from backend.metering.selectors import accounting
from backend.metering.services import pool_meter
from backend.pool.models import Device, SubStage
pool_meter(datetime.now(UTC))
jobs = list(Job.objects.filter(public_id__in={jobs}))
began, ended = min(job.started_at for job in jobs), max(job.finished_at for job in jobs)
runs = SubStage.objects.filter(started_at__lt=ended, ended_at__gt=began, device__isnull=False)
spans = sorted(runs.values_list("started_at", "ended_at", "device"))
busy, reached = 0.0, {{}}
for start, end, device in spans:
    start, end = max(start, reached.get(device, began)), min(end, ended)
    busy += max(0.0, (end - start).total_seconds())
    reached[device] = max(end, reached.get(device, began))
seconds = (ended - began).total_seconds()
print(json.dumps({{
    "seconds": seconds,
    "idle_share": 1 - busy / (seconds * Device.objects.count()),
    "migrations": SubStage.objects.filter(job__in=jobs).exclude(moves_to="").count(),
    "difference_micro_usd": accounting().difference_micro_usd,
}}))
"""


class Bench:
    """One ``var/`` for all runs, so that what was calibrated and loaded is the same for every policy."""

    def __init__(self, var: Path, threads: int, devices: int, console: Console) -> None:
        self.var = var
        self.console = console
        self.models = Path(os.environ.get("JIGSAW_MODELS_DIR", paths.var_dir() / "models"))
        os.environ.update(
            JIGSAW_MODELS_DIR=str(self.models),
            JIGSAW_CPU_DEVICE_THREADS=str(threads),
        )
        self._cpus = threads * devices

    def run(self, policy: str, tasks: Sequence[Task]) -> dict[str, Any]:
        """The tasks, submitted together by a tenant each, to their ends."""
        os.environ["JIGSAW_POLICY"] = policy
        with Stack(self.var, port=0, cpus=self._cpus, models=False, console=None) as stack:
            service = Service(stack)
            service.manage("model_add", HALF, str(make_half(self.models / MODEL, self.models / HALF)))
            tenants = [service.tenant(f"{task.name} {time.time_ns()}") for task in tasks]
            self._warm_up(tenants, tasks)
            bodies = [body_of(tenant, task) for tenant, task in zip(tenants, tasks, strict=True)]
            jobs = [tenant.submit(**body) for tenant, body in zip(tenants, bodies, strict=True)]
            self._finish(list(zip(tenants, jobs, strict=True)))
            steps = [tenant.listed(job, "metrics") for tenant, job in zip(tenants, jobs, strict=True)]
            read = json.loads(service.python(READ.format(jobs=jobs)))
            states = [tenant.job(job) for tenant, job in zip(tenants, jobs, strict=True)]
        return summary(tasks, states, steps, read["seconds"]) | read

    def _warm_up(self, tenants: Sequence[Tenant], tasks: Sequence[Task]) -> None:
        """Weights are loaded before the clock starts: one step of each kind of job."""
        seen: dict[str, tuple[Tenant, str]] = {}
        for tenant, task in zip(tenants, tasks, strict=True):
            settings = task.body["rl"]
            key = f"{task.body['model']} {settings.get('tuning')}"
            if key not in seen:
                body = body_of(tenant, task)
                body["rl"] = settings | {"steps": 1, "mode": {"type": "sync"}}
                seen[key] = tenant, tenant.submit(**body)
        self._finish(list(seen.values()))

    def _finish(self, jobs: Sequence[tuple[Tenant, str]]) -> list[dict[str, Any]]:
        limit = time.monotonic() + LIMIT_S
        while True:
            states = [tenant.job(job) for tenant, job in jobs]
            if all(state["status"] in OVER for state in states):
                break
            if time.monotonic() > limit:
                raise SystemExit(f"not over within {LIMIT_S:.0f} s: {states}")
            time.sleep(0.5)
        for state in states:
            if state["status"] != "succeeded":
                raise SystemExit(f"{state['id']}: {state['status']}: {state['status_reason']}")
        return states


def body_of(tenant: Tenant, task: Task) -> dict[str, Any]:
    return task.body | {"training_file": tenant.upload(list(task.rows))}


def summary(
    tasks: Sequence[Task],
    states: Sequence[dict[str, Any]],
    steps: Sequence[list[dict[str, Any]]],
    seconds: float,
) -> dict[str, Any]:
    tokens = sum(row["values"]["tokens"] for rows in steps for row in rows)
    return {
        "tokens_per_s": tokens / seconds,
        "step_s": {
            task.name: statistics.median(row["values"]["seconds"] for row in rows)
            for task, rows in zip(tasks, steps, strict=True)
        },
        "rewards": [[row["values"]["reward"] for row in rows] for rows in steps],
        "lengths": [[row["values"]["completion_length"] for row in rows] for rows in steps],
        "waiting": statistics.fmean(row["values"].get("waiting", 0.0) for rows in steps for row in rows),
        "cost_micro_usd": {
            task.name: state["cost"]["micro_usd"] for task, state in zip(tasks, states, strict=True)
        },
    }


def medians(runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Of each number over the repeats."""
    runs = list(runs)

    def middle(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: middle([value[key] for value in values]) for key in values[0]}
        return statistics.median(values)

    return {name: middle([run[name] for run in runs]) for name in runs[0] if name not in PER_STEP}


def compared(
    found: dict[str, dict[str, Any]], alone: dict[str, float], alone_cost: dict[str, float]
) -> dict[str, dict[str, Any]]:
    """Each policy against ``exclusive`` and against every job alone."""
    base = found.get("exclusive")
    rows = {}
    for policy, run in found.items():
        latency = {name: seconds / alone[name] for name, seconds in run["step_s"].items()}
        rows[policy] = {
            "ratio_to_exclusive": run["tokens_per_s"] / base["tokens_per_s"] if base else None,
            "tokens_per_s": run["tokens_per_s"],
            "step_latency_increase": statistics.fmean(latency.values()),
            "step_latency_increase_worst": max(latency.values()),
            "idle_share": run["idle_share"],
            "migrations": run["migrations"],
            "waiting": run["waiting"],
            "cost_per_job": statistics.fmean(run["cost_micro_usd"].values()),
            "cost_to_alone": {name: cost / alone_cost[name] for name, cost in run["cost_micro_usd"].items()},
            "difference_micro_usd": run["difference_micro_usd"],
            "seconds": run["seconds"],
        }
    return rows


def alone(bench: Bench, tasks: Sequence[Task]) -> tuple[dict[str, float], dict[str, float]]:
    """Each different job with the pool to itself: its step's seconds and its cost."""
    seen: dict[str, dict[str, Any]] = {}
    for task in tasks:
        key = json.dumps([task.body | {"seed": 0}, task.rows], sort_keys=True)
        if key not in seen:
            bench.console.print(f"  alone: {task.name} …", highlight=False)
            seen[key] = bench.run("exclusive", [task]) | {"name": task.name}
        found = seen[key]
        seen[task.name] = found
    steps = {task.name: seen[task.name]["step_s"][seen[task.name]["name"]] for task in tasks}
    costs = {task.name: seen[task.name]["cost_micro_usd"][seen[task.name]["name"]] for task in tasks}
    return steps, costs


def table(mix: str, rows: dict[str, dict[str, Any]]) -> Table:
    shown = Table(title=f"mix {mix}", title_justify="left")
    for name in (
        "policy",
        "tokens/s",
        "ratio",
        "latency ×",
        "worst ×",
        "idle",
        "waiting",
        "moved",
        "cost/job",
    ):
        shown.add_column(name, justify="left" if name == "policy" else "right")
    for policy, row in rows.items():
        ratio = row["ratio_to_exclusive"]
        shown.add_row(
            policy,
            f"{row['tokens_per_s']:.1f}",
            "–" if ratio is None else f"{ratio:.2f}",
            f"{row['step_latency_increase']:.2f}",
            f"{row['step_latency_increase_worst']:.2f}",
            f"{row['idle_share']:.0%}",
            f"{row['waiting']:.0%}",
            f"{row['migrations']:.0f}",
            f"{row['cost_per_job']:,.0f} µ$",
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mixes", default=",".join(MIXES))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="steps of every job (default: by mix)")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of one device")
    parser.add_argument("--var", type=Path, help="keep the service's files there")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    asked = parser.parse_args(arguments)
    console = Console()
    ensure_smollm2(Path(os.environ.get("JIGSAW_MODELS_DIR", paths.var_dir() / "models")))
    report: dict[str, Any] = {"devices": asked.devices, "threads": asked.threads, "mixes": {}}
    with tempfile.TemporaryDirectory(prefix="multiplex-") as folder:
        bench = Bench(asked.var or Path(folder) / "var", asked.threads, asked.devices, console)
        for mix in asked.mixes.split(","):
            tasks = MIXES[mix](asked.steps or STEPS[mix])
            runs: dict[str, list[dict[str, Any]]] = {policy: [] for policy in asked.policies.split(",")}
            steps, costs = alone(bench, tasks)
            for repeat in range(asked.repeats):
                for policy, made in runs.items():
                    console.print(f"  mix {mix}, {policy}, run {repeat + 1} …", highlight=False)
                    made.append(bench.run(policy, tasks))
            rows = compared({policy: medians(made) for policy, made in runs.items()}, steps, costs)
            report["mixes"][mix] = rows
            console.print(table(mix, rows))
            if asked.json:
                asked.json.write_text(json.dumps(report, indent=2) + "\n")
    wrong = [
        f"mix {mix}, {policy}: the books differ by {row['difference_micro_usd']} micro-dollars"
        for mix, rows in report["mixes"].items()
        for policy, row in rows.items()
        if row["difference_micro_usd"]
    ]
    for text in wrong:
        console.print(f"[bold red]{text}[/]")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
