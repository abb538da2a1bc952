"""Every page and fragment, for its members, for another tenant, for a stranger and for nobody."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.urls import URLPattern, reverse
from django.utils import timezone

from backend.jobs.attempts import step_record
from backend.jobs.models import Job
from backend.jobs.states import JobStatus
from backend.tenants.models import Membership, Role
from frontend.web import urls
from tests import factories
from tests.frontend import stage
from tests.frontend.conftest import Tenant
from tests.frontend.test_spec_form import form

#: Routes about one job, asked with GET, and what answers them: a page, a fragment, or data.
OF_A_JOB = (
    "job",
    "job_header",
    "job_points",
    "job_figures",
    "job_timeline",
    "job_samples",
    "job_checkpoints",
    "job_cost",
)
#: The rest, each with a test of its own below, in test_keys.py, in test_streams.py or in test_cluster.py.
OTHERS = {
    "home", "sign_in", "sign_out", "switch_organization", "jobs", "job_rows", "jobs_stream", "new_job",
    "new_job_preview", "upload", "job_stream", "job_cancel", "checkpoint", "keys", "key_revoke", "cluster",
    "cluster_live",
}  # fmt: skip


def url(name: str, *args: str) -> str:
    return reverse(f"web:{name}", args=args)


@pytest.fixture
def ran(acme: Tenant, job: Job) -> Job:
    """A job that has trained two steps on one device."""
    start = timezone.now() - timedelta(minutes=1)
    (device,) = stage.devices(1, start)
    attempt = stage.admit(job, [device])
    for step in range(2):
        start = stage.run_step(attempt, step, [device], start)
    job.refresh_from_db()
    return job


# ---------------------------------------------------------------- who may look


def test_no_route_is_forgotten():
    named = {pattern.name for pattern in urls.urlpatterns if isinstance(pattern, URLPattern)}
    assert named == {*OF_A_JOB, *OTHERS}


@pytest.mark.parametrize("name", OF_A_JOB)
def test_a_job_is_seen_by_members_only(acme, northwind, stranger, ran, name):
    page = url(name, ran.public_id)
    assert acme.client.get(page).status_code == 200
    assert acme.viewer.get(page).status_code == 200
    assert northwind.client.get(page).status_code == 404
    assert stranger.get(page).status_code == 404
    nobody = Client().get(page)
    assert nobody.status_code == 302
    assert nobody["Location"].startswith(url("sign_in"))


@pytest.mark.parametrize("name", OF_A_JOB)
def test_another_tenants_job_and_no_job_look_the_same(northwind, ran, name):
    other = northwind.client.get(url(name, ran.public_id)).content.decode()
    missing = northwind.client.get(url(name, "ftjob-missing")).content.decode()
    assert without_token(other.replace(ran.public_id, "X")) == without_token(
        missing.replace("ftjob-missing", "X")
    )


def without_token(page: str) -> str:
    """CSRF tokens differ from answer to answer."""
    return re.sub(r"\b[A-Za-z0-9]{64}\b", "", page)


def test_a_fragment_without_a_session_leads_the_whole_page_to_the_sign_in(job):
    answer = Client().get(url("job_header", job.public_id), headers={"HX-Request": "true"})
    assert (answer.status_code, answer["HX-Redirect"]) == (204, url("sign_in"))


def test_a_stranger_is_told_that_no_organization_is_theirs(stranger):
    answer = stranger.get(url("jobs"))
    assert answer.status_code == 404
    assert "not a member of any organization" in answer.content.decode()


def test_a_removed_member_sees_nothing_more(acme, job):
    assert acme.client.get(url("job", job.public_id)).status_code == 200
    Membership.objects.filter(user=acme.user).delete()
    assert acme.client.get(url("job", job.public_id)).status_code == 404


def test_the_organization_is_chosen_among_ones_own(acme, northwind, tmp_path):
    Membership.objects.create(organization=northwind.organization, user=acme.user, role=Role.VIEWER)
    theirs = factories.job(northwind.organization, tmp_path, name="theirs")
    assert acme.client.get(url("job", theirs.public_id)).status_code == 404
    acme.client.post(url("switch_organization"), {"organization": northwind.organization.slug})
    assert acme.client.get(url("job", theirs.public_id)).status_code == 200
    third = factories.organization()
    refused = acme.client.post(url("switch_organization"), {"organization": third.slug})
    assert refused.status_code == 404
    assert "theirs" in acme.client.get(url("jobs")).content.decode()


def test_pages_allow_no_foreign_and_no_inline_script(acme, ran):
    for name, *args in (("jobs",), ("new_job",), ("job", ran.public_id)):
        answer = acme.client.get(url(name, *args))
        assert "script-src 'self';" in answer["Content-Security-Policy"]
        page = answer.content.decode()
        assert "<script>" not in page
        assert "onclick=" not in page


# ---------------------------------------------------------------- signing in


def test_signing_in_and_out(db):
    person = factories.user(password=factories.PASSWORD)
    Membership.objects.create(organization=factories.organization(), user=person)
    client = Client()
    refused = client.post(url("sign_in"), {"username": person.email, "password": "wrong"})
    assert "No account has this e-mail address and password." in refused.content.decode()
    taken = client.post(url("sign_in"), {"username": person.email.upper(), "password": factories.PASSWORD})
    assert (taken.status_code, taken["Location"]) == (302, url("jobs"))
    assert client.get(url("jobs")).status_code == 200
    client.post(url("sign_out"))
    assert client.get(url("jobs")).status_code == 302


def test_the_way_back_after_signing_in_stays_on_this_site(db):
    person = factories.user(password=factories.PASSWORD)
    said = {"username": person.email, "password": factories.PASSWORD, "next": "https://elsewhere.example/"}
    assert Client().post(url("sign_in"), said)["Location"] == url("jobs")


# ---------------------------------------------------------------- what pages say


def test_the_list_tells_status_reason_reward_and_cost(acme, ran, tmp_path):
    factories.job(acme.organization, tmp_path, name="waits", ahead=2)
    factories.job(acme.organization, tmp_path, name="big", wait_text="needs 8 devices, the pool has 4")
    dataset = factories.dataset(tmp_path, title="Built-in sums")
    built_in = factories.job(acme.organization, tmp_path)
    Job.objects.filter(pk=built_in.pk).update(dataset=dataset, training_file=None)
    assert "Built-in sums" in acme.client.get(url("job", built_in.public_id)).content.decode()
    page = acme.client.get(url("jobs")).content.decode()
    for said in (
        "Built-in sums",
        "2 ahead",
        "needs 8 devices, the pool has 4",
        "2 / 30 steps",
        "Running",
        "<polyline",
    ):
        assert said in page


def test_an_empty_list_teaches(northwind, job):
    page = northwind.client.get(url("jobs")).content.decode()
    assert "No jobs yet" in page
    assert "curl http://testserver/v1/fine_tuning/jobs" in page
    assert "lighthouse" not in page
    begin = page.split("No jobs yet")[1]
    assert f'href="{url("new_job")}"' in begin and f'href="{url("keys")}"' in begin
    for_viewers = northwind.viewer.get(url("jobs")).content.decode().split("No jobs yet")[1]
    assert "Your role is viewer" in for_viewers and url("new_job") not in for_viewers


def test_older_jobs_are_a_page_away(acme, tmp_path):
    model = factories.base_model(tmp_path / "m")
    data = factories.file(acme.organization, tmp_path)
    for number in range(27):
        factories.job(acme.organization, tmp_path, name=f"job {number:02}", model=model, training_file=data)
    first = acme.client.get(url("jobs"))
    assert "job 26" in first.content.decode() and "job 01" not in first.content.decode()
    second = acme.client.get(url("jobs"), {"after": first.context["more_after"]}).content.decode()
    assert "job 01" in second and "job 26" not in second
    assert acme.client.get(url("jobs"), {"after": "nothing"}).status_code == 200


def test_rows_are_given_for_ones_own_jobs_only(acme, northwind, job):
    ask = {"ids": f"{job.public_id},ftjob-missing"}
    given = acme.client.get(url("job_rows"), ask).json()
    assert (list(given["rows"]), given["newest"]) == ([job.public_id], [job.public_id])
    assert northwind.client.get(url("job_rows"), ask).json() == {"rows": {}, "newest": []}
    assert Client().get(url("job_rows"), ask).status_code == 302


def test_the_job_page_holds_what_has_happened(acme, ran):
    answer = acme.client.get(url("job", ran.public_id))
    drawn = answer.context["figures"]
    assert drawn["last_step"] == 1
    assert drawn["figures"]["reward"]["data"][-1]["x"] == [0, 1]
    assert drawn["figures"]["cost"]["data"][-1]["y"][-1] == ran.cost_micro_usd / 1e6 > 0
    assert answer.context["seen"] == ran.event_seq
    page = answer.content.decode()
    assert "group_size" in page and "Cancel job" in page
    assert "Cancel job" not in acme.viewer.get(url("job", ran.public_id)).content.decode()


@pytest.mark.parametrize(
    ("algorithm", "shown", "hidden"),
    [
        ("sft", "learning_rate", "Grader"),
        ("dpo", "dpo_beta", "temperature"),
        ("ppo", "Value head", "dpo_beta"),
    ],
)
def test_the_configuration_is_what_the_algorithm_uses(acme, tmp_path, algorithm, shown, hidden):
    job = factories.job(acme.organization, tmp_path, rl={"algorithm": algorithm})
    config = acme.client.get(url("job", job.public_id)).context["config"]
    said = {heading for heading, _ in config} | {name for _, pairs in config for name, _ in pairs}
    assert shown in said and hidden not in said


def test_points_are_the_tail_after_a_step(acme, ran):
    points = acme.client.get(url("job_points", ran.public_id), {"after": 0}).json()
    assert points["last_step"] == 1
    assert points["points"]["reward"]["x"] == [[1], [1], [1]]
    assert points["cost"]["data"][0]["x"] == [0, 1]
    none = acme.client.get(url("job_points", ran.public_id), {"after": 1}).json()
    assert (none["last_step"], none["points"]["loss"]["x"]) == (1, [[]])


def test_the_timeline_shows_neighbours_without_a_name(acme, northwind, tmp_path):
    start = timezone.now() - timedelta(minutes=2)
    (device,) = stage.devices(1, start)
    mine = factories.job(acme.organization, tmp_path)
    theirs = factories.job(northwind.organization, tmp_path, name="secret plan")
    attempts = [stage.admit(job, [device]) for job in (mine, theirs)]
    for attempt in (attempts[0], attempts[1], attempts[0]):
        step = attempt.job.steps_done
        start = stage.run_step(attempt, step, [device], start)
    answer = acme.client.get(url("job_timeline", mine.public_id), {"minutes": 0})
    traces = {trace["name"]: trace for trace in answer.json()["data"]}
    assert len(traces["Decode"]["x"]) == 2
    assert len(traces["Other jobs"]["x"]) == len(stage.STEP)
    for told in ("secret plan", theirs.public_id, northwind.organization.name):
        assert told not in answer.content.decode()


def test_samples_of_a_step_and_of_the_newest(acme, ran):
    newest = acme.client.get(url("job_samples", ran.public_id)).content.decode()
    assert 'data-step="1"' in newest and "data-follows" in newest
    assert "The old lighthouse keeper" in newest and "▲ +0.52" in newest
    first = acme.client.get(url("job_samples", ran.public_id), {"step": 0}).content.decode()
    assert 'data-step="0"' in first and "data-follows" not in first
    assert (
        "Nothing kept of step 9"
        in acme.client.get(url("job_samples", ran.public_id), {"step": 9}).content.decode()
    )


def test_many_samples_come_page_by_page(acme, northwind, job):
    done = stage.step_done(0)
    samples = [
        done.samples[0].model_copy(
            update={"group": group, "index": index, "completion": f"c{group}.{index};"}
        )
        for group in range(3)
        for index in range(50)
    ]
    step_record(attempt=factories.attempt(job), done=done.model_copy(update={"samples": tuple(samples)}))
    page, seen, pages = acme.client.get(url("job_samples", job.public_id)).content.decode(), [], []
    assert "data-follows" in page
    while True:
        pages.append(page)
        seen.append(re.findall(r"c\d\.\d+;", page))
        more = re.search(r"\?step=0&amp;after=([\d.]+)", page)
        if more is None:
            break
        ask = {"step": 0, "after": more[1]}
        assert northwind.client.get(url("job_samples", job.public_id), ask).status_code == 404
        page = acme.client.get(url("job_samples", job.public_id), ask).content.decode()
    assert [len(part) for part in seen] == [64, 64, 22]
    assert [text for part in seen for text in part] == [sample.completion for sample in samples]
    assert "50 completions" in pages[0] and "64 completions" not in pages[0]
    for page in pages[1:]:
        assert "continued" in page and 'hx-swap-oob="true"' in page
        assert "data-follows" not in page and "sample-step" not in page


def test_a_completion_is_text_and_never_markup(acme, job):
    attempt = factories.attempt(job)
    stage_done = stage.step_done(0)
    wicked = stage_done.samples[0].model_copy(update={"completion": "<script>alert(1)</script>"})
    step_record(attempt=attempt, done=stage_done.model_copy(update={"samples": (wicked,)}))
    page = acme.client.get(url("job_samples", job.public_id)).content.decode()
    assert "&lt;script&gt;alert(1)" in page and "<script>alert" not in page


def test_numbers_in_links_may_be_nonsense(acme, ran):
    for name, ask in (("job_points", "after"), ("job_timeline", "minutes"), ("job_samples", "step")):
        for nonsense in ("x", "", "9" * 30, "-1", "1.5"):
            assert acme.client.get(url(name, ran.public_id), {ask: nonsense}).status_code == 200
    for nonsense in ("x", "1", "1.", ".1", "-1.2", "1.2.3", "9" * 30 + ".1"):
        ask = {"step": 1, "after": nonsense}
        assert "sample-step" in acme.client.get(url("job_samples", ran.public_id), ask).content.decode()


@pytest.mark.django_db(transaction=True)  # a download closes its request's connection
def test_a_checkpoint_is_downloaded_by_members_only(acme, northwind, stranger, job, tmp_path):
    kept = factories.checkpoint(factories.attempt(job), tmp_path)
    address = url("checkpoint", job.public_id, kept.public_id)
    assert address in acme.client.get(url("job", job.public_id)).content.decode()
    answer = acme.client.get(address)
    assert (answer.status_code, answer["Content-Type"]) == (200, "application/x-tar")
    assert northwind.client.get(address).status_code == 404
    assert stranger.get(address).status_code == 404
    assert Client().get(address).status_code == 302


# ---------------------------------------------------------------- cancelling


def test_members_cancel_and_viewers_do_not(acme, northwind, job):
    address = url("job_cancel", job.public_id)
    assert northwind.client.post(address).status_code == 404
    assert acme.viewer.post(address).status_code == 403
    job.refresh_from_db()
    assert job.status == JobStatus.QUEUED
    assert "Cancelled" in acme.client.post(address).content.decode()
    job.refresh_from_db()
    assert job.status == JobStatus.CANCELLED
    assert acme.client.get(address).status_code == 405


def test_what_is_over_is_not_cancelled_and_the_page_says_so(acme, job):
    Job.objects.filter(pk=job.pk).update(status=JobStatus.SUCCEEDED)
    assert (
        "The job is succeeded already." in acme.client.post(url("job_cancel", job.public_id)).content.decode()
    )


# ---------------------------------------------------------------- creating


@pytest.fixture
def offer(acme: Tenant, tmp_path: Path) -> dict[str, Any]:
    """What the form's data name: a model and a built-in dataset that brings its own settings."""
    model = factories.base_model(tmp_path / "model")
    dataset = factories.dataset(tmp_path, recommended={"steps": 12, "sampling": {"max_tokens": 24}})
    return {"model": model.name, "training_file": dataset.name}


