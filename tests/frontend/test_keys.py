"""The API keys' page: who sees which keys, who makes and ends them, and where a secret is and is not."""

from __future__ import annotations

import logging
import re

import pytest
from django.contrib.sessions.models import Session
from django.test import Client
from django.urls import reverse

from backend.tenants.access import api_key_actor
from backend.tenants.models import ApiKey, Role
from tests import factories
from tests.frontend.conftest import Tenant, signed_in

KEYS = reverse("web:keys")
SECRET = re.compile(r"jsk-[A-Za-z0-9]{32}")


def manager(of: Tenant, role: Role) -> Client:
    return signed_in(factories.member(of.organization, role))


def revoke_url(key: ApiKey) -> str:
    return reverse("web:key_revoke", args=[key.pk])


@pytest.fixture
def owner(acme: Tenant) -> Client:
    return manager(acme, Role.OWNER)


@pytest.mark.parametrize("role", [Role.OWNER, Role.ADMIN])
def test_owners_and_admins_make_a_key_that_opens_their_organization(acme, role):
    answer = manager(acme, role).post(KEYS, {"name": " laptop ", "role": "viewer"})
    assert answer.status_code == 201
    assert "no-store" in answer["Cache-Control"]
    page = answer.content.decode()
    (secret,) = set(SECRET.findall(page))
    actor = api_key_actor(secret)
    assert (actor.organization, actor.role, actor.key.name) == (acme.organization, Role.VIEWER, "laptop")
    assert actor.key.created_by.email in page
    assert (
        f"export JIGSAW_URL=http://testserver\nexport JIGSAW_API_KEY={secret}\ncurl $JIGSAW_URL/v1/models"
        in page
    )


def test_a_secret_is_in_the_answer_that_made_it_and_nowhere_else(acme, owner, caplog):
    with caplog.at_level(logging.DEBUG):
        made = owner.post(KEYS, {"name": "laptop", "role": "member"})
        (secret,) = set(SECRET.findall(made.content.decode()))
        later = [
            owner.get(KEYS),
            owner.get(reverse("web:jobs")),
            owner.post(revoke_url(ApiKey.objects.get())),
        ]
    for answer in later:
        assert secret not in answer.content.decode() and secret not in str(answer.headers)
    assert secret not in caplog.text
    assert secret not in str(made.headers) and not made.cookies.get("messages")
    assert all(secret not in str(session.get_decoded()) for session in Session.objects.all())
    assert all(secret not in str(row) for row in ApiKey.objects.values())


def test_the_list_tells_whose_a_key_is_and_whether_it_is_used(acme, owner):
    unused, _ = factories.api_key(acme.organization, Role.VIEWER)
    _, secret = factories.api_key(acme.organization)
    api_key_actor(secret)
    page = owner.get(KEYS).content.decode()
    rows = page.split("<tbody>")[1].split("</tr>")
    assert "just now" in rows[0] and "UTC" in rows[0] and secret[:12] in rows[0] and secret not in page
    for said in (unused.name, unused.prefix, "Viewer", "never", "the service", "Valid"):
        assert said in rows[1]


def test_members_see_their_organizations_keys_and_may_not_touch_them(acme, northwind, stranger):
    key, secret = factories.api_key(acme.organization)
    for client in (acme.client, acme.viewer):
        page = client.get(KEYS).content.decode()
        assert key.prefix in page and "Only owners and admins" in page
        assert revoke_url(key) not in page and "Create key" not in page
        assert client.post(KEYS, {"name": "mine", "role": "viewer"}).status_code == 403
        assert client.post(revoke_url(key)).status_code == 403
    assert key.prefix not in manager(northwind, Role.OWNER).get(KEYS).content.decode()
    assert manager(northwind, Role.OWNER).post(revoke_url(key)).status_code == 404
    for method in (stranger.get, stranger.post):
        assert method(KEYS).status_code == 404
        assert Client().generic(method.__name__.upper(), KEYS).status_code == 302
    assert stranger.post(revoke_url(key)).status_code == 404
    assert Client().post(revoke_url(key)).status_code == 302
    assert api_key_actor(secret) is not None and ApiKey.objects.count() == 1


def test_an_operator_looks_and_makes_nothing(acme):
    operator = signed_in(factories.user(is_staff=True))
    assert operator.get(KEYS).status_code == 200
    assert operator.post(KEYS, {"name": "mine", "role": "viewer"}).status_code == 403


def test_a_revoked_key_opens_nothing_and_says_so(acme, owner):
    key, secret = factories.api_key(acme.organization)
    assert f'hx-post="{revoke_url(key)}"' in owner.get(KEYS).content.decode()
    for _ in range(2):
        row = owner.post(revoke_url(key)).content.decode()
        assert row.startswith("<tr") and "Revoked" in row and "hx-post" not in row
    assert api_key_actor(secret) is None
    assert "Revoked" in owner.get(KEYS).content.decode()


def test_a_key_is_revoked_by_a_post_alone_and_not_from_another_site(acme, owner):
    key, secret = factories.api_key(acme.organization)
    assert owner.get(revoke_url(key)).status_code == 405
    strict = Client(enforce_csrf_checks=True)
    strict.cookies = owner.cookies
    assert strict.post(revoke_url(key)).status_code == 403
    assert strict.post(KEYS, {"name": "mine", "role": "viewer"}).status_code == 403
    assert api_key_actor(secret) is not None


def test_no_such_key(owner):
    for number in (1, 10**30):
        assert owner.post(reverse("web:key_revoke", args=[number])).status_code == 404


@pytest.mark.parametrize(
    ("name", "role", "said"),
    [
        (" ", "viewer", "A key needs a name."),
        ("x" * 101, "viewer", "at most 100 characters"),
        ("a\0b", "viewer", "one line"),
        ("<b>laptop</b>", "owner", "Choose member or viewer."),
        ("laptop", "", "Choose member or viewer."),
    ],
)
def test_what_is_wrong_stands_beside_its_field(owner, name, role, said):
    answer = owner.post(KEYS, {"name": name, "role": role})
    page = answer.content.decode()
    assert answer.status_code == 400
    assert said in page and "<b>" not in page and not SECRET.search(page)
    assert not ApiKey.objects.exists()


def test_every_page_leads_to_the_keys(acme):
    assert f'href="{KEYS}"' in acme.client.get(reverse("web:jobs")).content.decode()
