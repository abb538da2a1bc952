"""A job's way through the API, and the shapes a client of OpenAI's expects."""

from __future__ import annotations

import io
import json
import tarfile
from functools import partial

import pytest
from asgiref.sync import async_to_sync
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connections
from django.test import AsyncClient

from backend.api.downloads import members, tar_bytes, tar_chunks
from backend.jobs.events import event_add
from backend.jobs.models import Event, Job, Sample
from backend.jobs.states import JobStatus, Reason
from backend.jobs.tasks import validate_job
from tests import factories

ROWS = "".join(json.dumps(row) + "\n" for row in factories.rows_with_answers(8)).encode()


@pytest.fixture
def model(db, tmp_path):
    return factories.base_model(tmp_path / "tiny", name="tiny")


async def _content(response) -> bytes:
    return b"".join([part async for part in response.streaming_content])


async def _stream(url: str, authorization: str) -> bytes:
    return await _content(await AsyncClient().get(url, headers={"authorization": authorization}))


def upload(client, content: bytes = ROWS):
    part = SimpleUploadedFile("train.jsonl", content)
    return client.post("/v1/files", {"purpose": "fine-tune", "file": part})


def create(client, training_file: str, key: str | None = None, **fields):
    method = {"type": "reinforcement", "reinforcement": {"grader": factories.GRADER}}
    request = {"model": "tiny", "training_file": training_file, "method": method, **fields}
    headers = {"HTTP_IDEMPOTENCY_KEY": key} if key else {}
    return client.post("/v1/fine_tuning/jobs", request, format="json", **headers)


def test_from_upload_to_queue_to_cancel(acme, northwind, model):
    file = upload(acme.client).json()
    assert (file["object"], file["status"], file["rows"], file["bytes"]) == (
        "file",
        "processed",
        8,
        len(ROWS),
    )

    job = create(acme.client, file["id"], rl={"steps": 3}).json()
    assert (job["object"], job["status"], job["error"]) == ("fine_tuning.job", "validating_files", None)
    assert (job["model"], job["training_file"], job["fine_tuned_model"]) == ("tiny", file["id"], None)
    assert job["resolved"]["rl"]["optimizer"]["learning_rate"] == 1e-3
    assert job["method"]["reinforcement"]["hyperparameters"] == {"batch_size": 4, "learning_rate": 1e-3}
    assert job["progress"] == {"steps": 3, "steps_done": 0, "reward": None}
    assert job["cost"] == {"micro_usd": 0}
    assert isinstance(job["created_at"], int)

    validate_job(Job.objects.get(public_id=job["id"]).pk)
    url = f"/v1/fine_tuning/jobs/{job['id']}"
    assert acme.client.get(url).json()["status"] == "queued"
    assert create(northwind.client, file["id"]).json()["error"]["code"] == "file_not_found"
    assert acme.client.delete(f"/v1/files/{file['id']}").status_code == 409

    assert acme.client.post(f"{url}/cancel").json()["status"] == "cancelled"
    assert acme.client.post(f"{url}/cancel").json()["error"]["code"] == "job_finished"
    transitions = acme.client.get(f"{url}/transitions").json()["data"]
    assert [row["new"] for row in transitions] == ["validating_files", "queued", "cancelled"]
    assert transitions[-1]["actor"].startswith("key:jsk-")
    assert transitions[-1]["stimulus"].startswith("req-")
    assert acme.client.delete(f"/v1/files/{file['id']}").json()["deleted"] is True
    assert acme.client.get(f"/v1/files/{file['id']}").status_code == 404


def test_a_bad_row_is_told_with_its_line(acme):
    response = upload(acme.client, ROWS * 20 + b"{oops\n")
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("file", "invalid_file")
    assert "line 161" in error["message"]


def test_an_upload_without_a_file(acme):
    response = acme.client.post("/v1/files", {"purpose": "fine-tune"})
    assert response.json()["error"]["param"] == "file"


def test_an_upload_above_the_limit(acme, settings):
    settings.MAX_UPLOAD_BYTES = 100
    assert upload(acme.client).status_code == 413


def test_a_repeated_post_is_the_same_job(acme, model, tmp_path):
    file = factories.file(acme.organization, tmp_path).public_id
    first, again = (create(acme.client, file, key="k").json()["id"] for _ in range(2))
    assert first == again
    other = create(acme.client, file, key="k", seed=1)
    assert (other.status_code, other.json()["error"]["code"]) == (400, "idempotency_key_reuse")