def filled(offer: dict[str, Any], **changes: Any) -> dict[str, Any]:
    data = form(changes)
    posted = {name: data.getlist(name) for name in data}
    return {"grader_from": "dataset", "seed": "0", "idempotency_token": "form-1", **offer, **posted}


def test_the_form_begins_with_the_datasets_settings(acme, offer):
    answer = acme.client.get(url("new_job"))
    shown = {knob.path: knob.value for section in answer.context["sections"] for knob in section.knobs}
    assert (shown["rl.steps"], shown["rl.sampling.max_tokens"], shown["rl.group_size"]) == (12, 24, 8)


def test_a_job_is_created_once_however_often_the_form_is_sent(acme, offer):
    data = filled(offer, **{"rl.steps": "3"}) | {"suffix": "first run", "seed": "7"}
    answers = [acme.client.post(url("new_job"), data) for _ in range(2)]
    job = Job.objects.get(organization=acme.organization)
    assert {answer["Location"] for answer in answers} == {url("job", job.public_id)}
    assert (job.name, job.steps, job.spec["seed"], job.created_by) == ("first run", 3, 7, acme.user)
    assert job.spec["grader"] == {"input": "{{sample.output_text}}", **factories.GRADER}


def test_the_forms_job_is_the_api_calls_job(acme, offer):
    changes = {"rl.loss.kl_beta": "0.01", "rl.tuning.rank": "4"}
    preview = acme.client.post(url("new_job_preview"), filled(offer, **changes)).json()
    assert preview["errors"] == {}
    body = json.loads(preview["curl"].split("-d '")[1].removesuffix("'"))
    assert body["rl"] == {
        # the dataset would choose otherwise, but the form shows the defaults in these inputs
        "steps": 30,
        "sampling": {"max_tokens": 64},
        "loss": {"kl_beta": 0.01},
        "tuning": {"type": "lora", "rank": 4},
    }
    acme.client.post(url("new_job"), filled(offer, **changes))
    _, secret = factories.api_key(acme.organization)
    called = Client().post(
        "/v1/fine_tuning/jobs",
        body,
        content_type="application/json",
        headers={"Authorization": f"Bearer {secret}"},
    )
    assert called.status_code == 200, called.content
    first, second = Job.objects.filter(organization=acme.organization).order_by("pk")
    assert first.spec == second.spec


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        ({"rl.group_size": "1"}, "rl.group_size", "must be at least 2 with algorithm grpo"),
        ({"rl.steps": "many"}, "rl.steps", "valid integer"),
        ({"rl.optimizer.learning_rate": "-1"}, "rl.optimizer.learning_rate", "greater than 0"),
        ({"rl.sampling.max_tokens": "128"}, "rl.sampling.max_tokens", "leaves no room for a prompt"),
    ],
)
def test_an_error_stands_beside_its_field_and_nothing_is_lost(acme, offer, changes, field, said):
    answer = acme.client.post(url("new_job"), filled(offer, **changes))
    assert answer.status_code == 400
    assert list(answer.context["errors"]) == [field]
    assert said in answer.context["errors"][field]
    page = answer.content.decode()
    assert f'data-error-for="{field}" role="alert">{answer.context["errors"][field]}' in page.replace(
        "&#x27;", "'"
    )
    assert f'value="{changes[field]}"' in page
    assert not Job.objects.exists()


