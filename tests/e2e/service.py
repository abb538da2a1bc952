"""A whole running service, spoken to as a tenant does: over HTTP, with a key."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx

from infra.embedded import processes
from infra.embedded.stack import Stack
from workers.protocol import Calibration, Rates

logging.getLogger("httpx").setLevel(logging.WARNING)

LIMIT_S = 120.0
OVER = {"succeeded", "failed", "cancelled"}

#: Devices as tests want them, the same on every machine: half of one does almost what the whole does, so
#: that sharing gains; the last sequences of a step spoil the training beside them, so that to gather them
#: gains too.
SHARED = Calibration(
    shares=(0.5, 1.0),
    alone={
        "prefill": (1.2, 1.0),
        "decode": (1.1, 1.0),
        "tail": (1.05, 1.0),
        "thin": (1.0, 1.0),
        "logprob": (1.2, 1.0),
        "update": (1.2, 1.0),
        "sync": (1.0, 1.0),
    },
    beside={"update|thin": 1.6, "logprob|thin": 1.6, "thin|update": 1.2, "thin|logprob": 1.2},
    saturation_batch=64,
    rates=Rates(
        prefill_s=3e-5, decode_floor_s=4e-3, decode_row_s=5e-5, logprob_s=5e-5, update_s=2e-4, sync_s=0.02
    ),
    parameters=600_000,
    source="made up by a test",
)


@dataclass
class Tenant:
    """An organization, by one of its keys."""

    name: str
    http: httpx.Client

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        return self.http.get(path, params=params).raise_for_status().json()

    def upload(self, rows: list[dict[str, Any]]) -> str:
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        files = {"file": ("rows.jsonl", content)}
        made = self.http.post("/v1/files", files=files, data={"purpose": "fine-tune"})
        return made.raise_for_status().json()["id"]

    def submit(self, **body: Any) -> str:
        return self.http.post("/v1/fine_tuning/jobs", json=body).raise_for_status().json()["id"]

    def job(self, job: str) -> dict[str, Any]:
        return self.get(f"/v1/fine_tuning/jobs/{job}")

    def listed(self, job: str, what: str, **params: Any) -> list[dict[str, Any]]:
        return self.get(f"/v1/fine_tuning/jobs/{job}/{what}", **params)["data"]

    def events(self, job: str) -> list[dict[str, Any]]:
        """All events, oldest first."""
        found: list[dict[str, Any]] = []
        while page := self.listed(
            job, "events", order="asc", limit=100, after=found[-1]["id"] if found else 0
        ):
            found += page
        return found

    def finish(self, job: str) -> dict[str, Any]:
        """The job once it is over."""
        return until(lambda: self.job(job), lambda state: state["status"] in OVER, f"{job} is over")

    def adapter(self, job: str, folder: Path, step: int | None = None) -> Path:
        """Download and unpack the checkpoint after so many steps, or the final one; the adapter's folder."""
        rows = self.listed(job, "checkpoints")
        (wanted,) = (row for row in rows if (row["final"] if step is None else row["step_number"] == step))
        path = f"/v1/fine_tuning/jobs/{job}/checkpoints/{wanted['id']}/content"
        content = self.http.get(path).raise_for_status().content
        with tarfile.open(fileobj=BytesIO(content)) as archive:
            archive.extractall(folder, filter="data")
        return next(folder.rglob("adapter_config.json")).parent


def until(read: Callable[[], Any], right: Callable[[Any], bool], what: str) -> Any:
    """Ask again and again until the answer is right, within a limit."""
    limit = time.monotonic() + LIMIT_S
    while not right(answer := read()):
        if time.monotonic() > limit:
            raise AssertionError(f"not within {LIMIT_S:.0f} s: {what}; last: {answer}")
        time.sleep(0.02)
    return answer


class Service:
    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    @property
    def url(self) -> str:
        return self._stack.web_url

    def tenant(self, name: str) -> Tenant:
        """A new organization with one owner and one key."""
        secret = self.python(
            "from backend.tenants.models import Role\n"
            "from backend.tenants.services import api_key_issue, organization_create\n"
            f"organization = organization_create(name={name!r})\n"
            "print(api_key_issue(organization=organization, name='test', role=Role.MEMBER)[1])\n"
        )
        headers = {"Authorization": f"Bearer {secret}"}
        return Tenant(name, httpx.Client(base_url=self.url, headers=headers, timeout=30))

    def python(self, code: str) -> str:
        """What an operator's shell on the service's machine prints."""
        return self._run("-c", f"import django\ndjango.setup()\n{code}")

    def calibrate(self, model: str, values: Calibration = SHARED) -> None:
        """Store the values as if they had been measured on the service's devices with that model."""
        self.python(
            "from datetime import UTC, datetime\n"
            "from backend.pool.models import Device\n"
            "from scheduler.shell.calibration import calibration_store\n"
            "from workers.protocol import Calibration\n"
            f"values = Calibration.model_validate_json({values.model_dump_json()!r})\n"
            "device = Device.objects.first()\n"
            f"calibration_store(device=device, model={model!r}, values=values, now=datetime.now(UTC))\n"
        )

    def manage(self, *arguments: str) -> str:
        return self._run("manage.py", *arguments)

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=self._stack.env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def kill(self, pattern: str) -> int:
        """``kill -9`` every process of this service whose command line matches; how many."""
        ray = processes.recall(self._stack.var / "run" / "ray.pid")
        scheduler = processes.recall(self._stack.var / "run" / "scheduler.pid")
        ours = {process.pid for root in (ray, scheduler) if root for process in processes.family(root)}
        doomed = [pid for pid in ours if re.search(pattern, processes.command_line(pid))]
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        return len(doomed)
