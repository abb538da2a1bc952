"""The new-job form with algorithms, environments and starts: what it shows, sends, and says in short."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.urls import reverse

from backend.catalog.models import Corpus
from backend.jobs.models import Job
from backend.jobs.states import AttemptStatus, JobStatus
from frontend.web.form_examples import ENVIRONMENTS, GRADERS, SOURCE, WORLD_SOURCE
from tests import factories
from tests.frontend.test_spec_form import form
from workers.envs.own import check_environment
from workers.graders.check import check_grader
from workers.spec import ALGORITHMS, Environment, Grader, JobSpec

GAME = {"type": "guessing_game", "max_turns": 6}
DAPO = {"algorithm": "dapo", "steps": 12, "optimizer": {"learning_rate": 2e-3}, "loss": {"clip_high": 0.3}}


def url(name: str) -> str:
    return reverse(f"web:{name}")


@pytest.fixture
def model(db, tmp_path: Path):
    return factories.base_model(tmp_path / "tiny", name="tiny")


@pytest.fixture
def dataset(db, tmp_path: Path):
    rl = {**DAPO, "updates_per_step": 2}
    return factories.dataset(tmp_path, name="sums", recommended=rl)


def posted(training_file: str, changes: dict[str, Any] | None = None, **fields: str) -> dict[str, Any]:
    data = form(changes)
    of_form = {name: data.getlist(name) for name in data}
    named = {"model": "tiny", "training_file": training_file, "seed": "0", "idempotency_token": "f"}
    return {**named, "grader_from": "dataset", "environment_from": "dataset", **of_form, **fields}


def preview(tenant, data: dict[str, Any]) -> dict[str, Any]:
    return tenant.client.post(url("new_job_preview"), data).json()


def body_of(answer: dict[str, Any]) -> dict[str, Any]:
    return json.loads(answer["curl"].split("-d '")[1].removesuffix("'"))


def created(tenant, data: dict[str, Any]) -> Job:
    answer = tenant.client.post(url("new_job"), data)
    assert answer.status_code == 302, answer.context["errors"]
    return Job.objects.get(public_id=answer["Location"].rsplit("/", 1)[1])


def called(tenant, body: dict[str, Any]) -> Job:
    """The same by the API."""
    _, secret = factories.api_key(tenant.organization)
    answer = Client().post(
        "/v1/fine_tuning/jobs",
        body,
        content_type="application/json",
        headers={"Authorization": f"Bearer {secret}"},
    )
    assert answer.status_code == 200, answer.content
    return Job.objects.get(public_id=answer.json()["id"])


def file_for(tenant, folder: Path, algorithm: str):
    rows = {
        "sft": [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
        "dpo": [factories.row("a", chosen="b", rejected="c")],
    }
    return factories.file(tenant.organization, folder, rows=rows.get(algorithm))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_form_makes_a_job_of_every_algorithm_and_says_the_call_for_it(acme, model, tmp_path, algorithm):
    file = file_for(acme, tmp_path, algorithm)
    grader = {"grader_from": "json", "grader_json": json.dumps(factories.GRADER)}
    data = posted(
        file.public_id, {"rl.algorithm": algorithm, "rl.steps": "7"}, environment_from="none", **grader
    )
    answer = preview(acme, data)
    assert answer["errors"] == {}
    job = created(acme, data)
    assert (job.spec["rl"]["algorithm"], job.steps) == (algorithm, 7)
    assert called(acme, body_of(answer)).spec == job.spec


@pytest.mark.parametrize("algorithm", ["dapo", "rloo", "grpo", "ppo"])
@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_the_short_call_means_what_the_form_says(acme, model, dataset, algorithm, tuning):
    """Whatever the dataset recommends for its own algorithm."""
    data = posted("sums", {"rl.algorithm": algorithm, "rl.tuning.type": tuning, "rl.updates_per_step": "2"})
    answer = preview(acme, data)
    assert answer["errors"] == {}
    assert called(acme, body_of(answer)).spec == created(acme, data).spec


def test_the_form_begins_with_the_datasets_algorithm(acme, model, dataset):
    answer = acme.client.get(url("new_job"))
    shown = {knob.path: knob for section in answer.context["sections"] for knob in section.knobs}
    assert answer.context["algorithm"] == "dapo"
    assert (shown["rl.steps"].value, shown["rl.loss.clip_high"].value) == (12, 0.3)
    assert (shown["rl.loss.clip_low"].value, shown["rl.loss.clip_low"].usual) == (None, "0.2")
    page = answer.content.decode()
    assert '<option value="dapo" selected>' in page
    suitable = answer.context["page_data"]["suitable"]["sums"]
    assert suitable["sft"]["rl.optimizer.learning_rate"] is None
    assert suitable["rloo"]["rl.loss.clip_high"] is None
    assert "rl.steps" not in suitable["sft"]


@pytest.mark.parametrize(("algorithm", "hidden"), [("sft", True), ("dpo", True), ("ppo", False)])
def test_who_learns_from_data_sees_no_grader(acme, model, dataset, algorithm, hidden):
    answer = acme.client.post(url("new_job"), posted("sums", {"rl.algorithm": algorithm, "rl.steps": "x"}))
    page = answer.content.decode()
    for name in ("grader", "environment"):
        card = page.split(f'data-world="{name}"')[1].split(">")[0]
        assert card.endswith(" hidden") == hidden
    value = page.split('data-section="rl.value"')[1].split(">")[0]
    assert value.endswith(" hidden") == (algorithm != "ppo")


def test_what_is_left_empty_is_said_as_it_will_be(acme, model, dataset):
    usual = preview(acme, posted("sums", {"rl.algorithm": "dapo", "rl.sampling.max_tokens": "50"}))["usual"]
    assert (usual["rl.overlong_buffer"], usual["rl.overlong_penalty"]) == ("10", "1.0")
    assert usual["rl.normalize_advantage"] == "yes"
    assert (
        preview(acme, posted("sums", {"rl.algorithm": "sft"}))["usual"]["rl.optimizer.learning_rate"]
        == "0.0002"
    )


def test_an_ignored_field_that_is_sent_all_the_same_is_none_of_ours(acme, model, dataset):
    data = posted(
        "sums", {"rl.algorithm": "cispo", "rl.loss.clip_low": "nonsense", "rl.updates_per_step": "2"}
    )
    assert preview(acme, data)["errors"] == {}


# ---------------------------------------------------------------- environments


def test_a_dataset_brings_its_environment_and_one_may_do_without(acme, model, tmp_path):
    rows = {"fields": {"messages": 8, "answer": 8, "number": 8}}
    factories.dataset(tmp_path, name="game", grader=None, environment=GAME, **rows)
    assert created(acme, posted("game")).spec["environment"]["max_turns"] == 6
    without = posted("game", environment_from="none")
    assert "grader" in preview(acme, without)["errors"]
    own = {"environment_json": json.dumps({**GAME, "max_turns": 3}), "idempotency_token": "g"}
    job = created(acme, posted("game", environment_from="json", grader_from="none", **own))
    assert (job.spec["environment"]["max_turns"], job.spec["grader"]) == (3, None)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"environment_from": "json", "environment_json": "{"}, "not JSON"),
        ({"environment_from": "json", "environment_json": "[]"}, "an environment is a JSON object"),
        (
            {"environment_from": "json", "environment_json": '{"type": "guessing_game", "max_turns": 0}'},
            "max_turns",
        ),
        ({"environment_from": "json", "environment_json": '{"type": "oracle"}'}, "oracle"),
    ],
)
def test_an_environment_at_fault_is_told_at_its_place(acme, model, dataset, fields, words):
    answer = acme.client.post(url("new_job"), posted("sums", **fields))
    assert answer.status_code == 400
    assert words in answer.context["errors"]["environment"]
    assert not Job.objects.exists()


def test_an_environment_of_ones_own_must_compile(acme, model, dataset):
    bad = {"environment_from": "python", "environment_python": "class Environment:\r\n  def step(self\r\n"}
    answer = acme.client.post(url("new_job"), posted("sums", {"rl.sampling.max_tokens": "32"}, **bad))
    assert "line 2" in answer.context["errors"]["environment"]
    good = posted(
        "sums", {"rl.sampling.max_tokens": "32"}, environment_from="python", environment_python=WORLD_SOURCE
    )
    assert created(acme, good).spec["environment"]["source"] == WORLD_SOURCE


def test_every_example_can_be_used():
    for grader in (*GRADERS.values(), {"type": "python", "source": SOURCE}):
        spec = JobSpec(model="m", training_file="f", grader=grader)
        check_grader(spec.grader)
    for environment in ENVIRONMENTS.values():
        JobSpec(model="m", training_file="f", grader=GRADERS["math"], environment=environment)
    check_environment(WORLD_SOURCE)
    assert {"python", *GRADERS} == _types(Grader)
    assert {"python", *ENVIRONMENTS} == _types(Environment)
    assert all(example["type"] == name for name, example in [*GRADERS.items(), *ENVIRONMENTS.items()])


def _types(union: Any) -> set[str]:
    models = get_args(get_args(union)[0])
    return {get_args(model.model_fields["type"].annotation)[0] for model in models}


# ---------------------------------------------------------------- starts and files


def test_a_start_is_ones_own_and_brings_its_tuning(acme, northwind, model, dataset, tmp_path):
    made = {}
    for tenant in (acme, northwind):
        job = factories.job(
            tenant.organization,
            tmp_path,
            status=JobStatus.SUCCEEDED,
            model=model,
            rl={"tuning": {"type": "lora", "rank": 4}},
        )
        attempt = factories.attempt(job, status=AttemptStatus.SUCCEEDED)
        made[tenant.organization.slug] = factories.checkpoint(attempt, tmp_path).public_id
    answer = acme.client.get(url("new_job"))
    page = answer.content.decode()
    assert made["acme"] in page and made["northwind"] not in page
    assert answer.context["page_data"]["starts"][made["acme"]]["rl.tuning.rank"] == 4

    data = posted("sums", {"rl.tuning.rank": "4", "rl.updates_per_step": "2"}, start_from=made["acme"])
    short = body_of(preview(acme, data))
    assert (short["start_from"], short["rl"]["tuning"]["rank"]) == (made["acme"], 4)
    job = created(acme, data)
    assert job.start.public_id == made["acme"]
    assert called(acme, short).spec == job.spec
    theirs = acme.client.post(
        url("new_job"), {**data, "start_from": made["northwind"], "idempotency_token": "h"}
    )
    assert theirs.status_code == 400 and "start_from" in theirs.context["errors"]


def test_a_corpus_is_uploaded_and_listed_for_its_own_tenant(acme, northwind):
    Corpus.objects.create(name="land", title="A land", path="/x", passages=3)
    content = b'{"title": "a", "text": "b"}\n'
    sent = {"file": SimpleUploadedFile("notes.jsonl", content), "purpose": "corpus"}
    found = acme.client.post(url("upload"), sent).json()
    assert (found["purpose"], found["rows"]) == ("corpus", 1)
    page = acme.client.get(url("new_job"))
    assert ("land", "A land · 3 passages") in page.context["corpora"]
    assert found["id"] in page.content.decode()
    assert found["id"] not in [file.public_id for file in page.context["files"]]
    assert found["id"] not in northwind.client.get(url("new_job")).content.decode()
    refused = {"file": SimpleUploadedFile("notes.jsonl", content), "purpose": "other"}
    assert acme.client.post(url("upload"), refused).status_code == 400
