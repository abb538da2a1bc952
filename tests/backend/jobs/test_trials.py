"""Trying graders: what the API answers, what it refuses, and whose turn it is."""

from __future__ import annotations

import json
import logging

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from backend.jobs import trials
from backend.tenants.secrets import secret_put
from tests import factories

RUN, VALIDATE = "/v1/fine_tuning/alpha/graders/run", "/v1/fine_tuning/alpha/graders/validate"
PYTHON = {"type": "python", "source": "def grade(sample, item):\n    return len(sample['output_text'])\n"}


@pytest.fixture
def queue(redis_url, monkeypatch):
    """Tasks run where they are sent from; answers go through the real server."""
    monkeypatch.setattr(trials.try_grader, "apply_async", lambda args, **_: trials.try_grader(*args))
    # The test's own transaction is on it.
    monkeypatch.setattr(trials, "close_old_connections", lambda: None)
    return trials._redis()


def post(client, url, **body):
    return client.post(url, body, format="json")


def test_a_run_grades_one_completion(acme, queue):
    sample = {"model_sample": "4", "item": {"answer": "4"}}
    found = post(acme.client, RUN, grader=factories.GRADER, **sample).json()
    assert (found["reward"], found["metadata"]["name"], found["metadata"]["type"]) == (
        1.0,
        "exact",
        "string_check",
    )
    assert not any(found["metadata"]["errors"].values())
    assert queue.keys("trial*") == []


def test_a_graders_own_code_runs_and_its_errors_are_the_answer(acme, queue):
    assert post(acme.client, RUN, grader=PYTHON, model_sample="four").json()["reward"] == 4.0
    broken = {"type": "python", "source": "def grade(sample, item):\n    return item['nothing']\n"}
    found = post(acme.client, RUN, grader=broken, model_sample="four").json()
    assert found["reward"] is None
    assert found["metadata"]["errors"]["python_grader_runtime_error"] is True


def test_validate_gives_the_grader_with_its_defaults(acme):
    grader = {"type": "string_check", "reference": "{{item.answer}}"}
    found = post(acme.client, VALIDATE, grader=grader).json()["grader"]
    assert (found["operation"], found["input"]) == ("eq", "{{sample.output_text}}")


@pytest.mark.parametrize("url", [RUN, VALIDATE])
@pytest.mark.parametrize(
    ("grader", "param", "words"),
    [
        ({"type": "string_check"}, "grader.reference", "required"),
        ({"type": "oracle"}, "grader", "'oracle' is not one of"),
        ({**factories.GRADER, "reference": "{{itm.x}}"}, "grader", "itm.x"),
        ({"type": "python", "source": "def grade(sample, item):\n    return 1 +\n"}, "grader", "line 2"),
        (None, "grader", "required"),
    ],
)
def test_a_grader_that_could_grade_nothing_is_refused(acme, url, grader, param, words):
    body = {"grader": grader, **({"model_sample": "x"} if url == RUN else {})}
    response = post(acme.client, url, **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"]


def test_a_run_needs_a_sample(acme):
    assert post(acme.client, RUN, grader=factories.GRADER).json()["error"]["param"] == "model_sample"


def test_an_organization_tries_one_at_a_time_and_others_meanwhile(acme, northwind, queue):
    queue.set(f"trial:{acme.organization.pk}", "another", ex=60)
    body = {"grader": factories.GRADER, "model_sample": "4", "item": {"answer": "4"}}
    refused = post(acme.client, RUN, **body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "grader_busy")
    assert post(northwind.client, RUN, **body).status_code == 200
    queue.delete(f"trial:{acme.organization.pk}")
    assert post(acme.client, RUN, **body).status_code == 200


def test_what_takes_too_long_is_an_error_of_the_graders(acme, queue, monkeypatch):
    def slow(*_, **__):
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(trials, "run_grader", slow)
    found = post(acme.client, RUN, grader=factories.GRADER, model_sample="4").json()
    assert (found["reward"], found["error"]["type"]) == (None, "timeout")


def test_no_process_that_takes_it_is_said(acme, queue, monkeypatch):
    monkeypatch.setattr(trials.try_grader, "apply_async", lambda *_, **__: None)
    monkeypatch.setattr(trials, "WAIT_SECONDS", 1)
    response = post(acme.client, RUN, grader=factories.GRADER, model_sample="4")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "graders_busy")
    assert queue.keys("trial*") == []


VALUE = "sk-very-secret"
JUDGE = {
    "type": "score_model",
    "url": "https://judge.example/v1",
    "model": "judge",
    "input": [{"role": "user", "content": "{{sample.output_text}}"}],
    "secret": "judge",
}


def test_a_secret_reaches_the_grader_and_no_message(acme, northwind, queue, monkeypatch, caplog):
    sent, seen = [], []
    send = trials.try_grader.apply_async
    monkeypatch.setattr(
        trials.try_grader, "apply_async", lambda args, **k: sent.append(json.dumps(args)) or send(args, **k)
    )

    def graded(grader, item, text, *, secrets):
        seen.append(secrets)
        return {"reward": 1.0}

    monkeypatch.setattr(trials, "run_grader", graded)
    secret_put(actor=northwind.member, name="judge", value="theirs")
    refused = post(acme.client, RUN, grader=JUDGE, model_sample="4").json()["error"]
    assert (refused["param"], refused["code"]) == ("grader", "secret_not_found")
    secret_put(actor=acme.member, name="judge", value=VALUE)
    with caplog.at_level(logging.DEBUG):
        response = post(acme.client, RUN, grader=JUDGE, model_sample="4")
    assert seen == [{"judge": VALUE}]
    assert len(sent) == 1
    assert VALUE not in sent[0] + caplog.text + response.content.decode()
