"""What an attempt is launched with: where it starts, what it searches, and its organization's secrets."""

from __future__ import annotations

import logging

import pytest

from backend.jobs.models import Job
from backend.tenants.secrets import secret_put
from backend.tenants.vault import seal
from scheduler.shell.orders import launch_order
from tests import factories
from workers.protocol import Launch
from workers.spec import JobSpec

VALUE = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
JUDGE = {
    "type": "score_model",
    "url": "https://judge.example/v1",
    "model": "judge",
    "input": [{"role": "user", "content": "{{sample.output_text}}"}],
    "secret": "judge",
}
TOOLS = {"type": "tools", "tools": [{"type": "search", "corpus": "file-x"}], "turn_tokens": 8}


def launched(job: Job) -> Launch:
    return launch_order(factories.attempt(job)).launch


def with_spec(job: Job, **fields) -> Job:
    job.spec = JobSpec.model_validate({**job.spec, **fields}).model_dump(mode="json")
    job.save()
    return job


@pytest.mark.django_db
def test_a_plain_job_brings_nothing(tmp_path):
    launch = launched(factories.job(factories.organization(), tmp_path))
    assert (launch.start_path, launch.corpora, launch.secrets) == (None, {}, {})


@pytest.mark.django_db
def test_a_start_is_its_checkpoints_folder(tmp_path):
    organization = factories.organization()
    first = factories.job(organization, tmp_path)
    kept = factories.checkpoint(factories.attempt(first), tmp_path)
    job = factories.job(organization, tmp_path, model=first.base_model, start=kept)
    assert launched(job).start_path == kept.path


@pytest.mark.django_db
def test_a_corpus_is_called_by_its_name(tmp_path):
    organization = factories.organization()
    job = factories.job(organization, tmp_path)
    corpus = factories.file(organization, tmp_path)
    job.searches.add(corpus)
    tools = {**TOOLS, "tools": [{"type": "search", "corpus": corpus.public_id}]}
    assert launched(with_spec(job, environment=tools)).corpora == {corpus.public_id: corpus.path}


@pytest.mark.django_db
def test_secrets_are_ones_own_those_that_are_needed_and_shown_nowhere(tmp_path, caplog):
    organization, other = factories.organization(), factories.organization()
    for of, value in ((organization, VALUE), (other, "theirs")):
        secret_put(actor=factories.actor(of), name="judge", value=value)
    secret_put(actor=factories.actor(organization), name="unneeded", value="x")
    job = with_spec(factories.job(organization, tmp_path), grader=JUDGE)
    with caplog.at_level(logging.DEBUG):
        launch = launched(job)
    assert {name: value.get_secret_value() for name, value in launch.secrets.items()} == {"judge": VALUE}
    shown = [repr(launch), str(launch), launch.model_dump_json(), str(launch.model_dump()), caplog.text]
    assert not [text for text in shown if VALUE in text]
    job.refresh_from_db()
    assert VALUE not in str(job.spec)


@pytest.mark.django_db
def test_a_secret_that_is_gone_or_cannot_be_read_is_left_out(tmp_path, settings):
    organization = factories.organization()
    job = with_spec(factories.job(organization, tmp_path), grader=JUDGE)
    assert launched(job).secrets == {}
    settings.SECRET_KEY, key = "another", settings.SECRET_KEY
    organization.secrets.create(name="judge", token=seal(VALUE))
    settings.SECRET_KEY = key
    another = with_spec(factories.job(organization, tmp_path), grader=JUDGE)
    assert launched(another).secrets == {}
