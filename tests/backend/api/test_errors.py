"""One envelope for every error, and a name for every request."""

from __future__ import annotations

import pytest
from asgiref.sync import async_to_sync
from django.test import AsyncClient
from rest_framework.exceptions import Throttled, ValidationError

from backend.api.errors import exception_handler


def error_of(response) -> dict:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def test_not_json(acme):
    response = acme.client.post("/v1/fine_tuning/jobs", b'{"model": ', content_type="application/json")
    assert response.status_code == 400
    assert error_of(response)["code"] == "parse_error"


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"seed": NaN}', b"1" * 5_000, b"\xff\xff", b"[]", b"null", b'"text"'],
    ids=["nested", "NaN", "a long number", "not UTF-8", "a list", "null", "a text"],
)
def test_json_that_is_no_request(content, acme):
    response = acme.client.post("/v1/fine_tuning/jobs", content, content_type="application/json")
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


def test_another_media_type(acme):
    response = acme.client.post(
        "/v1/fine_tuning/jobs", b"a=1", content_type="application/x-www-form-urlencoded"
    )
    assert response.status_code == 415
    assert error_of(response)["code"] == "unsupported_media_type"


def test_a_verb_that_is_not_offered(acme):
    response = acme.client.put("/v1/fine_tuning/jobs", {}, format="json")
    assert response.status_code == 405
    assert error_of(response)["code"] == "method_not_allowed"
    assert "GET" in response.headers["Allow"]


def test_a_body_too_large_is_refused_by_its_length(acme):
    response = acme.client.post(
        "/v1/fine_tuning/jobs", b"{}", content_type="application/json", CONTENT_LENGTH=str(5 << 20)
    )
    assert response.status_code == 413
    assert error_of(response)["code"] == "too_large"


@pytest.mark.parametrize(
    ("credentials", "code"),
    [("", "missing_api_key"), ("Bearer jsk-wrong", "invalid_api_key"), ("Basic abc", "invalid_api_key")],
)
@pytest.mark.django_db
def test_a_key_that_opens_nothing(credentials, code, anonymous):
    response = anonymous.get("/v1/models", **({"HTTP_AUTHORIZATION": credentials} if credentials else {}))
    assert response.status_code == 401
    assert error_of(response)["code"] == code
    assert error_of(response)["type"] == "authentication_error"


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=x", "limit=-1", "limit=9999999999999999999", "after=nobody"]
)
def test_query_parameters_are_checked_by_name(query, acme):
    response = acme.client.get(f"/v1/fine_tuning/jobs?{query}")
    assert response.status_code == 400
    assert error_of(response)["param"] == query.partition("=")[0]


def test_a_nul_in_a_query_parameter(acme):
    assert acme.client.get("/v1/files?after=a%00b").status_code == 400
    assert acme.client.get("/v1/files?purpose=a%00b").status_code == 400


def test_an_error_of_ours_tells_its_request_and_nothing_else(acme, monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise RuntimeError("secret detail")

    monkeypatch.setattr("backend.api.catalog.models_all", broken)
    response = acme.client.get("/v1/models")
    assert response.status_code == 500
    error = error_of(response)
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "secret" not in error["message"]
    assert response.headers["X-Request-Id"] in error["message"]
    assert "secret detail" in caplog.text and response.headers["X-Request-Id"] in caplog.text


def test_every_answer_has_a_request_id_of_its_own(acme):
    ids = {acme.client.get("/v1/models", HTTP_X_REQUEST_ID="mine").headers["X-Request-Id"] for _ in range(2)}
    assert len(ids) == 2 and "mine" not in ids


def test_a_throttled_request_is_told_when_to_come_again():
    response = exception_handler(Throttled(wait=7), {})
    assert (response.status_code, response.headers["Retry-After"]) == (429, "7")
    assert response.data["error"]["code"] == "rate_limit_exceeded"


def test_a_serializers_errors_become_a_dotted_path():
    detail = {"method": {"grader": [{}, {"name": ["too long", "empty"]}]}}
    error = exception_handler(ValidationError(detail), {}).data["error"]
    assert (error["param"], error["message"]) == ("method.grader.1.name", "too long")
    assert exception_handler(ValidationError("no"), {}).data["error"]["param"] is None


@pytest.mark.django_db
def test_health(anonymous):
    response = anonymous.get("/healthz")
    assert (response.status_code, response.json()) == (200, {"status": "ok", "database": "ok"})


@pytest.mark.django_db
def test_health_for_a_probe_that_knows_neither_the_name_nor_https(anonymous, settings):
    settings.SECURE_SSL_REDIRECT = True
    settings.ALLOWED_HOSTS = ["train.example.com"]
    assert anonymous.get("/healthz", HTTP_HOST="10.0.0.7:8000").status_code == 200
    assert anonymous.post("/healthz", HTTP_HOST="10.0.0.7:8000").status_code == 405
    assert anonymous.get("/v1/models", HTTP_HOST="train.example.com").status_code == 301


@pytest.mark.django_db(transaction=True)
def test_health_under_asgi(settings):
    settings.ALLOWED_HOSTS = ["train.example.com"]
    response = async_to_sync(AsyncClient().get)("/healthz")
    assert (response.status_code, response.json()["status"]) == (200, "ok")


@pytest.mark.django_db
def test_health_without_a_database(anonymous, monkeypatch):
    from django.db import OperationalError
    from django.db.backends.utils import CursorWrapper

    def fail(self, sql, params=None):
        raise OperationalError("gone")

    monkeypatch.setattr(CursorWrapper, "execute", fail)
    response = anonymous.get("/healthz")
    assert (response.status_code, response.json()["status"]) == (503, "unavailable")
