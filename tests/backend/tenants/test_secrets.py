"""Secrets of organizations: kept encrypted, each tenant's own, and shown nowhere."""

from __future__ import annotations

import io
import logging
import pickle
import traceback

import pytest
from django.core import serializers

from backend.common.errors import Forbidden, InvalidRequest, LimitReached, NotFound
from backend.tenants import secrets as services
from backend.tenants.models import Secret
from backend.tenants.secrets import (
    secret_access,
    secret_delete,
    secret_put,
    secrets_all,
    secrets_missing,
    secrets_open,
)
from tests import factories

VALUE = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def opened(organization, *names: str) -> dict[str, str]:
    return {name: value.get_secret_value() for name, value in secrets_open(organization, names).items()}


def test_a_value_comes_back_for_its_own_organization_only(acme, northwind):
    secret_put(actor=acme.member, name="key", value=VALUE)
    assert opened(acme.organization, "key") == {"key": VALUE}
    assert opened(northwind.organization, "key") == {}
    assert secrets_missing(northwind.organization, {"key"}) == ["key"]
    assert secrets_missing(acme.organization, {"key", "other"}) == ["other"]


def test_two_tenants_may_use_one_name(acme, northwind):
    secret_put(actor=acme.member, name="key", value="ours")
    secret_put(actor=northwind.member, name="key", value="theirs")
    assert opened(acme.organization, "key") == {"key": "ours"}
    assert opened(northwind.organization, "key") == {"key": "theirs"}
    with pytest.raises(NotFound):
        secret_access(factories.actor(factories.organization()), "key")


def test_a_value_is_replaced_under_its_name(acme):
    first = secret_put(actor=acme.member, name="key", value="old")
    assert secret_put(actor=acme.member, name="key", value="new").pk == first.pk
    assert opened(acme.organization, "key") == {"key": "new"}


def test_what_is_deleted_is_gone(acme):
    secret = secret_put(actor=acme.member, name="key", value=VALUE)
    secret_delete(actor=acme.member, secret=secret)
    assert secrets_all(acme.organization) == []
    assert opened(acme.organization, "key") == {}


def test_a_viewer_changes_nothing(acme):
    with pytest.raises(Forbidden):
        secret_put(actor=acme.viewer, name="key", value=VALUE)
    kept = secret_put(actor=acme.member, name="key", value=VALUE)
    with pytest.raises(Forbidden):
        secret_delete(actor=acme.viewer, secret=kept)
    with pytest.raises(Forbidden):
        secret_access(acme.viewer, "key", write=True)
    assert secret_access(acme.viewer, "key") == kept


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("", VALUE, "name"),
        ("1key", VALUE, "name"),
        ("a key", VALUE, "name"),
        ("k" * 65, VALUE, "name"),
        ("key\0", VALUE, "name"),
        ("schlüssel", VALUE, "name"),
        ("key", "", "value"),
        ("key", "two\nlines", "value"),
        ("key", "x" * 4_097, "value"),
    ],
)
def test_names_and_values_have_a_form(acme, name, value, param):
    with pytest.raises(InvalidRequest) as caught:
        secret_put(actor=acme.member, name=name, value=value)
    assert caught.value.param == param
    assert not value or value not in caught.value.message


def test_an_organization_has_so_many_and_may_still_change_them(acme, monkeypatch):
    monkeypatch.setattr(services, "MAX_SECRETS", 2)
    for name in ("a", "b"):
        secret_put(actor=acme.member, name=name, value="1")
    with pytest.raises(LimitReached):
        secret_put(actor=acme.member, name="c", value="1")
    secret_put(actor=acme.member, name="b", value="2")


def test_the_database_holds_no_value_and_each_writing_another_text(acme):
    kept = secret_put(actor=acme.member, name="key", value=VALUE)
    before = bytes(Secret.objects.get(pk=kept.pk).token)
    assert VALUE.encode() not in before
    secret_put(actor=acme.member, name="key", value=VALUE)
    assert bytes(Secret.objects.get(pk=kept.pk).token) != before


def test_another_key_of_the_settings_opens_nothing_and_an_earlier_one_does(acme, settings, caplog):
    secret_put(actor=acme.member, name="key", value=VALUE)
    old, settings.SECRET_KEY = settings.SECRET_KEY, "another"
    with caplog.at_level(logging.ERROR):
        assert opened(acme.organization, "key") == {}
    assert "key" in caplog.text and VALUE not in caplog.text
    settings.SECRET_KEY_FALLBACKS = [old]
    assert opened(acme.organization, "key") == {"key": VALUE}


def test_no_text_of_a_secret_holds_its_value(acme):
    kept = secret_put(actor=acme.member, name="key", value=VALUE)
    found = secrets_open(acme.organization, {"key"})
    shown = [str(kept), repr(kept), serializers.serialize("json", [kept]), str(found), repr(found)]
    try:
        raise ValueError(found)
    except ValueError:
        stream = io.StringIO()
        traceback.print_exc(file=stream)
        shown.append(stream.getvalue())
    assert not [text for text in shown if VALUE in text]
    # It travels to the pipeline whole.
    assert pickle.loads(pickle.dumps(found["key"])).get_secret_value() == VALUE