def test_a_failed_job_says_why(acme, tmp_path):
    job = factories.job(
        acme.organization,
        tmp_path,
        status=JobStatus.FAILED,
        reason=Reason.INVALID_DATA,
        detail="row 7: no answer",
        error_param="training_file",
    )
    assert acme.client.get(f"/v1/fine_tuning/jobs/{job.public_id}").json()["error"] == {
        "code": "invalid_data",
        "param": "training_file",
        "message": "The data cannot be used: row 7: no answer",
    }


def test_a_waiting_job_says_what_it_waits_for(acme, tmp_path):
    job = factories.job(acme.organization, tmp_path, ahead=3, wait_code="busy", wait_text="3 jobs ahead")
    shown = acme.client.get(f"/v1/fine_tuning/jobs/{job.public_id}").json()
    assert shown["queue"] == {"ahead": 3, "code": "busy", "reason": "3 jobs ahead"}


def test_a_finished_job_names_its_model(acme, tmp_path):
    job = factories.job(acme.organization, tmp_path, status=JobStatus.SUCCEEDED, name="sums")
    shown = acme.client.get(f"/v1/fine_tuning/jobs/{job.public_id}").json()
    tail = job.public_id.removeprefix("ftjob-")
    assert shown["fine_tuned_model"] == f"ft:{job.base_model.name}:acme:sums:{tail}"


def test_jobs_are_paged_as_openai_pages_them(acme, tmp_path):
    jobs = [factories.job(acme.organization, tmp_path).public_id for _ in range(3)]
    page = acme.client.get("/v1/fine_tuning/jobs?limit=2").json()
    assert [row["id"] for row in page["data"]] == jobs[:0:-1]
    assert (page["object"], page["has_more"], page["last_id"]) == ("list", True, jobs[1])
    rest = acme.client.get(f"/v1/fine_tuning/jobs?limit=2&after={page['last_id']}").json()
    assert [row["id"] for row in rest["data"]] == jobs[:1]
    assert rest["has_more"] is False


def test_events_continue_by_the_id_of_the_last(acme, tmp_path):
    job = factories.job(acme.organization, tmp_path)
    for number in range(5):
        event_add(job=job, type=Event.Type.MESSAGE, message=str(number))
    url = f"/v1/fine_tuning/jobs/{job.public_id}/events"
    page = acme.client.get(f"{url}?limit=2").json()
    assert [row["message"] for row in page["data"]] == ["4", "3"]
    older = acme.client.get(f"{url}?limit=2&after={page['last_id']}").json()
    assert [row["message"] for row in older["data"]] == ["2", "1"]
    newer = acme.client.get(f"{url}?order=asc&after={page['last_id']}").json()
    assert [row["message"] for row in newer["data"]] == ["4"]


def test_samples_come_in_pages_of_one_step(acme, tmp_path):
    job = factories.job(acme.organization, tmp_path)
    text = {"row": 0, "prompt": "p", "completion": "c", "tokens": 1, "advantage": 0.0, "finish": "stop"}
    places = [(0, 0, 0)] + [(3, group, index) for group in range(3) for index in range(50)]
    Sample.objects.bulk_create(
        Sample(job=job, step=step, group=group, index=index, **text) for step, group, index in places
    )
    url = f"/v1/fine_tuning/jobs/{job.public_id}/samples"
    first = acme.client.get(url).json()
    assert (len(first["data"]), first["has_more"], first["last_id"]) == (100, True, "sample-3-1-49")
    # A newer step does not change which one is being listed.
    Sample.objects.create(job=job, step=4, group=9, index=9, **text)
    rest = acme.client.get(url, {"after": first["last_id"]}).json()
    found = [(row["step"], row["group"], row["index"]) for row in first["data"] + rest["data"]]
    assert (found, rest["has_more"]) == (places[1:], False)
    few = acme.client.get(url, {"step": 3, "limit": 2, "after": "sample-3-0-48"}).json()
    assert [row["id"] for row in few["data"]] == ["sample-3-0-49", "sample-3-1-0"]


@pytest.mark.parametrize(
    ("query", "param"), [("limit=101", "limit"), ("after=sample-1", "after"), ("after=sample-1-1-x", "after")]
)
def test_pages_of_samples_are_asked_for_in_form(query, param, acme, tmp_path):
    job = factories.job(acme.organization, tmp_path)
    response = acme.client.get(f"/v1/fine_tuning/jobs/{job.public_id}/samples?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("algorithm", "method", "names"),
    [
        ("sft", "supervised", {"batch_size", "learning_rate"}),
        ("dpo", "dpo", {"batch_size", "learning_rate", "beta"}),
        ("rloo", "reinforcement", {"batch_size", "learning_rate"}),
    ],
)
def test_a_job_is_of_openais_method(algorithm, method, names, acme, tmp_path):
    job = factories.job(acme.organization, tmp_path, rl={"algorithm": algorithm})
    shown = acme.client.get(f"/v1/fine_tuning/jobs/{job.public_id}").json()
    assert shown["method"]["type"] == method
    assert set(shown["method"][method]["hyperparameters"]) == names
    assert ("grader" in shown["method"][method]) == (method == "reinforcement")
    assert (shown["environment"], shown["start_from"]) == (None, None)


