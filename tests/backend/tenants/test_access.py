"""Who acts where, with which role, and with which key."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from backend.common.errors import Forbidden, InvalidRequest, NotFound
from backend.tenants.access import Actor, api_key_actor, require_admin, require_write, user_actor
from backend.tenants.models import ApiKey, Membership, Role
from backend.tenants.selectors import api_key_find, api_keys, organizations_of
from backend.tenants.services import (
    api_key_create,
    api_key_issue,
    api_key_revoke,
    member_add,
    organization_create,
    user_create,
)
from tests import factories


def test_a_member_acts_in_the_own_organization_only(acme, northwind, stranger):
    person = acme.member.user
    actor = user_actor(user=person, slug="acme")
    assert (actor.organization, actor.role, actor.label) == (
        acme.organization,
        Role.MEMBER,
        f"user:{person.pk}",
    )
    with pytest.raises(NotFound):
        user_actor(user=person, slug="northwind")
    with pytest.raises(NotFound):
        user_actor(user=stranger, slug="acme")
    assert list(organizations_of(person)) == [acme.organization]
    assert list(organizations_of(stranger)) == []


def test_an_operator_reads_every_organization(acme, northwind):
    operator = factories.user(is_staff=True)
    assert user_actor(user=operator, slug="acme").role is Role.VIEWER
    assert list(organizations_of(operator)) == [acme.organization, northwind.organization]
    with pytest.raises(NotFound):
        user_actor(user=operator, slug="nobody")


@pytest.mark.parametrize("role", list(Role))
def test_roles(role, acme):
    actor = factories.actor(acme.organization, role)
    for require, allowed in (
        (require_write, {Role.OWNER, Role.ADMIN, Role.MEMBER}),
        (require_admin, {Role.OWNER, Role.ADMIN}),
    ):
        if role in allowed:
            require(actor)
        else:
            with pytest.raises(Forbidden):
                require(actor)


def test_an_actor_is_a_user_or_a_key(acme):
    with pytest.raises(ValueError):
        Actor(organization=acme.organization, role=Role.OWNER)


def test_a_key_opens_its_organization_and_only_its_digest_is_kept(acme):
    key, secret = api_key_create(actor=acme.owner, name="ci")
    assert secret.startswith("jsk-") and len(secret) == 36
    assert key.prefix == secret[:12] and secret not in str(vars(key))
    actor = api_key_actor(secret)
    assert (actor.organization, actor.role, actor.label) == (
        acme.organization,
        Role.MEMBER,
        f"key:{key.prefix}",
    )
    assert api_key_actor(secret + "x") is None


def test_a_revoked_key_opens_nothing(acme, northwind):
    key, secret = api_key_create(actor=acme.owner, name="ci")
    assert not api_key_revoke(actor=northwind.owner, key=key)
    assert api_key_actor(secret) is not None
    assert api_key_revoke(actor=acme.owner, key=key)
    assert not api_key_revoke(actor=acme.owner, key=key)
    assert api_key_actor(secret) is None


def test_use_is_noted_at_most_once_a_minute(acme, django_assert_num_queries):
    key, secret = api_key_issue(organization=acme.organization, name="ci")
    with django_assert_num_queries(2):
        api_key_actor(secret)
    with django_assert_num_queries(1):
        api_key_actor(secret)
    noted = timezone.now() - timedelta(seconds=61)
    ApiKey.objects.filter(pk=key.pk).update(last_used_at=noted)
    api_key_actor(secret)
    key.refresh_from_db()
    assert key.last_used_at > noted


def test_members_and_viewers_make_no_keys(acme):
    for actor in (acme.member, acme.viewer):
        with pytest.raises(Forbidden):
            api_key_create(actor=actor, name="ci")


def test_an_admin_makes_no_key_above_itself(acme):
    admin = factories.actor(acme.organization, Role.ADMIN)
    with pytest.raises(InvalidRequest):
        api_key_create(actor=admin, name="ci", role=Role.OWNER)


@pytest.mark.parametrize("name", ["", "  ", "x" * 101, "two\nlines", "nul\0"])
def test_a_key_needs_a_name_worth_the_name(acme, name):
    with pytest.raises(InvalidRequest) as caught:
        api_key_create(actor=acme.owner, name=name)
    assert caught.value.param == "name"
    assert api_key_create(actor=acme.owner, name="x" * 100)[0].name == "x" * 100


def test_keys_are_listed_valid_ones_first_for_their_organization_only(acme, northwind):
    ApiKey.objects.all().delete()
    first, second, third, fourth = (api_key_create(actor=acme.owner, name=n)[0] for n in "abcd")
    theirs, _ = api_key_create(actor=northwind.owner, name="theirs")
    api_key_revoke(actor=acme.owner, key=third)
    api_key_revoke(actor=acme.owner, key=second)
    assert api_keys(acme.organization) == [fourth, first, second, third]
    assert api_keys(acme.organization, max_revoked=1) == [fourth, first, second]
    assert api_keys(northwind.organization) == [theirs]


def test_another_tenants_key_is_not_found(acme, northwind):
    key, _ = api_key_issue(organization=acme.organization, name="ci")
    assert api_key_find(acme.organization, key.pk) == key
    for organization, pk in ((northwind.organization, key.pk), (acme.organization, 10**30)):
        with pytest.raises(NotFound):
            api_key_find(organization, pk)


def test_members_and_viewers_revoke_no_keys(acme):
    key, secret = api_key_issue(organization=acme.organization, name="ci")
    for actor in (acme.member, acme.viewer):
        with pytest.raises(Forbidden):
            api_key_revoke(actor=actor, key=key)
    assert api_key_actor(secret) is not None


def test_an_organization_with_its_owner(stranger):
    organization = organization_create(name="Blue Sky AI", owner=stranger)
    assert organization.slug == "blue-sky-ai"
    assert user_actor(user=stranger, slug="blue-sky-ai").role is Role.OWNER
    with pytest.raises(InvalidRequest):
        organization_create(name="Blue sky, AI")


def test_a_member_added_again_gets_the_new_role(acme, stranger):
    member_add(organization=acme.organization, user=stranger)
    member_add(organization=acme.organization, user=stranger, role=Role.ADMIN)
    assert Membership.objects.get(user=stranger).role == Role.ADMIN


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("email", "password", "param"),
    [("no address", "a long enough one", "email"), ("a@example.com", "short", "password")],
)
def test_a_user_needs_an_address_and_a_password_worth_the_name(email, password, param):
    with pytest.raises(InvalidRequest) as caught:
        user_create(email=email, password=password)
    assert caught.value.param == param


@pytest.mark.django_db
def test_an_address_belongs_to_one_user():
    user_create(email="A@example.com", password=None)
    with pytest.raises(InvalidRequest) as caught:
        user_create(email="a@example.com", password=None)
    assert caught.value.code == "exists"
