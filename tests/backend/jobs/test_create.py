"""Creating jobs: what is stored, what is refused before anything is, and repeated requests."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import connections

from backend.common.errors import Forbidden, InvalidRequest, LimitReached
from backend.jobs.models import Event, Job, Transition
from backend.jobs.services import file_delete, job_create
from backend.jobs.states import JobStatus
from tests import factories
from workers.spec import JobSpec


@pytest.fixture
def model(db, tmp_path):
    return factories.base_model(tmp_path / "tiny", name="tiny")


@pytest.fixture
def file(acme, tmp_path):
    return factories.file(acme.organization, tmp_path)


def body(training_file: str, grader: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    method = {"type": "reinforcement", "reinforcement": {"grader": grader or factories.GRADER}}
    return {"model": "tiny", "training_file": training_file, "method": method, **fields}


def refusal(actor, request) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        job_create(actor=actor, request=request)
    assert not Job.objects.exists()
    return caught.value


def test_a_job_holds_its_resolved_spec_and_its_sizes(acme, model, file):
    job = job_create(
        actor=acme.member, request=body(file.public_id, rl={"steps": 3, "devices": 2}, suffix="a")
    )
    job.refresh_from_db()
    spec = JobSpec.model_validate(job.spec)
    assert (job.steps, job.devices, job.name, job.status) == (3, 2, "a", JobStatus.VALIDATING)
    assert spec.rl.optimizer.learning_rate == 1e-3
    assert job.weights_key == "tiny@auto"
    assert job.weights_bytes == 2 * (4 * model.parameters + (250 << 20))
    assert job.run_bytes > 0
    assert job.training_file == file and job.dataset is None


def test_the_first_transition_and_event_are_written_with_the_job(acme, model, file):
    job = job_create(actor=acme.member, request=body(file.public_id), stimulus="req-1")
    transition = Transition.objects.get(job=job)
    assert (transition.old, transition.new, transition.reason) == ("", "validating_files", "submitted")
    assert (transition.actor, transition.stimulus) == (f"user:{acme.member.user.pk}", "req-1")
    assert Event.objects.get(job=job).message == "The job was submitted."


def test_validation_is_sent_once_the_job_is_committed(
    acme, model, file, monkeypatch, django_capture_on_commit_callbacks
):
    sent = []
    monkeypatch.setattr("backend.jobs.services.validate_job.delay", sent.append)
    with django_capture_on_commit_callbacks(execute=True):
        job = job_create(actor=acme.member, request=body(file.public_id))
        assert sent == []
    assert sent == [job.pk]


def test_a_broker_that_is_down_does_not_lose_the_job(
    acme, model, file, monkeypatch, django_capture_on_commit_callbacks
):
    def down(pk: int) -> None:
        raise ConnectionError("no broker")

    monkeypatch.setattr("backend.jobs.services.validate_job.delay", down)
    with django_capture_on_commit_callbacks(execute=True):
        job = job_create(actor=acme.member, request=body(file.public_id))
    assert Job.objects.get(pk=job.pk).status == JobStatus.VALIDATING


def test_a_built_in_dataset_needs_only_its_name(acme, model, tmp_path):
    factories.dataset(tmp_path, name="sums", recommended={"steps": 7})
    job = job_create(actor=acme.member, request={"model": "tiny", "training_file": "sums"})
    assert job.steps == 7
    assert job.dataset.name == "sums" and job.training_file is None
    assert job.spec["grader"]["reference"] == "{{item.answer}}"


def test_a_tenants_own_model_comes_before_the_services(acme, northwind, model, file, tmp_path):
    own = factories.base_model(tmp_path / "own", name="tiny", of=acme.organization)
    job = job_create(actor=acme.member, request=body(file.public_id))
    assert job.base_model == own
    assert job.weights_key == f"{acme.organization.public_id}/tiny@auto"
    theirs = factories.file(northwind.organization, tmp_path)
    assert job_create(actor=northwind.member, request=body(theirs.public_id)).base_model == model


def test_a_viewer_creates_nothing(acme, model, file):
    with pytest.raises(Forbidden):
        job_create(actor=acme.viewer, request=body(file.public_id))


def test_more_devices_than_the_organization_may_hold_are_refused(acme, model, file):
    acme.organization.max_devices = 2
    acme.organization.save()
    error = refusal(acme.member, body(file.public_id, rl={"devices": 3}))
    assert error.param == "rl.devices"
    assert error.message.startswith("rl.devices is 3, but the organization may hold 2 at once")
    assert job_create(actor=acme.member, request=body(file.public_id, rl={"devices": 2})).devices == 2


@pytest.mark.parametrize(
    ("metadata", "param"),
    [({"k" * 65: "v"}, "metadata"), ({"k": "v" * 513}, "metadata.k"), ({"": "v"}, "metadata")],
    ids=["a long key", "a long value", "an empty key"],
)
def test_metadata_have_openais_bounds(acme, model, file, metadata, param):
    assert refusal(acme.member, body(file.public_id, metadata=metadata)).param.startswith(param)


def test_metadata_at_their_bounds_are_kept(acme, model, file):
    metadata = {f"{number:0>64}": "v" * 512 for number in range(16)}
    assert job_create(actor=acme.member, request=body(file.public_id, metadata=metadata)).metadata == metadata
    with pytest.raises(InvalidRequest):
        job_create(actor=acme.member, request=body(file.public_id, metadata={**metadata, "one": "more"}))


def test_unfinished_jobs_are_limited_per_organization(acme, northwind, model, file, settings, tmp_path):
    settings.MAX_UNFINISHED_JOBS = 2
    first = job_create(actor=acme.member, request=body(file.public_id), idempotency_key="k")
    factories.job(acme.organization, tmp_path, status=JobStatus.RUNNING)
    with pytest.raises(LimitReached) as caught:
        job_create(actor=acme.member, request=body(file.public_id))
    assert (caught.value.status, caught.value.code) == (429, "too_many_unfinished_jobs")
    # Repeating a request that was granted is no new job.
    assert job_create(actor=acme.member, request=body(file.public_id), idempotency_key="k") == first
    theirs = factories.file(northwind.organization, tmp_path)
    assert job_create(actor=northwind.member, request=body(theirs.public_id)).status == JobStatus.VALIDATING
    Job.objects.filter(pk=first.pk).update(status=JobStatus.FAILED)
    assert job_create(actor=acme.member, request=body(file.public_id)).pk != first.pk


def test_an_unknown_model_is_refused(acme, file):
    error = refusal(acme.member, body(file.public_id))
    assert (error.param, error.code) == ("model", "model_not_found")


def test_another_tenants_model_is_unknown(acme, northwind, file, tmp_path):
    factories.base_model(tmp_path / "theirs", name="tiny", of=northwind.organization)
    assert refusal(acme.member, body(file.public_id)).param == "model"


def test_an_unknown_file_is_refused(acme, model):
    error = refusal(acme.member, body("file-nothing"))
    assert (error.param, error.code) == ("training_file", "file_not_found")


def test_another_tenants_file_is_unknown(acme, northwind, model, tmp_path):
    theirs = factories.file(northwind.organization, tmp_path)
    assert refusal(acme.member, body(theirs.public_id)).code == "file_not_found"


def test_a_group_of_one_is_refused(acme, model, file):
    assert refusal(acme.member, body(file.public_id, rl={"group_size": 1})).param == "rl.group_size"


def test_completions_must_leave_room_for_a_prompt(acme, model, file):
    error = refusal(acme.member, body(file.public_id, rl={"sampling": {"max_tokens": 128}}))
    assert error.param == "rl.sampling.max_tokens"
    assert "in the 128 tokens that tiny can be run with" in error.message


def test_a_python_grader_must_compile(acme, model, file):
    grader = {"type": "python", "source": "def grade(sample, item):\n    return 1 +\n"}
    error = refusal(acme.member, body(file.public_id, grader))
    assert error.param == "method.reinforcement.grader"
    assert "line 2" in error.message


def test_a_template_must_be_one(acme, model, file):
    error = refusal(acme.member, body(file.public_id, {**factories.GRADER, "reference": "{{itm.answer}}"}))
    assert "itm.answer" in error.message


def test_a_field_that_no_row_has_is_refused_at_once(acme, model, file):
    error = refusal(acme.member, body(file.public_id, {**factories.GRADER, "reference": "{{item.result}}"}))
    assert "no row of" in error.message and "'result'" in error.message


@pytest.mark.parametrize(
    ("text", "words"), [("a\0b", "U+0000"), ("a\ud800", "surrogate")], ids=["nul", "surrogate"]
)
def test_text_that_no_column_holds_is_refused(acme, model, file, text, words):
    assert words in refusal(acme.member, body(file.public_id, metadata={"note": text})).message


def test_a_backslash_u0000_in_a_graders_source_is_no_nul(acme, model, file):
    source = "def grade(sample, item):\n    return float('\\u0000' in sample['output_text'])\n"
    job = job_create(actor=acme.member, request=body(file.public_id, {"type": "python", "source": source}))
    assert job.spec["grader"]["source"] == source


def test_the_same_key_and_body_make_one_job(acme, model, file):
    request = body(file.public_id)
    first = job_create(actor=acme.member, request=request, idempotency_key="k")
    # Another order of fields is the same body.
    second = job_create(actor=acme.owner, request=dict(reversed(request.items())), idempotency_key="k")
    assert first.pk == second.pk
    assert Job.objects.count() == 1


def test_the_same_key_with_another_body_is_refused(acme, model, file):
    job_create(actor=acme.member, request=body(file.public_id), idempotency_key="k")
    with pytest.raises(InvalidRequest) as caught:
        job_create(actor=acme.member, request=body(file.public_id, seed=1), idempotency_key="k")
    assert caught.value.code == "idempotency_key_reuse"


def test_keys_are_each_tenants_own(acme, northwind, model, file, tmp_path):
    theirs = factories.file(northwind.organization, tmp_path)
    job_create(actor=acme.member, request=body(file.public_id), idempotency_key="k")
    job = job_create(actor=northwind.member, request=body(theirs.public_id), idempotency_key="k")
    assert job.organization == northwind.organization


@pytest.mark.parametrize("key", ["", "x" * 256, "é", "a\nb"])
def test_a_key_has_a_form(acme, model, file, key):
    with pytest.raises(InvalidRequest) as caught:
        job_create(actor=acme.member, request=body(file.public_id), idempotency_key=key)
    assert caught.value.code == "idempotency_key_invalid"


@pytest.mark.django_db(transaction=True)
def test_two_posts_at_once_make_one_job(acme, model, file, monkeypatch):
    """Both have looked for the key and found nothing before either stores."""
    from backend.jobs import services

    monkeypatch.setattr("backend.jobs.services.validate_job.delay", lambda pk: None)
    store, both = services._store, threading.Barrier(2, timeout=30)

    def store_together(*args: Any) -> Job:
        both.wait()
        return store(*args)

    monkeypatch.setattr(services, "_store", store_together)
    found: list[int] = []

    def post() -> None:
        try:
            found.append(job_create(actor=acme.member, request=body(file.public_id), idempotency_key="k").pk)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=post) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == 2 and len(set(found)) == 1
    assert Job.objects.count() == 1
    assert Transition.objects.count() == 1


def test_a_file_deleted_meanwhile_makes_no_job(acme, model, file, monkeypatch):
    """The loser of the race between deleting a file and using it is told so."""
    from backend.jobs import services

    store = services._store

    def delete_first(*args: Any) -> Job:
        file_delete(actor=acme.member, file=file)
        return store(*args)

    monkeypatch.setattr(services, "_store", delete_first)
    assert refusal(acme.member, body(file.public_id)).code == "file_not_found"


def test_the_number_of_queries_is_known(acme, model, file, django_assert_num_queries):
    # Key, limit, model, file; savepoint, lock, job, transition,
    # event (seq, row, bell), release.
    with django_assert_num_queries(10):
        job_create(actor=acme.member, request=body(file.public_id), idempotency_key="k")
