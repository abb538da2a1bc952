"""``make demo``: the whole product on this machine, two tenants' jobs from submission to bill.

Everything goes through the front door: files and jobs by the REST API, with a key per tenant. What is shown
at the end is what the service says, and the accounting is the ledger's own.
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import statistics
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from infra.embedded.paths import var_dir
from infra.embedded.stack import Stack
from infra.embedded.supervisor import StartFailed

MODEL = "SmolLM2-135M-Instruct"
JOBS = (("Acme Research", "exact-words"), ("Northwind Labs", "small-sums"))
MADE_BY = "make demo"
POLL_S = 1.0
#: A job that has not ended by then is said to hang.
LIMIT_S = 1800.0
PORT = int(os.environ.get("JIGSAW_PORT", "8000"))


class DemoFailed(Exception):
    """The demo cannot go on; the text says why."""


@dataclass
class Run:
    """One tenant's job, as the API tells it."""

    tenant: str
    dataset: str
    client: httpx.Client
    job: dict[str, Any]
    metrics: list[dict[str, float]] = field(default_factory=list)
    last_step: int = -1

    @property
    def over(self) -> bool:
        return self.job["status"] in {"succeeded", "failed", "cancelled"}

    def refresh(self) -> list[dict[str, float]]:
        """Ask for news; the metrics of the steps that are new."""
        path = f"/v1/fine_tuning/jobs/{self.job['id']}"
        self.job = get(self.client, path)
        after = {"after_step": self.last_step} if self.last_step >= 0 else {}
        rows = get(self.client, f"{path}/metrics", **after)["data"]
        new = [{"step": row["step"], **row["values"]} for row in rows]
        if rows:
            self.last_step = rows[-1]["step"]
            self.metrics += new
        return new


def get(client: httpx.Client, path: str, **params: Any) -> dict[str, Any]:
    return answer(client.get(path, params=params))


def answer(response: httpx.Response) -> dict[str, Any]:
    if response.is_error:
        raise DemoFailed(f"{response.request.method} {response.request.url.path}: {response.text}")
    return response.json()


def main() -> int:
    console = Console()
    var = var_dir()
    stay = sys.stdout.isatty() and os.environ.get("DEMO_EXIT") != "1"
    console.rule("[bold]Jigsaw: two tenants, one pool")
    try:
        model_ready(console, var)
        with Stack(var, port=PORT if stay else 0, models=False, console=None) as stack:
            os.environ.update(stack.env)
            console.print(f"Everything is up. Console: [bold]{stack.web_url}[/bold]")
            tell_sign_in(console, stack)
            show(console, stack, var)
            if stay:
                console.print(f"\nThe console stays up at {stack.web_url} until you press Ctrl-C.")
                stack.wait()
    except KeyboardInterrupt:
        console.print("Stopped.")
        return 0 if stay else 130
    except (DemoFailed, StartFailed, httpx.HTTPError) as error:
        console.print(f"[bold red]The demo failed:[/] {error}")
        console.print(f"The programs' logs are in {var / 'logs'}.")
        return 1
    return 0


def model_ready(console: Console, var: Path) -> None:
    from workers.models.smollm2 import ensure_smollm2

    with console.status(f"Making {MODEL} ready (once) …"):
        ensure_smollm2(Path(os.environ.get("JIGSAW_MODELS_DIR", var / "models")))


def tell_sign_in(console: Console, stack: Stack) -> None:
    sign_in = stack.sign_in()
    if sign_in is not None:
        console.print(f"Sign in as [bold]{sign_in.email}[/bold], password [bold]{sign_in.password}[/bold]")


