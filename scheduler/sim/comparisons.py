"""What is compared with what: the paper's evaluation, and what this planner adds, as scenarios and policies.

A comparison holds a policy against a baseline on the same jobs, devices and draws. Jobs of a pair get equal
work: as many steps each when they are alike, otherwise as many as take equally long alone, so that nothing is
gained or lost by one of them ending early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from scheduler.core.state import POLICIES, Mode, Policy
from scheduler.sim.devices import A100, GPUS_PER_DEVICE, H100, DeviceProfile
from scheduler.sim.nature import Measured
from scheduler.sim.room import hopeless
from scheduler.sim.scenario import Scenario, SimJob
from scheduler.sim.workloads import WORKLOADS, Workload, with_lora


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy by the name it has in tables: its own, or what was switched off or changed."""

    label: str
    policy: Policy


def _named(name: str) -> Variant:
    return Variant(name, POLICIES[name])


def _changed(how: str, **switches: bool | int) -> Variant:
    return Variant(f"lookahead, {how}", replace(POLICIES["lookahead"], **switches))  # type: ignore[arg-type]


EXCLUSIVE, PHASE, ROLLOUT_ONLY, GREEDY, LOOKAHEAD = map(
    _named, ("exclusive", "phase", "rollout_only", "greedy", "lookahead")
)
NO_MERGE = _changed("no merge", merge=False)
NO_SHARES = _changed("equal shares", shares=False)
NO_FUSE = _changed("no fuse", fuse=False)
NO_WAIT = _changed("no wait", wait=False)
NO_STREAM = _changed("no stream", stream=False)
#: How many compute on a device at most: two as in the paper, or three, whichever is not the planner's own.
TWO_OR_THREE = tuple(
    _changed(f"{most} compute", max_computing=most)
    for most in (2, 3)
    if most != LOOKAHEAD.policy.max_computing
)


@dataclass(frozen=True)
class Comparison:
    """``workload`` names the row. Rows of one ``family`` are alike enough to have a mean."""

    group: str
    workload: str
    scenario: Scenario
    policy: Variant
    baseline: Variant = EXCLUSIVE
    family: str = ""

    @property
    def gpus(self) -> int:
        return self.scenario.devices * self.scenario.profile.gpus


# ---------------------------------------------------------------- jobs and pools

#: Models of the paper's evaluation; the 8B was measured, but is not among them.
NOT_IN_THE_PAPER = frozenset({"qwen3-8b"})
PAPER = tuple(workload for workload in WORKLOADS.values() if workload.model not in NOT_IN_THE_PAPER)


def alike(
    workload: Workload, profile: DeviceProfile, gpus: int, steps: int, jobs: int = 2, cap: float = 1.5
) -> Scenario:
    """Synchronous jobs of one kind, each on all devices, each of its own tenant."""
    devices = gpus // GPUS_PER_DEVICE
    own = tuple(
        SimJob(f"{workload.name}-{number}", number, 0.0, workload, steps, devices, latency_cap=cap)
        for number in range(jobs)
    )
    return Scenario(f"{jobs} x {workload.name} on {gpus} {profile.name}", profile, devices, own)


def disaggregated(workload: Workload, number: int, steps: int, mode: Mode, staleness: int) -> SimJob:
    """Half of 8 GPUs roll out, half train."""
    return SimJob(
        f"{workload.name}-{mode}{staleness}-{number}",
        number,
        0.0,
        workload,
        steps,
        workers=1,
        train_workers=1,
        layout="disaggregated",
        mode=mode,
        max_staleness=staleness,
    )