def test_the_method_and_the_resolved_spec_that_are_answered_are_requests(acme, model, tmp_path):
    rows = [factories.row("a", chosen="b", rejected="c")] * 4
    file = factories.file(acme.organization, tmp_path, rows=rows)
    asked = {"model": "tiny", "training_file": file.public_id, "method": {"type": "dpo"}}
    post = partial(acme.client.post, "/v1/fine_tuning/jobs", format="json")
    first = post(asked).json()
    assert post({**asked, "method": first["method"]}).json()["resolved"] == first["resolved"]
    assert post(first["resolved"]).json()["resolved"] == first["resolved"]


def test_a_puzzle_that_there_is_not_is_said(acme, northwind, model):
    asked = {"model": "tiny", "training_file": "reasoning-gym/../secrets"}
    response = acme.client.post("/v1/fine_tuning/jobs", asked, format="json")
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "training_file", "file_not_found")


def test_only_metrics_that_there_are(acme, tmp_path):
    job = factories.job(acme.organization, tmp_path)
    url = f"/v1/fine_tuning/jobs/{job.public_id}/metrics"
    assert acme.client.get(f"{url}?names=reward,loss,reward.exact").json()["data"] == []
    error = acme.client.get(f"{url}?names=rewrd").json()["error"]
    assert error["param"] == "names" and "'rewrd'" in error["message"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("accept", ["application/x-tar", "application/octet-stream", "text/html", "*/*"])
def test_a_checkpoint_comes_as_a_tar(accept, acme, tmp_path):
    job = factories.job(acme.organization, tmp_path, status=JobStatus.RUNNING)
    kept = factories.checkpoint(factories.attempt(job), tmp_path)
    url = f"/v1/fine_tuning/jobs/{job.public_id}/checkpoints/{kept.public_id}/content"
    response = acme.client.get(url, HTTP_ACCEPT=accept)
    content = async_to_sync(_content)(response)
    assert response.headers["Content-Type"] == "application/x-tar"
    assert int(response.headers["Content-Length"]) == len(content)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        assert tar.getnames() == ["step-5/adapter_config.json", "step-5/adapter_model.safetensors"]
        assert tar.extractfile("step-5/adapter_model.safetensors").read() == bytes(range(256)) * 5


@pytest.mark.django_db(transaction=True)
def test_a_file_comes_back_as_it_was(acme):
    file = upload(acme.client).json()
    response = acme.client.get(f"/v1/files/{file['id']}/content", HTTP_ACCEPT="application/binary")
    assert async_to_sync(_content)(response) == ROWS


def test_a_tar_of_many_sizes_is_read_back_whole(tmp_path):
    folder = tmp_path / "step-1"
    contents = {f"part-{size}.bin": b"x" * size for size in (0, 1, 511, 512, 513, 300_000)}
    contents["d/" * 60 + "deep.json"] = b"{}"
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "link").symlink_to("/etc/passwd")
    entries = members(folder, "step-1")
    whole = b"".join(tar_chunks(entries))
    assert len(whole) == tar_bytes(entries)
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        found = {name.removeprefix("step-1/"): tar.extractfile(name).read() for name in tar.getnames()}
    assert found == contents


def test_a_file_that_shrinks_breaks_the_stream(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"x" * 10)
    entries = members(tmp_path, "a")
    (tmp_path / "a.bin").write_bytes(b"x" * 5)
    with pytest.raises(OSError, match="5 bytes, not 10"):
        list(tar_chunks(entries))


@pytest.mark.django_db(transaction=True)
def test_a_download_streams_off_the_loop_without_a_connection(acme, tmp_path):
    job = factories.job(acme.organization, tmp_path, status=JobStatus.RUNNING)
    kept = factories.checkpoint(factories.attempt(job), tmp_path)
    url = f"/v1/fine_tuning/jobs/{job.public_id}/checkpoints/{kept.public_id}/content"
    content = async_to_sync(_stream)(url, acme.client._credentials["HTTP_AUTHORIZATION"])
    assert content.endswith(bytes(1024))
    assert connections["default"].connection is None