def show(console: Console, stack: Stack, var: Path) -> None:
    """Submit, watch, and report; raises ``DemoFailed`` when a job does not succeed."""
    began = datetime.now(UTC)
    folder = var / "demo"
    with tenants(stack) as clients:
        for client in clients.values():
            cancel_leftovers(client)
        runs = [submit(clients[tenant], tenant, dataset) for tenant, dataset in JOBS]
        for run in runs:
            url = f"{stack.web_url}/jobs/{run.job['id']}"
            console.print(f"{run.tenant}: {run.dataset} → {url}", soft_wrap=True)
        watch(console, runs)
        report = {
            "jobs": [job_report(run, folder) for run in runs],
            "accounting": accounting_report(began),
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    tell(console, report, folder)
    wrong = [job for job in report["jobs"] if job["status"] != "succeeded"]
    if wrong:
        reasons = "; ".join(f"{run.tenant}: {run.job['status_reason']}" for run in runs)
        raise DemoFailed(f"{len(wrong)} of {len(runs)} jobs did not succeed: {reasons}")
    if report["accounting"]["difference_micro_usd"] != 0:
        raise DemoFailed("the books do not add up")


@contextmanager
def tenants(stack: Stack) -> Iterator[dict[str, httpx.Client]]:
    """A client per tenant, with a key of its own that is revoked at the end."""
    import django

    django.setup()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    from backend.tenants.access import Actor
    from backend.tenants.models import Organization, Role
    from backend.tenants.services import api_key_create, api_key_revoke

    clients, keys = {}, []
    try:
        for name, _ in JOBS:
            organization = Organization.objects.get(name=name)
            owner = organization.memberships.filter(role=Role.OWNER).select_related("user").first().user
            actor = Actor(organization=organization, role=Role.OWNER, user=owner)
            key, secret = api_key_create(actor=actor, name="demo")
            keys.append((actor, key))
            clients[name] = httpx.Client(
                base_url=stack.web_url, headers={"Authorization": f"Bearer {secret}"}, timeout=30
            )
        yield clients
    finally:
        for client in clients.values():
            client.close()
        for actor, key in keys:
            api_key_revoke(actor=actor, key=key)


def cancel_leftovers(client: httpx.Client) -> None:
    """Jobs of a demo that was interrupted would take their turns beside the new ones."""
    for status in ("validating_files", "queued", "running"):
        for job in get(client, "/v1/fine_tuning/jobs", status=status, limit=100)["data"]:
            if job["metadata"].get("made_by") == MADE_BY:
                answer(client.post(f"/v1/fine_tuning/jobs/{job['id']}/cancel"))


def submit(client: httpx.Client, tenant: str, dataset: str) -> Run:
    """A LoRA GRPO job with the dataset's own grader and recommended settings."""
    body = {
        "model": MODEL,
        "training_file": dataset,
        "suffix": dataset,
        "seed": 7,
        "metadata": {"made_by": MADE_BY},
    }
    headers = {"Idempotency-Key": f"demo-{tenant}-{time.time_ns()}"}
    job = answer(client.post("/v1/fine_tuning/jobs", json=body, headers=headers))
    return Run(tenant, dataset, client, job)


# ---------------------------------------------------------------- watching


def watch(console: Console, runs: list[Run]) -> None:
    """Follow all jobs to their end: bars on a terminal, a line per step elsewhere."""
    limit = time.monotonic() + LIMIT_S
    bars = Bars(runs) if console.is_terminal else None
    with Live(bars.view, console=console, refresh_per_second=4) if bars else _nothing():
        while not all(run.over for run in runs):
            if time.monotonic() > limit:
                raise DemoFailed(f"the jobs did not end within {LIMIT_S / 60:.0f} minutes")
            time.sleep(POLL_S)
            for number, run in enumerate(runs):
                new = run.refresh()
                if bars:
                    bars.update(number, run)
                else:
                    for values in new:
                        console.print(step_line(run, values), highlight=False)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def step_line(run: Run, values: dict[str, float]) -> str:
    return (
        f"{run.tenant:<15} step {values['step'] + 1:>3.0f}/{run.job['progress']['steps']}"
        f"  reward {values['reward']:.3f}  {values['tokens_per_s']:6.1f} tokens/s"
        f"  {dollars(run.job['cost']['micro_usd'])}"
    )


def dollars(micro_usd: int) -> str:
    return f"${micro_usd / 1e6:.6f}"


class Bars:
    """A progress bar per job, with its reward, speed and cost so far."""

    def __init__(self, runs: list[Run]) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.fields[tenant]:<15}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            TimeElapsedColumn(),
        )
        self._tasks = [
            self._progress.add_task("", total=run.job["progress"]["steps"], tenant=run.tenant, said="")
            for run in runs
        ]
        self.view = Group(self._progress)

    def update(self, number: int, run: Run) -> None:
        self._progress.update(
            self._tasks[number], completed=run.job["progress"]["steps_done"], said=self._said(run)
        )

    def _said(self, run: Run) -> str:
        if not run.metrics:
            return run.job["queue"]["reason"] or run.job["status"]
        last = run.metrics[-1]
        cost = dollars(run.job["cost"]["micro_usd"])
        return f"reward {last['reward']:.3f}  {last['tokens_per_s']:.0f} tokens/s  {cost}"


# ---------------------------------------------------------------- reporting