def test_all_errors_are_told_at_once(acme, offer):
    data = filled(offer, **{"rl.group_size": "0", "rl.tuning.rank": "0"}) | {"model": ""}
    data |= {"grader_from": "json", "grader_json": "{"}
    errors = acme.client.post(url("new_job_preview"), data).json()["errors"]
    assert set(errors) == {"model", "grader", "rl.group_size", "rl.tuning.rank"}
    assert errors["grader"].startswith("not JSON")


def test_an_error_about_fields_together_stands_beside_the_one_at_fault(acme, offer):
    answer = acme.client.post(
        url("new_job"), filled(offer, **{"rl.devices": "5", "rl.prompts_per_step": "4"})
    )
    assert answer.status_code == 400
    assert "exceeds prompts_per_step: each device needs" in answer.content.decode()


def test_a_grader_in_python(acme, offer):
    source = "def grade(sample, item):\r\n    return 1.0\r\n"
    data = filled(offer) | {"grader_from": "python", "grader_python": source}
    assert acme.client.post(url("new_job"), data).status_code == 302
    assert Job.objects.get().spec["grader"]["source"] == source.replace("\r\n", "\n")


def test_a_file_of_ones_own_needs_a_grader_and_is_not_anothers(acme, northwind, offer, tmp_path):
    own, theirs = (
        factories.file(acme.organization, tmp_path),
        factories.file(northwind.organization, tmp_path),
    )
    data = filled(offer | {"training_file": own.public_id})
    assert "brings no grader" in acme.client.post(url("new_job_preview"), data).json()["errors"]["grader"]
    data |= {"grader_from": "json", "grader_json": json.dumps(factories.GRADER)}
    assert acme.client.post(url("new_job"), data | {"training_file": theirs.public_id}).status_code == 400
    assert acme.client.post(url("new_job"), data).status_code == 302
    assert theirs.filename not in [file.filename for file in acme.client.get(url("new_job")).context["files"]]


