"""Every route and verb against another tenant, nobody, and a role too low.

The table is held against the URLconf: a new route or verb that is not in it breaks the build.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.urls import get_resolver, reverse

from backend.api import urls
from backend.jobs.states import JobStatus
from backend.tenants.secrets import secret_put
from tests import factories


@dataclass(frozen=True)
class Case:
    """One verb of one route. ``ids`` names what the path holds; without any it reaches nobody's data."""

    route: str
    verb: str
    ids: tuple[str, ...] = ()
    body: Callable[[], dict[str, Any]] | None = None
    writes: bool = False


def upload() -> dict[str, Any]:
    content = b'{"messages": [{"role": "user", "content": "2 + 2 = ?"}], "answer": "4"}\n'
    return {"data": {"purpose": "fine-tune", "file": SimpleUploadedFile("a.jsonl", content)}}


def secret() -> dict[str, Any]:
    return {"data": {"name": "key", "value": "open sesame"}, "format": "json"}


def nothing() -> dict[str, Any]:
    return {"data": {}, "format": "json"}


CASES = [
    Case("files", "get"),
    Case("files", "post", body=upload, writes=True),
    Case("file", "get", ("file_id",)),
    Case("file", "delete", ("file_id",), writes=True),
    Case("file_content", "get", ("file_id",)),
    Case("models", "get"),
    Case("model", "get", ("name",)),
    Case("datasets", "get"),
    Case("secrets", "get"),
    Case("secrets", "post", body=secret, writes=True),
    Case("secret", "delete", ("secret_name",), writes=True),
    Case("grader_run", "post", body=nothing, writes=True),
    Case("grader_validate", "post", body=nothing, writes=True),
    Case("jobs", "get"),
    Case("jobs", "post", body=nothing, writes=True),
    Case("job", "get", ("job_id",)),
    Case("job_cancel", "post", ("job_id",), body=nothing, writes=True),
    Case("job_events", "get", ("job_id",)),
    Case("job_metrics", "get", ("job_id",)),
    Case("job_samples", "get", ("job_id",)),
    Case("job_checkpoints", "get", ("job_id",)),
    Case("job_checkpoint_content", "get", ("job_id", "checkpoint_id")),
    Case("job_transitions", "get", ("job_id",)),
]
#: Answers 404 to everybody: there is nothing behind it.
EXEMPT = {"unknown"}
#: The same for every tenant.
SHARED = {"datasets"}


def label(case: Case) -> str:
    return f"{case.verb} {case.route}"


def verbs_of(pattern: Any) -> set[str]:
    view = pattern.callback.cls
    return {verb for verb in view.http_method_names if verb != "options" and hasattr(view, verb)}


def send(client: Any, case: Case, ids: dict[str, str]) -> Any:
    kwargs = {name.removeprefix("secret_"): ids[name] for name in case.ids}
    url = reverse(f"api:{case.route}", kwargs=kwargs)
    return getattr(client, case.verb)(url, **(case.body() if case.body else {}))


@pytest.fixture
def northwinds(northwind, tmp_path) -> dict[str, str]:
    """Ids of everything that Northwind has."""
    job = factories.job(northwind.organization, tmp_path, status=JobStatus.RUNNING)
    kept = factories.checkpoint(factories.attempt(job), tmp_path)
    own = factories.base_model(tmp_path / "own", of=northwind.organization)
    secret_put(actor=northwind.member, name="theirs", value="open sesame")
    return {
        "secret_name": "theirs",
        "file_id": job.training_file.public_id,
        "job_id": job.public_id,
        "checkpoint_id": kept.public_id,
        "name": own.name,
    }


def test_every_route_and_verb_has_a_case():
    offered = {
        (pattern.name, verb)
        for pattern in urls.urlpatterns
        for verb in verbs_of(pattern)
        if pattern.name not in EXEMPT
    }
    assert offered == {(case.route, case.verb) for case in CASES}


def test_the_api_is_mounted_nowhere_else():
    mounted = [str(entry.pattern) for entry in get_resolver().url_patterns]
    assert [path for path in mounted if path.startswith("v")] == ["v1/"]


@pytest.mark.parametrize("case", [case for case in CASES if case.ids], ids=label)
def test_another_tenants_ids_are_not_found(case, acme, northwinds):
    response = send(acme.client, case, northwinds)
    assert response.status_code == 404
    assert response.json()["error"]["code"] in {"not_found", "model_not_found"}


@pytest.mark.parametrize("case", [case for case in CASES if case.ids], ids=label)
def test_another_tenants_viewer_learns_no_more(case, acme, northwinds):
    assert send(acme.viewer_client, case, northwinds).status_code == 404


@pytest.mark.parametrize("case", [case for case in CASES if case.verb == "get" and not case.ids], ids=label)
def test_lists_hold_nothing_of_another_tenant(case, acme, northwind, northwinds):
    theirs = send(northwind.client, case, {}).json()["data"]
    ours = send(acme.client, case, {}).json()["data"]
    if case.route in SHARED:
        assert ours == theirs
    else:
        assert theirs
        assert not {row["id"] for row in ours} & set(northwinds.values())


@pytest.mark.parametrize("case", CASES, ids=label)
def test_without_a_key_nothing_opens(case, anonymous, northwinds):
    response = send(anonymous, case, northwinds)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "missing_api_key"
    assert response.headers["WWW-Authenticate"].startswith("Bearer")


@pytest.mark.parametrize("case", [case for case in CASES if case.writes], ids=label)
def test_a_viewers_key_changes_nothing(case, northwind, northwinds):
    response = send(northwind.viewer_client, case, northwinds)
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "insufficient_role"


@pytest.mark.parametrize("case", [case for case in CASES if case.verb == "get"], ids=label)
@pytest.mark.django_db(transaction=True)
def test_a_viewers_key_reads(case, northwind, northwinds):
    assert send(northwind.viewer_client, case, northwinds).status_code == 200


@pytest.mark.parametrize("verb", ["get", "post", "put", "patch", "delete"])
def test_an_unknown_route_speaks_json(verb, anonymous):
    response = getattr(anonymous, verb)("/v1/fine_tuning/nothing")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


def test_an_id_of_another_form_reaches_no_query(acme, django_assert_num_queries):
    with django_assert_num_queries(0):
        assert acme.client.get("/v1/files/x%00y").status_code == 404
