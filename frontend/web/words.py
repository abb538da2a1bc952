"""How rows read to a person: statuses, amounts, durations. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from backend.jobs.models import Event, Job
from backend.jobs.states import JOB_TERMINAL, REASON_TEXT, JobStatus, Reason


@dataclass(frozen=True)
class StatusWord:
    """``tone`` names a colour of the stylesheet."""

    label: str
    tone: str
    live: bool


STATUS_WORDS = {
    JobStatus.VALIDATING: StatusWord("Checking data", "info", True),
    JobStatus.QUEUED: StatusWord("Queued", "warn", True),
    JobStatus.RUNNING: StatusWord("Running", "info", True),
    JobStatus.SUCCEEDED: StatusWord("Succeeded", "good", False),
    JobStatus.FAILED: StatusWord("Failed", "bad", False),
    JobStatus.CANCELLED: StatusWord("Cancelled", "calm", False),
}


def is_over(job: Job) -> bool:
    return JobStatus(job.status) in JOB_TERMINAL


def why(job: Job) -> str:
    """The true reason of the job's state, in one sentence; empty when the status says it all."""
    status = JobStatus(job.status)
    if status in {JobStatus.QUEUED, JobStatus.RUNNING} and job.wait_text:
        return job.wait_text
    if status is JobStatus.QUEUED and job.ahead:
        return f"{job.ahead} ahead"
    if status is JobStatus.FAILED or (status is JobStatus.QUEUED and job.reason != Reason.DATA_ACCEPTED):
        return REASON_TEXT[Reason(job.reason)].format(detail=job.detail)
    return ""


def title(job: Job) -> str:
    return job.name or job.spec.get("suffix") or job.public_id


def data_name(job: Job) -> str:
    """What the job trains on, as its owner calls it."""
    if job.dataset is not None:
        return job.dataset.title
    return job.training_file.filename if job.training_file else ""


def percent_done(job: Job) -> float:
    return round(100 * job.steps_done / job.steps, 1) if job.steps else 0.0


def seconds_left(job: Job, seconds_per_step: float | None) -> float | None:
    """At the pace of the recent steps, waiting included; None until the job runs and has a pace."""
    if job.status != JobStatus.RUNNING or not seconds_per_step:
        return None
    return max(0, job.steps - job.steps_done) * seconds_per_step


def elapsed_seconds(job: Job, now: datetime) -> float | None:
    if job.started_at is None:
        return None
    return ((job.finished_at or now) - job.started_at).total_seconds()


#: Seconds in a unit, and in the next smaller one that is told with it.
DURATIONS = ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


def duration(seconds: float | None) -> str:
    """``45 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    if seconds is None:
        return "–"
    whole = round(seconds)
    for size, unit, below, below_unit in (
        (86_400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {unit} {rest} {below_unit}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"


def usd(micro_usd: int) -> str:
    """Micro-dollars to a person: the smaller the amount, the more decimals, down to the ledger's own."""
    sign, amount = ("-" if micro_usd < 0 else ""), abs(micro_usd)
    if amount >= 10_000_000:
        return f"{sign}${amount / 1_000_000:,.2f}"
    if amount >= 10_000 or amount == 0:
        return f"{sign}${amount / 1_000_000:.4f}"
    return f"{sign}${amount / 1_000_000:.6f}"


def ago(moment: datetime | None, now: datetime) -> str:
    if moment is None:
        return "–"
    seconds = (now - moment).total_seconds()
    if seconds < 10:
        return "just now"
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{int(seconds)} s ago"


def compact(number: float | None) -> str:
    """``950``, ``12.3k``, ``4.56M``."""
    if number is None:
        return "–"
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def size(count: int) -> str:
    """Bytes in decimal units."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"


def reading(value: Any, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def sparkline(values: list[float], width: int = 96, height: int = 26, edge: float = 2.0) -> str:
    """The points of an SVG polyline over ``values``, oldest first; empty below two values."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    step = (width - 2 * edge) / (len(values) - 1)
    return " ".join(
        f"{edge + i * step:.1f},{height - edge - (value - low) / span * (height - 2 * edge):.1f}"
        for i, value in enumerate(values)
    )


def event_text(event: Event) -> str:
    """The event in one line."""
    if event.message:
        return event.message
    data = event.data
    if event.type == Event.Type.METRICS:
        reward, loss = (data["values"].get(name) for name in ("reward", "loss"))
        return f"Step {data['step']} trained: reward {reading(reward)}, loss {reading(loss, 4)}."
    if event.type == Event.Type.SUBSTAGE:
        where, seconds = data["device"] or "the host", data["ended_at"] - data["started_at"]
        return f"Step {data['step']}: {data['kind']} on {where}, {seconds:.2f} s."
    if event.type == Event.Type.COST:
        return f"{usd(data['cost_micro_usd'])} so far."
    return ""


def setting(value: Any) -> str:
    """A value of the configuration, as it would be written."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == []:
        return "–"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
