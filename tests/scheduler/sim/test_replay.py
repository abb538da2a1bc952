"""Traces: what a file may say, what is told when it cannot, and what became of its jobs."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest

from scheduler.core.state import POLICIES, Kind, Mode
from scheduler.sim.__main__ import main
from scheduler.sim.devices import H100
from scheduler.sim.engine import simulate
from scheduler.sim.fields import TraceError
from scheduler.sim.replay import replayed, text
from scheduler.sim.result import Interval
from scheduler.sim.scenario import Outage, SimJob
from scheduler.sim.trace import EXAMPLE, parse, read
from scheduler.sim.usage import Piece, device_seconds, pieces
from scheduler.sim.workloads import CPU_WORKLOAD, WORKLOADS, with_lora

JOB = {"id": "a", "tenant": 1, "workload": "gsm8k-qwen3-0.6b", "steps": 2, "gpus": 8}
TRACE = {"devices": {"type": "H100", "count": 8}, "tenants": [{"id": 1}], "jobs": [JOB]}


def changed(path: str, value: object) -> dict:
    """The trace with another value at ``jobs.0.steps``."""
    trace = copy.deepcopy(TRACE)
    *way, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    inner = trace
    for key in way:
        inner = inner[key]
    inner[last] = value
    return trace


# ---------------------------------------------------------------- the schema


def test_defaults():
    scenario = parse(TRACE, "file")
    assert (scenario.name, scenario.profile, scenario.devices) == ("file", H100, 2)
    (job,) = scenario.jobs
    assert job == SimJob("a", 1, 0.0, WORKLOADS["gsm8k-qwen3-0.6b"], 2, workers=2)
    assert scenario.weights == {1: 1.0}
    assert scenario.quotas == {}


def test_the_example_uses_every_field():
    scenario = read(EXAMPLE)
    streamed = scenario.jobs[3]
    assert (streamed.workers, streamed.train_workers, streamed.layout) == (1, 1, "disaggregated")
    assert (streamed.mode, streamed.max_staleness) == (Mode.ASYNC, 2)
    assert (streamed.priority, streamed.cancel_at) == (1, 5000.0)
    assert scenario.jobs[2].workload == with_lora(WORKLOADS["gsm8k-qwen3-4b"])
    assert scenario.weights == {1: 1.0, 2: 2.0, 3: 1.0}
    assert scenario.quotas == {3: 3}
    assert scenario.outages == (Outage("d01", 900.0, 960.0),)


def test_a_cpu_pool_counts_devices():
    trace = changed("devices", {"type": "CPU", "count": 3})
    trace["jobs"] = [{**JOB, "workload": CPU_WORKLOAD.name, "gpus": 2}]
    scenario = parse(trace, "cpu")
    assert (scenario.devices, scenario.jobs[0].workers) == (3, 2)


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ([], "the file: must be an object, is []"),
        ({}, "devices: is missing"),
        (changed("devices", 8), "devices: must be an object, is 8"),
        (changed("devices.type", "H900"), "devices.type: 'H900' is unknown; one of H100, H200, A100, CPU"),
        (changed("devices.count", 6), "devices.count: must be a multiple of 4 (a device of H100), is 6"),
        (changed("devices.count", 0), "devices.count: must be at least 1, is 0"),
        (changed("devices.color", 1), "devices.color: unknown field"),
        (changed("tenants", {}), "tenants: must be a list, is {}"),
        (changed("tenants.0.id", "one"), "tenants[0].id: must be a number, is 'one'"),
        (changed("tenants.0.id", 1.5), "tenants[0].id: must be a whole number, is 1.5"),
        (changed("tenants.0.weight", 0), "tenants[0].weight: must be above 0, is 0"),
        (changed("tenants.0.weight", float("nan")), "tenants[0].weight: must be a number, is nan"),
        (changed("tenants", [{"id": 1}, {"id": 1}]), "tenants[1].id: 1 is there twice"),
        (changed("tenants.0.max_gpus", 4), "jobs[0].gpus: tenant 1 may have 4, the job wants 8"),
        (changed("jobs", []), "jobs: there is none"),
        (changed("jobs.0.id", ""), "jobs[0].id: must be a text, is ''"),
        (changed("jobs", [JOB, JOB]), "jobs[1].id: 'a' is there twice"),
        (changed("jobs.0.tenant", 2), "jobs[0].tenant: 2 is not one of the tenants"),
        (
            changed("jobs.0.workload", "chess"),
            "jobs[0].workload: 'chess' is unknown; one of gsm8k-llama3.1-8b,",
        ),
        (changed("jobs.0.workload", CPU_WORKLOAD.name), "jobs[0].workload: 'words-smollm2-135m' is unknown"),
        (changed("jobs.0", {**JOB, "workload": "math-qwen3-32b", "gpus": 4}), "jobs[0].gpus: needs "),
        (changed("jobs.0.lora", "yes"), "jobs[0].lora: must be true or false, is 'yes'"),
        (changed("jobs.0.steps", 0), "jobs[0].steps: must be at least 1, is 0"),
        (changed("jobs.0.steps", True), "jobs[0].steps: must be a number, is True"),
        (changed("jobs.0.steps", None), "jobs[0].steps: is missing"),
        (changed("jobs.0.arrival", -1), "jobs[0].arrival: must be at least 0, is -1"),
        (changed("jobs.0.gpus", 12), "jobs[0].gpus: needs 3 devices, the pool has 2"),
        (changed("jobs.0.train_gpus", 8), "jobs[0].train_gpus: leaves none of 8 to roll out"),
        (
            changed("jobs.0.mode", "later"),
            "jobs[0].mode: 'later' is unknown; one of sync, one_step_off, async",
        ),
        (changed("jobs.0.max_staleness", 1), "jobs[0].max_staleness: mode sync has none"),
        (changed("jobs.0.latency_cap", 0.9), "jobs[0].latency_cap: must be at least 1, is 0.9"),
        (
            changed("jobs.0", {**JOB, "arrival": 9, "cancel_at": 5}),
            "jobs[0].cancel_at: must be at least 9, is 5",
        ),
        (
            changed("outages", [{"device": "d02", "at": 0, "until": 1}]),
            "outages[0].device: 'd02' is not one of d00 to d01",
        ),
        (
            changed("outages", [{"device": "d01", "at": 5, "until": 5}]),
            "outages[0].until: must be above 5, is 5",
        ),
    ],
)
def test_errors_name_the_field_and_the_reason(trace, message):
    with pytest.raises(TraceError) as error:
        parse(trace, "file")
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON: Expecting property name"),
        (b"\xff", "not a text in UTF-8"),
        (None, "No such file or directory"),
        (json.dumps(changed("jobs.0.steps", -3)).encode(), "jobs[0].steps: must be at least 1, is -3"),
    ],
)
def test_the_program_refuses_a_bad_file_in_one_line(tmp_path, capsys, content, message):
    file = tmp_path / "trace.json"
    if content is not None:
        file.write_bytes(content)
    assert main(["replay", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]


# ---------------------------------------------------------------- who had what


def interval(start: float, end: float, job: str, kind: Kind, share: float, pipeline: int = 1) -> Interval:
    return Interval("d00", start, end, pipeline, job, 1, kind, share, 8)


def test_device_time_by_hand():
    """a alone for 4 s, then half of the device for 6 s; b the other half, then all for 2 s."""
    jobs = [SimJob(id, 1, 0.0, WORKLOADS["gsm8k-qwen3-0.6b"], 1) for id in "ab"]
    timeline = [
        interval(0, 4, "a", Kind.DECODE, 1.0),
        interval(4, 10, "a", Kind.DECODE, 0.5),
        interval(4, 10, "b", Kind.UPDATE, 0.5, pipeline=2),
        interval(10, 12, "b", Kind.UPDATE, 1.0, pipeline=2),
    ]
    assert device_seconds(timeline, jobs) == pytest.approx({"a": 4 + 3, "b": 3 + 2})


def test_jobs_in_one_batch_divide_its_part():
    """Both have the same resident at 0.6 from 2 to 6; before and after one has it alone."""
    lora = with_lora(WORKLOADS["gsm8k-qwen3-0.6b"])
    jobs = [SimJob(id, 1, 0.0, lora, 1) for id in "ab"]
    first, second = (
        interval(0, 6, "a", Kind.DECODE, 0.6),
        interval(2, 9, "b", Kind.TAIL, 0.6, pipeline=2),
    )
    found = sorted(pieces([first, second], jobs), key=lambda piece: (piece.start, piece.bottom))
    assert found == [
        Piece(first, 0, 2, 0.0, 0.6),
        Piece(first, 2, 6, 0.0, 0.3),
        Piece(second, 2, 6, 0.3, 0.3),
        Piece(second, 6, 9, 0.0, 0.6),
    ]
    assert device_seconds([first, second], jobs) == pytest.approx({"a": 1.2 + 1.2, "b": 1.2 + 1.8})


def test_a_piece_goes_on_while_its_neighbours_change():
    jobs = [SimJob(id, 1, 0.0, WORKLOADS["gsm8k-qwen3-0.6b"], 1) for id in "ab"]
    long = interval(0, 9, "a", Kind.DECODE, 0.5)
    timeline = [long, interval(0, 3, "b", Kind.UPDATE, 0.5, 2), interval(3, 9, "b", Kind.SYNC, 0.5, 2)]
    assert [piece for piece in pieces(timeline, jobs) if piece.interval is long] == [
        Piece(long, 0, 9, 0, 0.5)
    ]


@pytest.mark.parametrize("policy", ["exclusive", "lookahead"])
def test_jobs_used_what_the_simulation_counts(policy):
    scenario = read(EXAMPLE)
    result = simulate(scenario, POLICIES[policy], seed=0)
    used = device_seconds(result.timeline, scenario.jobs)
    assert sum(used.values()) == pytest.approx(result.used)
    for tenant in result.tenants:
        own = sum(used[job.id] for job in scenario.jobs if job.tenant == tenant.id)
        assert own == pytest.approx(tenant.device_seconds)


# ---------------------------------------------------------------- reports


def test_a_job_alone_waits_for_nothing():
    (report,) = replayed(parse(TRACE, "one"), ["exclusive"], seed=0)
    (job,) = report.jobs
    assert (job.state, job.steps, job.waited, job.waited_for) == ("finished", 2, 0, {})
    assert job.latency_increase == pytest.approx(1.0)
    assert job.ran == pytest.approx(report.makespan)
    assert job.ran == pytest.approx(2 * job.step_seconds)
    # 4.916 dollars an hour for each of 8 GPUs
    assert report.dollars == pytest.approx(report.makespan * 8 * 4.916 / 3600)
    assert job.dollars == pytest.approx(report.dollars * report.utilization)
    (tenant,) = report.tenants
    assert (tenant.share, tenant.due) == (1.0, 1.0)


def test_two_jobs_in_turns_wait_and_divide_the_device():
    scenario = parse(TRACE, "two")
    other = replace(scenario.jobs[0], id="b", tenant=2)
    both = replace(scenario, jobs=(scenario.jobs[0], other), weights={1: 1.0, 2: 3.0})
    turns, together = replayed(both, ["exclusive", "lookahead"], seed=0)
    assert sum(job.waited for job in turns.jobs) > 0
    assert {code for job in turns.jobs for code in job.waited_for} == {"turn"}
    assert [tenant.due for tenant in turns.tenants] == [0.25, 0.75]
    assert sum(tenant.share for tenant in turns.tenants) == pytest.approx(1.0)
    assert together.tokens == turns.tokens
    assert together.makespan < turns.makespan


def test_a_cancelled_job_has_no_end():
    trace = changed("jobs.0.cancel_at", 1.0)
    (report,) = replayed(parse(trace, "cancelled"), ["lookahead"], seed=0)
    (job,) = report.jobs
    assert (job.state, job.ran, job.steps, job.latency_increase) == ("cancelled", None, 0, None)
    assert any(line.split()[:3] == ["a", "1", "cancelled"] for line in text(parse(trace, "x"), [report]))


def test_the_program_compares_policies(tmp_path, capsys):
    file, out = tmp_path / "trace.json", tmp_path / "report.json"
    file.write_text(json.dumps(TRACE))
    assert main(["replay", str(file), "--policy", "exclusive,greedy", "--json", str(out)]) == 0
    content = json.loads(out.read_text())
    assert [one["policy"] for one in content["policies"]] == ["exclusive", "greedy"]
    printed = capsys.readouterr().out
    assert printed.startswith("trace: 1 jobs on 8 H100")
    for one in content["policies"]:
        assert f"{one['makespan']:.1f}" in printed


def test_an_unknown_policy_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["replay", str(EXAMPLE), "--policy", "exclusive,best"])
    assert "'best' is not one of exclusive" in capsys.readouterr().err
