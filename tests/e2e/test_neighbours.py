"""A job alone, and the same job packed with three others: the same tokens, the same adapter, a smaller bill.

``mine`` has two devices. ``tailed`` and ``trains`` are another tenant's, ``plain`` a third one's; all are
LoRA jobs over one base. Each runs alone first; then all run at once.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.service import Service, Tenant
from tests.e2e.shared import accounting, alone_micro_usd, shared
from tests.e2e.ties import Oracle, load_adapter
from workers import batches
from workers.data.cursor import row_at
from workers.engines.weights import load_weights
from workers.models.chat import ChatTokenizer
from workers.spec import JobSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

#: How far a random number may be from the border of two tokens' cumulative masses so that rounding decides.
TIE = 2e-5
#: What rounding may change in an adapter's weight, after all steps.
WEIGHT = 1e-4

GRADER = {
    "type": "python",
    "name": "letters",
    "source": "def grade(sample, item):\n    return len(set(sample['output_text'])) / 32\n",
}
ROWS = [{"messages": [{"role": "user", "content": f"say {word}"}]} for word in "abcdefghijklmnop"]


def body(**rl: Any) -> dict[str, Any]:
    """One letter in 34 ends a completion: some are short, a few are long."""
    settings = {
        "steps": 6,
        "prompts_per_step": 4,
        "group_size": 4,
        "sampling": {"max_tokens": 120, "stop": ["a"]},
        "precision": "fp32",
        "checkpoint_every": 100,
        **rl,
    }
    method = {"type": "reinforcement", "reinforcement": {"grader": GRADER}}
    return {"model": "tiny", "method": method, "rl": settings, "seed": 5}


#: Nobody orders a merge: the planner does it when it pays, which hangs on who computes at that moment.
TRIES = 3
STEPS = 5
MINE = body(
    devices=2,
    steps=STEPS,
    prompts_per_step=8,
    sample_groups=8,
    checkpoint_every=1,
    keep_checkpoints=STEPS,
    sampling={"max_tokens": 160},
)
TRAINS = {"prompts_per_step": 8, "updates_per_step": 2, "loss": {"kl_beta": 0.05}, "micro_batch_size": 4}
OTHERS = {
    "tailed": body(steps=5, sampling={"max_tokens": 240, "stop": ["a"]}),
    "trains": body(steps=7, sampling={"max_tokens": 48}, **TRAINS),
    "plain": body(steps=9, sampling={"max_tokens": 64}),
}
OWNERS = {"mine": "Mine", "tailed": "Their own", "trains": "Their own", "plain": "Third"}


@dataclass(frozen=True)
class Ran:
    """A job that is over. ``samples`` by step, ``adapters`` by the steps that are in them."""

    tenant: Tenant
    state: dict[str, Any]
    samples: list[dict[tuple[int, int], dict[str, Any]]] = field(default_factory=list)
    adapters: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    @property
    def cost(self) -> int:
        return self.state["cost"]["micro_usd"]


@dataclass(frozen=True)
class Runs:
    """``shared`` is what the packed run of ``mine`` had in common with the others."""

    alone: dict[str, Ran]
    packed: dict[str, Ran]
    shared: dict[str, list[str]]


@pytest.fixture(scope="module")
def runs(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    bodies = {**OTHERS, "mine": MINE}
    tenants = {name: service.tenant(name) for name in set(OWNERS.values())}
    of_job = {name: tenants[OWNERS[name]] for name in bodies}
    files = {name: of_job[name].upload(ROWS) for name in bodies}

    def submit(name: str) -> str:
        return of_job[name].submit(**bodies[name], training_file=files[name])

    def over(name: str, job: str) -> Ran:
        tenant = of_job[name]
        state = tenant.finish(job)
        assert state["status"] == "succeeded", state["status_reason"]
        if name != "mine":
            return Ran(tenant, state)
        return Ran(tenant, state, samples(tenant, job), adapters(tenant, job, tmp_path_factory.mktemp(job)))

    alone = {name: over(name, submit(name)) for name in bodies}
    for _ in range(TRIES):
        with ThreadPoolExecutor(len(bodies)) as pool:
            jobs = dict(zip(bodies, pool.map(submit, bodies), strict=True))
        packed = {name: over(name, job) for name, job in jobs.items()}
        found = shared(service, jobs["mine"])
        if all(found.values()):
            break
    return Runs(alone, packed, found)


def samples(tenant: Tenant, job: str) -> list[dict[tuple[int, int], dict[str, Any]]]:
    pages = [tenant.listed(job, "samples", step=step, limit=100) for step in range(STEPS)]
    return [{(row["group"], row["index"]): row for row in page} for page in pages]


def adapters(tenant: Tenant, job: str, folder: Path) -> dict[int, dict[str, torch.Tensor]]:
    steps = range(1, STEPS + 1)
    return {step: load_adapter(tenant.adapter(job, folder / f"{step}", step)) for step in steps}


# ---------------------------------------------------------------- nothing changes


def test_neighbours_change_no_token_and_no_weight(runs: Runs, tiny_folder: Path) -> None:
    """Up to a step in which rounding decided about a token, if there was one; there, nothing but rounding."""
    alone, packed = runs.alone["mine"], runs.packed["mine"]
    assert all(len(step) == 8 * 4 for step in (*alone.samples, *packed.samples))
    lengths = [row["tokens"] for step in alone.samples for row in step.values()]
    assert min(lengths) < 12 and max(lengths) > 90, "short and long ones"
    same = 0
    for step in range(STEPS):
        differing = [key for key, row in alone.samples[step].items() if row != packed.samples[step][key]]
        for key in differing:
            require_right(alone, step, key, tiny_folder)
            require_right(packed, step, key, tiny_folder)
        if differing:
            break
        same = step + 1
    for step in range(1, same + 1):
        assert largest_difference(alone.adapters[step], packed.adapters[step]) <= WEIGHT
    moved = [largest_difference(alone.adapters[step], alone.adapters[1]) for step in range(2, STEPS + 1)]
    assert all(distance > 10 * WEIGHT for distance in moved), "training changes much more than neighbours do"


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def require_right(ran: Ran, step: int, key: tuple[int, int], model: Path) -> None:
    """What was sampled is what its random numbers say, by the run's own weights, but for ties."""
    spec = JobSpec.model_validate(ran.state["resolved"])
    tokenizer = ChatTokenizer(model)
    group, index = key
    row = row_at(spec.seed, step * spec.rl.prompts_per_step + group, len(ROWS), spec.rl.shuffle)
    messages = ROWS[row]["messages"]
    prompt = batches.Prompt(group, row, ROWS[row], messages, tuple(tokenizer.encode_chat(messages)))
    request = batches.requests(spec, "run", step, prompt, tokenizer.eos_ids)[index]
    weights = load_weights(model, torch.float32, torch.device("cpu"))
    lora = spec.rl.tuning
    oracle = Oracle(weights, tokenizer, ran.adapters.get(step), lora.alpha / lora.rank)
    seen = ran.samples[step][key]
    found = [
        (batches.last_turn(rollout, tokenizer), len(rollout.tokens), rollout.finish)
        for rollout in oracle.completions(request, TIE)
    ]
    assert (seen["completion"], seen["tokens"], seen["finish"]) in found, (step, key, seen, found)


