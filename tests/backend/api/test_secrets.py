"""Secrets through the API: names come back, values never."""

from __future__ import annotations

import logging

import pytest

from backend.api import secrets as view

VALUE = "open sesame, and quickly"


def put(client, **body):
    return client.post("/v1/secrets", body, format="json")


def test_a_secret_is_made_listed_and_deleted_without_its_value_being_shown(acme, northwind):
    made = put(acme.client, name="judge", value=VALUE)
    listed = acme.client.get("/v1/secrets")
    assert made.json()["id"] == "judge"
    assert [row["name"] for row in listed.json()["data"]] == ["judge"]
    assert VALUE not in made.content.decode() + listed.content.decode()
    assert northwind.client.get("/v1/secrets").json()["data"] == []
    assert northwind.client.delete("/v1/secrets/judge").status_code == 404
    assert acme.client.delete("/v1/secrets/judge").json() == {
        "id": "judge",
        "object": "secret",
        "deleted": True,
    }
    assert acme.client.get("/v1/secrets").json()["data"] == []
    assert acme.client.get("/v1/secrets/judge").status_code == 405


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"value": VALUE}, "name"),
        ({"name": "judge", "value": 7}, "value"),
        ({"name": "judge", "value": {"nested": VALUE}}, "value"),
        ({"name": "judge", "value": VALUE + "\n"}, "value"),
        ({"name": "judge", "value": VALUE, "note": VALUE}, None),
        ({"name": VALUE, "value": VALUE}, "name"),
    ],
)
def test_a_refusal_repeats_nothing(acme, body, param, caplog):
    with caplog.at_level(logging.DEBUG):
        response = put(acme.client, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert VALUE not in response.content.decode() + caplog.text


def test_an_error_of_ours_logs_no_value(acme, monkeypatch, caplog):
    def broken(**_):
        raise RuntimeError("the database is away")

    monkeypatch.setattr(view, "secret_put", broken)
    with caplog.at_level(logging.DEBUG):
        response = put(acme.client, name="judge", value=VALUE)
    assert response.status_code == 500
    assert "the database is away" in caplog.text
    assert VALUE not in response.content.decode() + caplog.text
