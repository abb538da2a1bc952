"""What every decision and every report reads, as SQL written out.

Putting such a query together takes Django several times as long as the server takes to answer it, and the
processors are those that train. A column that is not named here is read when it is asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from backend.jobs.models import Attempt, Job
from backend.jobs.states import ATTEMPT_TERMINAL
from backend.pool.models import Allotment, SubStage
from backend.tenants.models import Organization

OVER = [status.value for status in ATTEMPT_TERMINAL]

ATTEMPTS = """
SELECT id, job_id, number, status, home, step_seconds, step_began_at, wait_until FROM jobs_attempt
WHERE status <> ALL(%s) ORDER BY id
"""
#: The weaker lock: rows that point to an attempt may still be written meanwhile.
RUNNING = """
SELECT id, job_id, number, status, home, step_seconds, step_began_at, wait_until FROM jobs_attempt
WHERE id = ANY(%s) AND status IN ('starting', 'running') ORDER BY id FOR NO KEY UPDATE
"""
JOBS = """
SELECT id, public_id, organization_id, status, created_at, priority, devices, weights_key, weights_bytes,
    run_bytes, steps_done, wait_code, wait_text, ahead
FROM jobs_job WHERE id = ANY(%s)
"""
ORGANIZATIONS = (
    "SELECT id, weight, service, max_devices FROM tenants_organization WHERE id = ANY(%s) ORDER BY id"
)
OPEN = """
SELECT id, attempt_id, job_id, node, step, worker, kind, sequences, part, gang, early, yielded, "left",
    cached_tokens, status, device_id, share, offered_at, granted_at
FROM pool_substage WHERE attempt_id = ANY(%s) AND status IN ('ready', 'granted') ORDER BY id
"""
ALLOTMENTS = "SELECT * FROM pool_allotment WHERE substage_id = ANY(%s) ORDER BY start"
STEP = "SELECT * FROM pool_substage WHERE attempt_id = %s AND step = %s ORDER BY ended_at, id"
#: In the small index of those that are not over.
COMPUTING = 'SELECT * FROM pool_allotment WHERE device_id = %s AND "end" IS NULL ORDER BY substage_id'
SUBSTAGES = "SELECT * FROM pool_substage WHERE id = ANY(%s)"


def live_attempts() -> list[Attempt]:
    """Those that are not over, with their jobs, oldest first."""
    return _with_jobs(Attempt.objects.raw(ATTEMPTS, [OVER]))


def running_attempts_locked(keys: Collection[int]) -> list[Attempt]:
    """Those of the attempts that may be given something, with their jobs; locked in order of their keys."""
    return _with_jobs(Attempt.objects.raw(RUNNING, [list(keys)])) if keys else []


def _with_jobs(found: Iterable[Attempt]) -> list[Attempt]:
    attempts = list(found)
    jobs = {job.pk: job for job in Job.objects.raw(JOBS, [[attempt.job_id for attempt in attempts]])}
    for attempt in attempts:
        attempt.job = jobs[attempt.job_id]
    return attempts


def organizations(keys: Collection[int]) -> Iterable[Organization]:
    return Organization.objects.raw(ORGANIZATIONS, [list(keys)]) if keys else ()


def open_substages(attempts: Collection[int]) -> list[SubStage]:
    """Those of the attempts that wait or run, in the order in which they were offered."""
    return list(SubStage.objects.raw(OPEN, [list(attempts)])) if attempts else []


def step_substages(attempt_id: int, step: int) -> list[SubStage]:
    """In the order in which they ended."""
    return list(SubStage.objects.raw(STEP, [attempt_id, step]))


def allotments(substages: Collection[int]) -> Iterable[Allotment]:
    """In order of time."""
    return Allotment.objects.raw(ALLOTMENTS, [list(substages)]) if substages else ()


def substages(keys: Collection[int]) -> Mapping[int, SubStage]:
    return {row.pk: row for row in SubStage.objects.raw(SUBSTAGES, [list(keys)])} if keys else {}


def computing(device_id: int) -> list[Allotment]:
    """The allotments on a device that are not over, with their sub-stages."""
    rows = list(Allotment.objects.raw(COMPUTING, [device_id]))
    of = substages([row.substage_id for row in rows])
    for row in rows:
        row.substage = of[row.substage_id]
    return rows