@pytest.mark.parametrize("name", ["new_job", "new_job_preview"])
def test_viewers_and_strangers_create_nothing(acme, stranger, offer, name):
    assert acme.viewer.post(url(name), filled(offer)).status_code == 403
    assert stranger.post(url(name), filled(offer)).status_code == 404
    assert Client().post(url(name), filled(offer)).status_code == 302
    assert not Job.objects.exists()


# ---------------------------------------------------------------- uploading


def upload(client: Client, content: bytes) -> Any:
    return client.post(url("upload"), {"file": SimpleUploadedFile("rows.jsonl", content)})


def test_a_file_is_taken_in_and_offered(acme):
    rows = "".join(json.dumps(row) + "\n" for row in factories.rows_with_answers(3)).encode()
    answer = upload(acme.client, rows)
    assert answer.status_code == 201
    assert (answer.json()["filename"], answer.json()["rows"]) == ("rows.jsonl", 3)
    assert answer.json()["id"] in acme.client.get(url("new_job")).content.decode()


def test_a_bad_file_is_refused_with_its_line(acme):
    answer = upload(acme.client, b'{"messages": [{"role": "user", "content": "hi"}]}\nnot json\n')
    assert answer.status_code == 400
    assert "line 2" in answer.json()["error"].lower()
    assert acme.client.post(url("upload")).json()["error"] == "Choose a file first."


def test_viewers_upload_nothing(acme, stranger):
    assert upload(acme.viewer, b"{}").status_code == 403
    assert upload(stranger, b"{}").status_code == 404