def _fewer(steps: int) -> int:
    """Where many jobs run at once, or one of two does many more steps than the other."""
    return max(2, steps // 2)


def apart(workload: Workload, steps: int, mode: Mode, staleness: int) -> Scenario:
    """Two jobs of one kind that roll out and train on different devices."""
    own = tuple(disaggregated(workload, number, steps, mode, staleness) for number in range(2))
    return Scenario(f"2 x {workload.name}, {mode} {staleness}", H100, 2, own)


def pair(name: str, first: SimJob, second: SimJob, steps: int) -> Scenario:
    """The longer one takes ``steps``; the other as many as take equally long alone."""
    both = (first, second)
    seconds = [expected_step(job) for job in both]
    own = tuple(
        replace(job, steps=round(steps * max(seconds) / own)) for job, own in zip(both, seconds, strict=True)
    )
    return Scenario(name, H100, 2, own)


def expected_step(job: SimJob) -> float:
    """Seconds that a step takes alone; rollouts and training overlap where they are on different devices."""
    outlook = Measured(Scenario(job.id, H100, job.devices, (job,))).queued(job).outlook
    rollout = sum(segment.seconds for segment in outlook.rollout)
    train = sum(segment.seconds for segment in outlook.train)
    return rollout + train if job.layout == "colocated" else max(rollout, train)


def too_large(profile: DeviceProfile, gpus: int) -> dict[str, str]:
    """Workloads of which not even one job on all the GPUs fits, and why."""
    found = {}
    for workload in PAPER:
        for reason in hopeless(alike(workload, profile, gpus, steps=1, jobs=1)).values():
            found[workload.name] = reason
    return found


def fitting(profile: DeviceProfile, gpus: int) -> list[Workload]:
    excluded = too_large(profile, gpus)
    return [workload for workload in PAPER if workload.name not in excluded]


# ---------------------------------------------------------------- groups


def _against(
    group: str, workload: str, scenario: Scenario, *variants: Variant, family: str = ""
) -> Iterator[Comparison]:
    """Each variant against ``exclusive``."""
    for variant in variants:
        yield Comparison(group, workload, scenario, variant, family=family)


def sync_8xh100(steps: int) -> Iterator[Comparison]:
    for workload in fitting(H100, 8):
        scenario = alike(workload, H100, 8, steps)
        yield from _against("sync-8xH100", workload.name, scenario, LOOKAHEAD, GREEDY, PHASE, ROLLOUT_ONLY)
        yield Comparison("sync-8xH100", workload.name, scenario, LOOKAHEAD, PHASE)


#: One of each task at 64 GPUs; the first one also at the sizes below.
ON_64 = ("math-qwen3-4b", "gsm8k-qwen3-4b", "aime-qwen3-4b-instruct", "search128-qwen3-4b")
#: No training of it was measured: its costs are those of the 8B by parameters, and stand beside the mean.
EXTRAPOLATED = "math-qwen3-32b"


def sync_64xa100(steps: int) -> Iterator[Comparison]:
    for name in ON_64:
        scenario = alike(WORKLOADS[name], A100, 64, steps)
        yield from _against("sync-64xA100", name, scenario, LOOKAHEAD, GREEDY)
    large = alike(WORKLOADS[EXTRAPOLATED], A100, 64, steps)
    yield from _against("sync-64xA100", EXTRAPOLATED, large, LOOKAHEAD, GREEDY, family="extrapolated")
    for gpus in (8, 16, 32):
        scenario = alike(WORKLOADS[ON_64[0]], A100, gpus, steps)
        yield from _against("sync-64xA100", ON_64[0], scenario, LOOKAHEAD, GREEDY, family=f"on {gpus} GPUs")


#: One of each task by the 4B models and the 8B.
ASYNC = (
    "gsm8k-qwen3-4b",
    "math-qwen3-4b",
    "math-llama3.1-8b",
    "aime-qwen3-4b-instruct",
    "search128-qwen3-4b",
    "search128-llama3.1-8b",
)


def async_streamrl(steps: int) -> Iterator[Comparison]:
    for name in ASYNC:
        scenario = apart(WORKLOADS[name], steps, Mode.STREAM, 1)
        yield from _against("async-streamrl", name, scenario, LOOKAHEAD, GREEDY)


def async_areal(steps: int) -> Iterator[Comparison]:
    for name in ASYNC:
        for eta in (2, 4):
            scenario = apart(WORKLOADS[name], steps, Mode.ASYNC, eta)
            yield from _against("async-areal", f"{name}, eta {eta}", scenario, LOOKAHEAD, GREEDY)


PAIRS = (
    ("math-qwen3-4b", "gsm8k-llama3.1-8b"),
    ("aime-qwen3-4b", "search128-llama3.1-8b"),
    ("search128-qwen3-4b", "math-qwen3-0.6b"),
    ("aime-llama3.1-8b", "gsm8k-qwen3-4b-instruct"),
    ("math-qwen3-0.6b", "aime-qwen3-4b-instruct"),
)


def heterogeneous(steps: int) -> Iterator[Comparison]:
    for first, second in PAIRS:
        one, other = (
            SimJob(first, 0, 0.0, WORKLOADS[first], 1, 2),
            SimJob(second, 1, 0.0, WORKLOADS[second], 1, 2),
        )
        scenario = pair(f"{first} + {second}", one, other, _fewer(steps))
        yield from _against("heterogeneous", scenario.name, scenario, LOOKAHEAD, GREEDY)
        yield Comparison("heterogeneous", scenario.name, scenario, LOOKAHEAD, PHASE)


MIXED = (
    ("math-qwen3-4b", "math-qwen3-4b"),
    ("search128-qwen3-4b", "gsm8k-qwen3-4b"),
    ("aime-llama3.1-8b", "math-qwen3-4b"),
)


def sync_with_async(steps: int) -> Iterator[Comparison]:
    for sync, other in MIXED:
        first = SimJob(f"{sync}-sync", 0, 0.0, WORKLOADS[sync], 1, 2)
        second = disaggregated(WORKLOADS[other], 1, 1, Mode.ASYNC, 2)
        scenario = pair(f"{sync} + {other} (eta 2)", first, second, _fewer(steps))
        yield from _against("sync-with-async", scenario.name, scenario, LOOKAHEAD, GREEDY)


#: One of each task.
ABLATED = ("gsm8k-qwen3-4b", "math-qwen3-4b", "aime-llama3.1-8b", "search128-qwen3-4b")
#: Lets three jobs live on a device, whose steps take up to that much longer.
CROWDED_CAP = 4.0


def ablation(steps: int) -> Iterator[Comparison]:
    pairs = (ROLLOUT_ONLY, PHASE, GREEDY, NO_MERGE, NO_SHARES, NO_WAIT, NO_STREAM, *TWO_OR_THREE, LOOKAHEAD)
    for name in ABLATED:
        scenario = alike(WORKLOADS[name], H100, 8, steps)
        yield from _against("ablation", name, scenario, *pairs)
        crowd = alike(WORKLOADS[name], H100, 8, _fewer(steps), 3, CROWDED_CAP)
        variants = (LOOKAHEAD, GREEDY, *TWO_OR_THREE)
        yield from _against("ablation", f"3 x {name}", crowd, *variants, family="of 3 jobs")
    large, tenants = alike(WORKLOADS[ON_64[0]], A100, 64, steps), eight_tenants(WORKLOADS[LORA[0]], steps)
    row = f"{ON_64[0]} on 64xA100"
    yield from _against("ablation", row, large, NO_MERGE, NO_SHARES, LOOKAHEAD, GREEDY, family="on 64 GPUs")
    row = f"8 LoRA x {LORA[0]}"
    yield from _against("ablation", row, tenants, NO_FUSE, LOOKAHEAD, GREEDY, family="of 8 LoRA jobs")


LORA = ("math-qwen3-4b", "gsm8k-qwen3-4b", "search128-qwen3-4b")
#: What the tenants of adapters accept: that their step takes so many times longer than alone.
LORA_CAP = 4.0


#: Prompts of a step: what adapters are mostly trained with, and what the paper's full fine-tuning takes.
FEW_PROMPTS, MANY_PROMPTS = 16, 64


def eight_tenants(workload: Workload, steps: int, prompts: int = FEW_PROMPTS) -> Scenario:
    adapters = with_lora(workload)
    named = replace(adapters, name=f"{adapters.name}-{prompts}", prompts=prompts)
    return alike(named, H100, 8, _fewer(steps), jobs=8, cap=LORA_CAP)


def lora_8_tenants(steps: int) -> Iterator[Comparison]:
    for name in LORA:
        yield from _against("lora-8-tenants", name, eight_tenants(WORKLOADS[name], steps), LOOKAHEAD, GREEDY)
        many = eight_tenants(WORKLOADS[name], steps, MANY_PROMPTS)
        family = f"of {MANY_PROMPTS} prompts"
        yield from _against("lora-8-tenants", f"{name}, {family}", many, LOOKAHEAD, GREEDY, family=family)


Group = Callable[[int], Iterator[Comparison]]
GROUPS: dict[str, Group] = {
    "sync-8xH100": sync_8xh100,
    "sync-64xA100": sync_64xa100,
    "async-streamrl": async_streamrl,
    "async-areal": async_areal,
    "heterogeneous": heterogeneous,
    "sync-with-async": sync_with_async,
    "ablation": ablation,
    "lora-8-tenants": lora_8_tenants,
}


def comparisons(groups: Sequence[str], steps: int) -> list[Comparison]:
    return [comparison for group in groups for comparison in GROUPS[group](steps)]
