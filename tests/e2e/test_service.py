"""From POST to bill on the real thing: web, Celery, scheduler, Ray, PostgreSQL, and a model that trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.service import OVER, Service, Tenant, until
from tests.e2e.shared import accounting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

#: Rewards the share of the completion that is the letter asked for.
GRADER = {
    "type": "python",
    "name": "letter",
    "source": (
        "def grade(sample, item):\n"
        "    text = sample['output_text']\n"
        "    return text.count(item['letter']) / max(1, len(text))\n"
    ),
}
ROWS = [{"messages": [{"role": "user", "content": f"say {x}"}], "letter": x} for x in "abcdefgh"]


def body(file: str, **rl: Any) -> dict[str, Any]:
    settings = {
        "steps": 3,
        "prompts_per_step": 4,
        "group_size": 4,
        "sampling": {"max_tokens": 12},
        "precision": "fp32",
        "optimizer": {"learning_rate": 0.005},
        **rl,
    }
    method = {"type": "reinforcement", "reinforcement": {"grader": GRADER}}
    return {"model": "tiny", "training_file": file, "method": method, "rl": settings, "seed": 11}


@pytest.fixture(scope="module")
def tenants(service: Service) -> tuple[Tenant, Tenant, Tenant]:
    return service.tenant("One"), service.tenant("Two"), service.tenant("Stranger")


def test_two_tenants_from_post_to_bill(
    service: Service, tenants: tuple[Tenant, Tenant, Tenant], tiny_folder: Path, tmp_path: Path
) -> None:
    one, two, stranger = tenants
    jobs = {tenant.name: tenant.submit(**body(tenant.upload(ROWS))) for tenant in (one, two)}
    for tenant in (one, two):
        job = tenant.finish(jobs[tenant.name])
        assert job["status"] == "succeeded", job["status_reason"]
        assert job["progress"] == {"steps": 3, "steps_done": 3, "reward": job["progress"]["reward"]}
        metrics = tenant.listed(job["id"], "metrics")
        assert [row["step"] for row in metrics] == [0, 1, 2]
        assert all(row["values"]["mismatch_max"] < 1e-3 for row in metrics)
        assert sum(row["values"]["tokens"] for row in metrics) == job["trained_tokens"]
        check_events(tenant.events(job["id"]))
        assert {sample["group"] for sample in tenant.listed(job["id"], "samples", step=0)} == {0}
        assert job["cost"]["micro_usd"] > 0
        for path in ("", "/events", "/metrics", "/samples", "/checkpoints"):
            assert stranger.http.get(f"/v1/fine_tuning/jobs/{job['id']}{path}").status_code == 404
        check_adapter(tenant.adapter(job["id"], tmp_path / tenant.name), tiny_folder)
    books = accounting(service)
    assert books["difference_micro_usd"] == 0
    assert books["tenants_micro_usd"] >= sum(t.job(jobs[t.name])["cost"]["micro_usd"] for t in (one, two))


def check_events(events: list[dict[str, Any]]) -> None:
    """One stream in order: what happened, each sub-stage with its device, the checkpoint, the end."""
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    statuses = [event["data"]["status"] for event in events if event["type"] == "status"]
    assert statuses == ["validating_files", "queued", "running", "succeeded"]
    ran = [event["data"] for event in events if event["type"] == "substage"]
    assert {row["kind"] for row in ran} >= {"prefill", "grade", "update", "sync"}
    assert {row["kind"] for row in ran} & {"decode", "tail"}
    for row in ran:
        assert row["ended_at"] >= row["started_at"]
        assert (row["device"] is None) == (row["kind"] == "grade")
    assert any(event["type"] == "checkpoint" and event["data"]["final"] for event in events)


def check_adapter(folder: Path, base: Path) -> None:
    """PEFT reads what was trained: the adapter changes the base's logits."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        before = model(ids).logits.clone()
        after = peft.PeftModel.from_pretrained(model, folder)(ids).logits
    assert (after - before).abs().max() > 1e-3


