"""Data against algorithms, environments and graders: at submit, and row by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backend.catalog.models import Corpus, File
from backend.common.errors import Conflict, InvalidRequest
from backend.jobs import tasks
from backend.jobs.models import Job
from backend.jobs.selectors import job_corpora
from backend.jobs.services import file_delete, job_create
from backend.jobs.states import JobStatus
from backend.tenants.secrets import secret_put
from tests import factories


@pytest.fixture
def model(db, tmp_path):
    """A token a character, and a context of 128."""
    folder = factories.model_folder(tmp_path / "tiny")
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "eos_token": "<eos>"})
    )
    return factories.base_model(folder, name="tiny")


def talk(prompt: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


def pair(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    return factories.row(prompt, chosen=chosen, rejected=rejected)


def openai_pair(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    outputs = [[{"role": "assistant", "content": text}] for text in (chosen, rejected)]
    asked = {"messages": [{"role": "user", "content": prompt}]}
    return {"input": asked, "preferred_output": outputs[0], "non_preferred_output": outputs[1]}


@pytest.fixture
def submit(acme, model, tmp_path):
    def made(rows: list[dict[str, Any]], **fields: Any) -> Job:
        file = factories.file(acme.organization, tmp_path, rows=rows)
        body = {"model": "tiny", "training_file": file.public_id, **fields}
        return job_create(actor=acme.member, request=body)

    return made


def checked(job: Job) -> Job:
    tasks.validate_job(job.pk)
    job.refresh_from_db()
    return job


SFT, DPO = {"method": {"type": "supervised"}}, {"method": {"type": "dpo"}}
GAME = {"type": "guessing_game"}


@pytest.mark.parametrize(
    ("rows", "fields"),
    [
        ([talk("2 + 2 = ?", "4")] * 4, SFT),
        ([pair("2 + 2 = ?", "4", "5")] * 4, DPO),
        ([openai_pair("2 + 2 = ?", "4", "5")] * 4, DPO),
    ],
)
def test_examples_in_their_shapes_are_accepted(submit, rows, fields):
    job = checked(submit(rows, **fields))
    assert (job.status, job.detail) == (JobStatus.QUEUED, "")


@pytest.mark.parametrize(
    ("rows", "fields", "words"),
    [
        ([factories.row(answer="4")] * 4, SFT, "None of the 4 rows"),
        ([factories.row(answer="4")] * 4, DPO, "None of the 4 rows"),
        ([talk("a", "b")] * 4, {"grader": factories.GRADER}, "None of the 4 rows"),
        ([talk("a", "b"), *[factories.row(answer="4")] * 3], SFT, "Only 1 of the 4 rows"),
    ],
)
def test_rows_of_another_kind_are_refused_at_once(submit, rows, fields, words):
    with pytest.raises(InvalidRequest) as caught:
        submit(rows, **fields)
    assert caught.value.param == "training_file"
    assert words in caught.value.message


def test_a_file_of_before_kinds_were_counted_is_read_by_the_check(submit):
    job = submit([talk("a", "b")] * 2, **SFT)
    File.objects.update(kinds={})
    rows = [talk("a", "b"), factories.row(answer="4")]
    factories.write_rows(Path(job.training_file.path), rows)
    assert checked(job).detail == "row 2: its last message must be the assistant's"


def test_an_example_that_is_too_long_is_named(submit):
    rows = [talk("a", "b"), talk("a", "x" * 64)]
    assert checked(submit(rows, **SFT)).detail == (
        "row 2: messages: what follows the prompt has 65 tokens, rl.sampling.max_tokens is 64"
    )
    fits = [talk("a", "b"), talk("a" * 63, "x" * 63)]
    assert checked(submit(fits, **SFT)).status == JobStatus.QUEUED
    rows = [pair("a" * 70, "x" * 59, "y")]
    assert checked(submit(rows, **DPO)).detail == (
        "row 1: prompt and completion have 130 tokens, the limit is 128"
    )


def test_rows_that_an_environment_cannot_begin_with_are_named(submit):
    rows = [factories.row("guess", number=7), factories.row("guess", number="7")]
    job = checked(submit(rows, environment=GAME))
    assert job.detail == "row 2: number must be a whole number"
    grid = {"type": "grid_world", "map_field": "map"}
    rows = [factories.row("go", map="S.G"), factories.row("go", map="S#G")]
    assert checked(submit(rows, environment=grid)).detail == "row 2: map has no way from S to G"
    chat = {"environment": {"type": "chat"}, "grader": {**factories.GRADER, "reference": "x"}}
    rows = [factories.row("go", turns=["and?"]), factories.row("go", turns="and?")]
    assert checked(submit(rows, **chat)).detail == "row 2: turns must be a list of texts"


@pytest.mark.parametrize(
    ("environment", "param", "words"),
    [
        (GAME, "environment.number_field", "no row of"),
        ({"type": "grid_world"}, "environment.map_field", "no row of"),
        (
            {"type": "python", "source": "class Environment:\n  def step(self\n"},
            "environment.source",
            "line 2",
        ),
        ({"type": "python", "source": "class Env:\n  pass\n"}, "environment.source", "Environment"),
        ({"type": "remote", "url": "http://127.0.0.1/", "secret": "s"}, "environment.url", "public"),
        (
            {"type": "remote", "url": "https://a.example/", "secret": "s"},
            "environment.secret",
            "no secret 's'",
        ),
        ({"type": "oracle"}, "environment", "'oracle' is not one of"),
        ({"type": "guessing_game", "max_turns": 0}, "environment.max_turns", "greater than"),
        ({**GAME, "turn_tokens": 65}, "environment.turn_tokens", "bounds the episode"),
    ],
)
def test_an_environment_that_cannot_be_is_refused_by_its_field(submit, environment, param, words):
    with pytest.raises(InvalidRequest) as caught:
        submit(factories.rows_with_answers(4), environment=environment)
    assert caught.value.param == param
    assert words in caught.value.message


def test_a_prompt_is_as_long_as_what_tools_add_to_it(submit):
    tools = {"type": "tools", "tools": [{"type": "calculator"}], "turn_tokens": 8}
    job = checked(submit(factories.rows_with_answers(2), environment=tools, grader=factories.GRADER))
    assert job.detail.startswith("row 1: the prompt has") and "the limit is 64" in job.detail


# ---------------------------------------------------------------- corpora and secrets


def search(corpus: str) -> dict[str, Any]:
    return {"type": "tools", "tools": [{"type": "search", "corpus": corpus}], "turn_tokens": 8}


def corpus_file(of, folder) -> File:
    file = factories.file(of, folder)
    File.objects.filter(pk=file.pk).update(purpose="corpus")
    return file


def test_a_job_searches_its_own_files_and_built_in_ones(acme, submit, tmp_path):
    own = corpus_file(acme.organization, tmp_path)
    Corpus.objects.create(name="land", title="A land", path="/data/land.jsonl", passages=3)
    rows = factories.rows_with_answers(4)
    job = submit(rows, environment=search(own.public_id), grader=factories.GRADER)
    assert job_corpora(job) == {own.public_id: own.path}
    assert job_corpora(submit(rows, environment=search("land"), grader=factories.GRADER)) == {
        "land": "/data/land.jsonl"
    }
    with pytest.raises(Conflict):
        file_delete(actor=acme.member, file=own)
    Job.objects.update(status=JobStatus.SUCCEEDED)
    file_delete(actor=acme.member, file=own)


def test_another_tenants_corpus_is_unknown_and_training_files_are_none(acme, northwind, submit, tmp_path):
    rows = factories.rows_with_answers(4)
    theirs = corpus_file(northwind.organization, tmp_path)
    for name in (theirs.public_id, "nowhere"):
        with pytest.raises(InvalidRequest) as caught:
            submit(rows, environment=search(name), grader=factories.GRADER)
        assert (caught.value.param, caught.value.code) == ("environment.tools", "corpus_not_found")
    own = factories.file(acme.organization, tmp_path)
    with pytest.raises(InvalidRequest) as caught:
        submit(rows, environment=search(own.public_id), grader=factories.GRADER)
    assert "uploaded for training" in caught.value.message


def test_a_corpus_is_not_trained_on(acme, model, tmp_path):
    file = corpus_file(acme.organization, tmp_path)
    body = {"model": "tiny", "training_file": file.public_id, "grader": factories.GRADER}
    with pytest.raises(InvalidRequest) as caught:
        job_create(actor=acme.member, request=body)
    assert caught.value.param == "training_file"


JUDGE = {
    "type": "score_model",
    "url": "https://judge.example/v1",
    "model": "judge",
    "input": [{"role": "user", "content": "{{sample.output_text}} {{item.answer}}"}],
    "secret": "judge",
}


def test_a_grader_needs_its_secret_of_its_own_organization(acme, northwind, submit):
    rows = factories.rows_with_answers(4)
    secret_put(actor=northwind.member, name="judge", value="theirs")
    with pytest.raises(InvalidRequest) as caught:
        submit(rows, grader=JUDGE)
    assert (caught.value.param, caught.value.code) == ("grader", "secret_not_found")
    secret_put(actor=acme.member, name="judge", value="ours")
    job = submit(rows, grader=JUDGE)
    assert "ours" not in str(job.spec)
    with pytest.raises(InvalidRequest) as caught:
        submit(rows, grader={**JUDGE, "input": [{"role": "user", "content": "{{item.nothing}}"}]})
    assert "'nothing'" in caught.value.message