def job_report(run: Run, folder: Path) -> dict[str, Any]:
    rewards = [values["reward"] for values in run.metrics]
    quarter = max(1, len(rewards) // 4)
    seconds = sum(values["seconds"] for values in run.metrics)
    tokens = int(sum(values["tokens"] for values in run.metrics))
    mismatches = [values["mismatch"] for values in run.metrics if "mismatch" in values]
    return {
        "tenant": run.tenant,
        "job": run.job["id"],
        "dataset": run.dataset,
        "status": run.job["status"],
        "reward_first_quarter": statistics.fmean(rewards[:quarter]) if rewards else None,
        "reward_last_quarter": statistics.fmean(rewards[-quarter:]) if rewards else None,
        "steps": len(rewards),
        "tokens": tokens,
        "tokens_per_s": tokens / seconds if seconds else 0.0,
        "mismatch_mean": statistics.fmean(mismatches) if mismatches else None,
        "device_seconds": device_seconds(run),
        "cost_micro_usd": run.job["cost"]["micro_usd"],
        "alone_micro_usd": alone_micro_usd(run),
        "adapter_path": download(run, folder),
    }


def device_seconds(run: Run) -> dict[str, float]:
    from backend.jobs.models import Job
    from backend.metering.selectors import job_cost

    costs = job_cost(Job.objects.get(public_id=run.job["id"]))
    return {kind: cost["device_seconds"] for kind, cost in costs.items() if kind != "total"}


def alone_micro_usd(run: Run) -> int:
    """What the job would have cost under policy ``exclusive``: an estimate from what was measured."""
    from backend.jobs.models import Job
    from backend.metering.selectors import job_alone_micro_usd

    return job_alone_micro_usd(Job.objects.get(public_id=run.job["id"]))


def saving(job: dict[str, Any]) -> str:
    alone = job["alone_micro_usd"]
    return f"{1 - job['cost_micro_usd'] / alone:.0%}" if alone else "–"


def download(run: Run, folder: Path) -> str | None:
    """Fetch the final checkpoint through the API and unpack it; the adapter's folder."""
    path = f"/v1/fine_tuning/jobs/{run.job['id']}/checkpoints"
    final = [row for row in get(run.client, path)["data"] if row["final"]]
    if not final:
        return None
    content = run.client.get(f"{path}/{final[0]['id']}/content")
    target = folder / "adapters" / run.tenant.lower().replace(" ", "-")
    shutil.rmtree(target, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(content.raise_for_status().content)) as archive:
        archive.extractall(target, filter="data")
    return str(next(target.rglob("adapter_config.json")).parent)


def accounting_report(began: datetime) -> dict[str, int]:
    """Read every meter now, and compare capacity with what was booked since the demo began."""
    from backend.metering.selectors import accounting
    from backend.metering.services import pool_meter

    pool_meter(datetime.now(UTC))
    return asdict(accounting(began))


def tell(console: Console, report: dict[str, Any], folder: Path) -> None:
    names = [f"{job['tenant']}\n{job['dataset']}" for job in report["jobs"]]
    table = Table("", *names, title="What the two tenants got", title_justify="left")
    for title, value in ROWS:
        table.add_row(title, *(value(job) for job in report["jobs"]))
    kinds = sorted({kind for job in report["jobs"] for kind in job["device_seconds"]})
    for kind in kinds:
        table.add_row(
            f"device-seconds, {kind}",
            *(f"{job['device_seconds'].get(kind, 0):.1f}" for job in report["jobs"]),
        )
    console.print(table)
    books = report["accounting"]
    parts = " + ".join(
        f"{part} {dollars(books[f'{part}_micro_usd'])}" for part in ("tenants", "idle", "waste")
    )
    console.print(f"Accounting: capacity {dollars(books['capacity_micro_usd'])} = {parts};")
    console.print(f"difference {books['difference_micro_usd']} micro-dollars.")
    for job in report["jobs"]:
        console.print(f"{job['tenant']}'s adapter: {job['adapter_path']}", soft_wrap=True)
    console.print(f"The same as JSON: {folder / 'report.json'}")


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


ROWS = (
    ("status", lambda job: job["status"]),
    ("steps", lambda job: str(job["steps"])),
    ("reward, first quarter", lambda job: number(job["reward_first_quarter"])),
    ("reward, last quarter", lambda job: number(job["reward_last_quarter"])),
    ("tokens sampled", lambda job: f"{job['tokens']:,}"),
    ("tokens/s", lambda job: number(job["tokens_per_s"], 1)),
    ("engine/trainer mismatch", lambda job: number(job["mismatch_mean"], 4)),
    ("cost", lambda job: dollars(job["cost_micro_usd"])),
    ("alone, exclusive", lambda job: dollars(job["alone_micro_usd"])),
    ("saved by sharing", saving),
)


if __name__ == "__main__":
    sys.exit(main())
