"""Modes of a job on a running service: ahead of its training, and stopped in the middle of each sub-stage."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.service import Service, Tenant, until
from tests.e2e.shared import accounting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

GRADER = {
    "type": "python",
    "name": "letters",
    "source": "def grade(sample, item):\n    return len(set(sample['output_text'])) / 32\n",
}
ROWS = [
    {"messages": [{"role": "user", "content": f"guess {number}"}], "number": number} for number in range(12)
]


def body(tenant: Tenant, **fields: Any) -> dict[str, Any]:
    rl = {
        "steps": 4,
        "prompts_per_step": 4,
        "group_size": 4,
        "sampling": {"max_tokens": 100, "stop": ["a"]},
        "precision": "fp32",
        **fields.pop("rl", {}),
    }
    method = {"type": "reinforcement", "reinforcement": {"grader": GRADER}}
    file = tenant.upload(ROWS)
    return {"model": "tiny", "training_file": file, "method": method, "rl": rl, "seed": 2, **fields}


@pytest.fixture(scope="module")
def tenants(service: Service) -> tuple[Tenant, Tenant]:
    return service.tenant("Player"), service.tenant("Neighbour")


@pytest.mark.parametrize("eta", [1, 2])
def test_an_asynchronous_job_is_never_staler_than_it_asked_for(
    tenants: tuple[Tenant, Tenant], eta: int
) -> None:
    """With another tenant's job beside it, which both takes and gives room."""
    tenant, other = tenants
    beside = other.submit(**body(other))
    mode = {"type": "async", "max_staleness": eta}
    made = tenant.submit(**body(tenant, rl={"mode": mode, "steps": 8}))
    for owner, job in ((tenant, made), (other, beside)):
        assert owner.finish(job)["status"] == "succeeded", owner.job(job)["status_reason"]
    steps = [row["values"] for row in tenant.listed(made, "metrics")]
    assert len(steps) == 8
    assert all(0 <= step["staleness"] <= step["staleness_max"] <= eta for step in steps)
    assert steps[0]["staleness_max"] == 0
    assert max(step["staleness_max"] for step in steps) > 0, "it ran ahead"
    assert all(0 <= step["importance_capped"] <= 1 for step in steps)
    assert not any("staleness" in row["values"] for row in other.listed(beside, "metrics"))


#: Cancels by the API as soon as such a sub-stage of the job runs: within milliseconds, from inside.
CANCEL = """
import httpx, time
from backend.pool.models import SubStage
from backend.pool.states import SubStageStatus
running = SubStage.objects.filter(
    job__public_id={job!r}, kind={kind!r}, status=SubStageStatus.GRANTED, step__gte=1
)
deadline = time.monotonic() + 50
while not running.exists():
    assert time.monotonic() < deadline, "no such sub-stage ran"
    time.sleep(0.002)
response = httpx.post({url!r}, headers={headers!r}, timeout=30).raise_for_status()
print(response.json()["status"])
"""

#: What the residents of the cluster hold.
HELD = """
import json, os, ray
from ray.util import list_named_actors
from workers.launch import ROLES, connect
connect(os.environ["RAY_ADDRESS"])

def held(actor):
    found = [*actor._open]
    if hasattr(actor, "_boxes"):
        engine = actor._engine
        return found + [*actor._boxes] + ([*engine._runs, *[1] * engine.cached_tokens] if engine else [])
    return found + [*actor._shares] + ([*actor._trainer._runs] if actor._trainer else [])

names = [name for name in list_named_actors() if name.split("|")[0] in ROLES]
handles = [ray.get_actor(name) for name in names]
print(json.dumps(dict(zip(names, ray.get([h.__ray_call__.remote(held) for h in handles])))))
"""


@pytest.mark.parametrize("kind", ["prefill", "tail", "tool", "update"])
def test_a_cancelled_game_leaves_nothing_and_its_device_to_the_next(
    service: Service, tenants: tuple[Tenant, Tenant], kind: str
) -> None:
    tenant, other = tenants
    game = {"type": "guessing_game", "max_turns": 3, "turn_tokens": 30, "delay_s": [0.2, 0.4]}
    job = tenant.submit(**body(tenant, environment=game, rl={"devices": 2, "steps": 500}))
    url = f"{service.url}/v1/fine_tuning/jobs/{job}/cancel"
    headers = {"Authorization": tenant.http.headers["Authorization"]}
    code = CANCEL.format(job=job, kind=kind, url=url, headers=headers)
    assert service.python(code) == "cancelled"
    until(
        lambda: {row["new"] for row in tenant.listed(job, "transitions") if row["attempt"]},
        lambda reached: "cancelled" in reached and "stopping" in reached,
        "the attempt stopped",
    )
    held = json.loads(service.python(HELD))
    assert held
    assert not any(held.values()), held
    following = other.submit(**body(other, rl={"devices": 2, "steps": 1}))
    assert other.finish(following)["status"] == "succeeded"
    assert accounting(service)["difference_micro_usd"] == 0
