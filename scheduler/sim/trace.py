"""Trace files: a pool, its tenants, and the jobs that come to it. The schema is in README.md beside this."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from scheduler.core.state import Mode
from scheduler.sim.devices import CPU, DEVICES, DeviceProfile
from scheduler.sim.fields import Fields, TraceError
from scheduler.sim.room import hopeless
from scheduler.sim.scenario import Outage, Scenario, SimJob
from scheduler.sim.workloads import CPU_WORKLOAD, WORKLOADS, Workload, with_lora

EXAMPLE = Path(__file__).parent / "examples" / "four_jobs.json"


def read(path: Path) -> Scenario:
    """Raises ``TraceError`` for a file that cannot be read, and for what it cannot mean."""
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not a text in UTF-8") from error
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}: not JSON: {error}") from error
    return parse(value, path.stem)


def parse(value: object, name: str) -> Scenario:
    trace = Fields("", value)
    devices = trace.inner("devices")
    profile = DEVICES[devices.text("type", among=DEVICES)]
    count = _groups(devices, "count", profile)
    devices.close()
    weights, quotas = _tenants(trace, profile)
    jobs = _jobs(trace, profile, set(weights))
    outages = tuple(_outage(fields) for fields in trace.objects("outages", default=()))
    title = trace.text("name", default=name)
    trace.close()
    _require_devices(count, outages)
    scenario = Scenario(title, profile, count, jobs, weights, quotas, outages)
    _require_room(scenario)
    return scenario


def _groups(fields: Fields, name: str, profile: DeviceProfile, default: int | None = None) -> int:
    """Devices that make up so many GPUs."""
    gpus = fields.whole(name, least=1) if default is None else fields.whole(name, default, least=0)
    if gpus % profile.gpus:
        raise fields.wrong(
            name, f"must be a multiple of {profile.gpus} (a device of {profile.name}), is {gpus}"
        )
    return gpus // profile.gpus


def _tenants(trace: Fields, profile: DeviceProfile) -> tuple[dict[int, float], dict[int, int]]:
    weights: dict[int, float] = {}
    quotas: dict[int, int] = {}
    for fields in trace.objects("tenants"):
        id = fields.whole("id")
        if id in weights:
            raise fields.wrong("id", f"{id} is there twice")
        weights[id] = fields.number("weight", default=1.0, above=0)
        if fields.has("max_gpus"):
            quotas[id] = _groups(fields, "max_gpus", profile)
        fields.close()
    return weights, quotas


def _jobs(trace: Fields, profile: DeviceProfile, tenants: set[int]) -> tuple[SimJob, ...]:
    found: dict[str, SimJob] = {}
    for fields in trace.objects("jobs"):
        job = _job(fields, profile, tenants)
        if job.id in found:
            raise fields.wrong("id", f"{job.id!r} is there twice")
        found[job.id] = job
    if not found:
        raise trace.wrong("jobs", "there is none")
    return tuple(found.values())


def _job(fields: Fields, profile: DeviceProfile, tenants: set[int]) -> SimJob:
    tenant = fields.whole("tenant")
    if tenant not in tenants:
        raise fields.wrong("tenant", f"{tenant} is not one of the tenants")
    arrival = fields.number("arrival", default=0.0, least=0)
    devices = _groups(fields, "gpus", profile)
    training = _groups(fields, "train_gpus", profile, default=0)
    if training >= devices:
        raise fields.wrong("train_gpus", f"leaves none of {devices * profile.gpus} to roll out")
    mode = Mode(fields.text("mode", default=Mode.SYNC.value, among=[mode.value for mode in Mode]))
    job = SimJob(
        id=fields.text("id"),
        tenant=tenant,
        arrival=arrival,
        workload=_workload(fields, profile),
        steps=fields.whole("steps", least=1),
        workers=devices - training,
        train_workers=training,
        layout="disaggregated" if training else "colocated",
        mode=mode,
        max_staleness=_staleness(fields, mode),
        latency_cap=fields.number("latency_cap", default=1.5, least=1),
        priority=fields.whole("priority", default=0),
        cancel_at=fields.number("cancel_at", least=arrival) if fields.has("cancel_at") else None,
    )
    fields.close()
    return job


def _workload(fields: Fields, profile: DeviceProfile) -> Workload:
    """Only what was measured on the kind of device."""
    measured: Mapping[str, Workload] = {CPU_WORKLOAD.name: CPU_WORKLOAD} if profile is CPU else WORKLOADS
    workload = measured[fields.text("workload", among=measured)]
    return with_lora(workload) if fields.flag("lora") and not workload.lora else workload


def _staleness(fields: Fields, mode: Mode) -> int:
    if fields.has("max_staleness") and mode not in (Mode.ASYNC, Mode.STREAM):
        raise fields.wrong("max_staleness", f"mode {mode} has none")
    return fields.whole("max_staleness", default=0, least=0)


def _outage(fields: Fields) -> Outage:
    at = fields.number("at", least=0)
    outage = Outage(fields.text("device"), at, fields.number("until", above=at))
    fields.close()
    return outage


def _require_devices(count: int, outages: tuple[Outage, ...]) -> None:
    names = Scenario("", CPU, count, ()).device_names
    for place, outage in enumerate(outages):
        if outage.device not in names:
            raise TraceError(
                f"outages[{place}].device: {outage.device!r} is not one of {names[0]} to {names[-1]}"
            )


def _require_room(scenario: Scenario) -> None:
    """A job that could never run would keep the simulation waiting for ever."""
    gpus, never = scenario.profile.gpus, hopeless(scenario)
    for place, job in enumerate(scenario.jobs):
        limit = scenario.quotas.get(job.tenant, job.devices)
        if job.devices > limit:
            raise TraceError(
                f"jobs[{place}].gpus: tenant {job.tenant} may have {limit * gpus}, the job wants"
                f" {job.devices * gpus}"
            )
        if job.id in never:
            raise TraceError(f"jobs[{place}].gpus: {never[job.id]}")
