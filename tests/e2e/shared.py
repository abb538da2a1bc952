"""What the database says of jobs that ran together: who shared what, and whether it was paid."""

from __future__ import annotations

import json
from typing import Any

from tests.e2e.service import Service

READ = """
import json
from backend.pool.models import Allotment, SubStage
from scheduler.core.state import ROLLOUT

job = {job!r}
rows = Allotment.objects.filter(end__isnull=False).select_related("substage__job")
own = [row for row in rows if row.substage.job.public_id == job]
others = [row for row in rows if row.substage.job.public_id != job]
rolling = {{kind.value for kind in ROLLOUT}}

def beside(row):
    return [o for o in others if o.device_id == row.device_id and o.start < row.end and row.start < o.end]

def fused(row):
    divided = row.part_ppm < row.share * 1_000_000 - 1
    same = any(other.substage.slot == row.substage.slot for other in beside(row))
    return row.substage.kind in rolling and divided and same

def coran(row):
    return row.share < 1 and any(
        other.share < 1 and other.substage.slot != row.substage.slot for other in beside(row)
    )

moves = SubStage.objects.filter(job__public_id=job).exclude(moves_to="")
print(json.dumps({{
    "fused": sorted({{row.substage.node for row in own if fused(row)}}),
    "coran": sorted({{row.substage.node for row in own if coran(row)}}),
    "merged": sorted(moves.values_list("node", flat=True)),
}}))
"""

ALONE = """
from backend.jobs.models import Job
from backend.metering.selectors import job_alone_micro_usd
print(job_alone_micro_usd(Job.objects.get(public_id={job!r})))
"""

ACCOUNTING = """
import dataclasses, json
from datetime import UTC, datetime
from backend.metering.selectors import accounting
from backend.metering.services import pool_meter
pool_meter(datetime.now(UTC))
print(json.dumps(dataclasses.asdict(accounting())))
"""


def shared(service: Service, job: str) -> dict[str, list[str]]:
    """The job's sub-stages that decoded in one batch with another job's (``fused``), that computed on a part
    of a device beside another's (``coran``), and whose sequences moved to another device (``merged``).
    """
    return json.loads(service.python(READ.format(job=job)))


def alone_micro_usd(service: Service, job: str) -> int:
    """What the service says that the job would have cost with its devices to itself, at the same pace."""
    return int(service.python(ALONE.format(job=job)))


def accounting(service: Service) -> dict[str, Any]:
    return json.loads(service.python(ACCOUNTING))