def test_a_killed_trainer_changes_nothing_but_the_time(
    service: Service, tenants: tuple[Tenant, Tenant, Tenant], tmp_path: Path
) -> None:
    """6 steps = 3 + kill -9 of the trainer + 3: the same weights, and the lost work is not billed."""
    tenant = tenants[0]
    file = tenant.upload(ROWS)
    plan = body(file, steps=6, checkpoint_every=3, prompts_per_step=8, sampling={"max_tokens": 32})
    whole = tenant.submit(**plan)
    assert tenant.finish(whole)["status"] == "succeeded"
    killed = tenant.submit(**plan)
    until(
        lambda: {row["step_number"] for row in tenant.listed(killed, "checkpoints")},
        lambda steps: 3 in steps,
        "the first checkpoint",
    )
    assert service.kill("^ray::TrainerResident") >= 1
    job = tenant.finish(killed)
    assert job["status"] == "succeeded", job["status_reason"]
    transitions = tenant.listed(killed, "transitions")
    assert "lost" in {row["new"] for row in transitions}
    assert max(row["attempt"] or 0 for row in transitions) == 2
    weights = [
        load_file(tenant.adapter(made, tmp_path / made) / "adapter_model.safetensors")
        for made in (whole, killed)
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    rewards = [[row["values"]["reward"] for row in tenant.listed(j, "metrics")] for j in (whole, killed)]
    assert rewards[0] == rewards[1]
    assert accounting(service)["difference_micro_usd"] == 0


def test_a_killed_scheduler_comes_back_and_the_job_goes_on(
    service: Service, tenants: tuple[Tenant, Tenant, Tenant]
) -> None:
    tenant = tenants[1]
    job = tenant.submit(**body(tenant.upload(ROWS), steps=8))
    until(lambda: tenant.job(job), lambda state: state["progress"]["steps_done"] >= 1, "the first step")
    assert service.kill("run_scheduler") == 1
    state = tenant.finish(job)
    assert state["status"] == "succeeded", state["status_reason"]
    assert {row["attempt"] for row in tenant.listed(job, "transitions")} == {None, 1}


def test_cancelling_ends_the_job_and_leaves_the_devices_to_others(
    service: Service, tenants: tuple[Tenant, Tenant, Tenant]
) -> None:
    one, two, _ = tenants
    job = one.submit(**body(one.upload(ROWS), steps=500))
    until(lambda: one.job(job), lambda state: state["progress"]["steps_done"] >= 1, "the first step")
    cancelled = one.http.post(f"/v1/fine_tuning/jobs/{job}/cancel").raise_for_status().json()
    assert cancelled["status"] == "cancelled"
    other = two.submit(**body(two.upload(ROWS), devices=2))
    assert two.finish(other)["status"] == "succeeded"
    until(
        lambda: {row["new"] for row in one.listed(job, "transitions") if row["attempt"]},
        lambda reached: "cancelled" in reached and "stopping" in reached,
        "the attempt stopped",
    )


@pytest.mark.parametrize("rl", [{"updates_per_step": 2}, {"loss": {"kl_beta": 0.1}}])
def test_two_devices_train_what_one_trains(
    service: Service, tenants: tuple[Tenant, Tenant, Tenant], rl: dict[str, Any]
) -> None:
    """Data parallelism changes the time, not the numbers: same samples, same loss, same gradient."""
    tenant = tenants[0]
    file = tenant.upload(ROWS)
    first = []
    for devices in (1, 2):
        job = tenant.submit(**body(file, devices=devices, steps=1, **rl))
        assert tenant.finish(job)["status"] == "succeeded"
        first.append(tenant.listed(job, "metrics")[0]["values"])
    for name in ("reward", "tokens", "completion_length"):
        assert first[0][name] == first[1][name]
    for name in {"loss", "kl", "entropy", "grad_norm"} & first[0].keys():
        assert first[0][name] == pytest.approx(first[1][name], rel=1e-3, abs=1e-6)
    assert ("kl" in first[0]) == ("loss" in rl)


def test_bad_jobs_are_refused_before_any_device_time(
    service: Service, tenants: tuple[Tenant, Tenant, Tenant]
) -> None:
    tenant = tenants[0]
    file = tenant.upload(ROWS)

    def refused(content: dict[str, Any]) -> dict[str, Any]:
        response = tenant.http.post("/v1/fine_tuning/jobs", json=content)
        assert response.status_code == 400, response.text
        return response.json()["error"]

    assert refused({**body(file), "model": "nonesuch"})["param"] == "model"
    assert refused(body(file, group_size=1))["param"] == "rl.group_size"
    for content, said in ((b"", "empty"), (json.dumps(ROWS[0]).encode() + b"\nnot json\n", "line 2")):
        upload = tenant.http.post(
            "/v1/files", files={"file": ("x.jsonl", content)}, data={"purpose": "fine-tune"}
        )
        assert upload.status_code == 400
        assert said in upload.json()["error"]["message"]
    missing = [dict(row) for row in ROWS]
    del missing[6]["letter"]
    grader = {"type": "string_check", "name": "g", "reference": "{{item.letter}}", "operation": "eq"}
    check = body(tenant.upload(missing))
    check["method"] = {"type": "reinforcement", "reinforcement": {"grader": grader}}
    check_refusal(tenant, check, "row 7", "letter")
    long = [*ROWS, {"messages": [{"role": "user", "content": "x" * 600}], "letter": "x"}]
    check_refusal(tenant, body(tenant.upload(long)), "row 9", "context")


def check_refusal(tenant: Tenant, content: dict[str, Any], *said: str) -> None:
    """Refused at submit, or by the check of the rows that comes before the queue."""
    response = tenant.http.post("/v1/fine_tuning/jobs", json=content)
    if response.status_code == 400:
        message = response.json()["error"]["message"]
    else:
        job = tenant.finish(response.raise_for_status().json()["id"])
        assert job["status"] == "failed"
        assert job["started_at"] is None
        assert job["status"] in OVER
        message = job["error"]["message"]
    assert all(text in message for text in said), message