def test_the_samples_are_what_an_engine_alone_computes(runs: Runs, tiny_folder: Path) -> None:
    """So that the check of differences is one that passes where nothing differs."""
    for step in (0, STEPS - 1):
        require_right(runs.packed["mine"], step, (3, 1), tiny_folder)


# ---------------------------------------------------------------- it was shared, and paid


def test_the_job_fused_computed_beside_others_and_moved(runs: Runs, service: Service) -> None:
    assert not any(shared(service, runs.alone["mine"].state["id"]).values())
    assert runs.shared["fused"]
    assert runs.shared["coran"]
    assert runs.shared["merged"]


def test_each_job_pays_less_than_alone_at_its_pace_and_the_books_add_up(runs: Runs, service: Service) -> None:
    """At the pace of the packed run: what a machine of few cores computes slower for all, alone it would not,
    and that is the machine's.
    """
    assert accounting(service)["difference_micro_usd"] == 0
    for ran in runs.packed.values():
        assert 0 < ran.cost < alone_micro_usd(service, ran.state["id"])


def test_jobs_that_decode_together_pay_less_than_one_was_billed_alone(service: Service) -> None:
    """Three tenants' jobs that are one job thrice: each has a third of its batches."""
    tenants = [service.tenant(f"Fused {number}") for number in range(3)]
    rolls = body(devices=2, steps=4, prompts_per_step=2, sampling={"max_tokens": 400})

    def submit(tenant: Tenant) -> str:
        return tenant.submit(**rolls, training_file=tenant.upload(ROWS))

    def cost(tenant: Tenant, job: str) -> int:
        state = tenant.finish(job)
        assert state["status"] == "succeeded", state["status_reason"]
        return state["cost"]["micro_usd"]

    alone = cost(tenants[0], submit(tenants[0]))
    with ThreadPoolExecutor(len(tenants)) as pool:
        jobs = list(pool.map(submit, tenants))
    packed = [cost(tenant, job) for tenant, job in zip(tenants, jobs, strict=True)]
    assert all(0 < one < alone for one in packed), (packed, alone)
    assert accounting(service)["difference_micro_usd"] == 0
