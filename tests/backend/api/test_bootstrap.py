"""What a fresh installation gets, once."""

from __future__ import annotations

import json
import stat

import pytest
from django.contrib.auth import authenticate
from django.core.management import call_command

from backend.catalog.models import BaseModel, Dataset
from backend.tenants.access import user_actor
from backend.tenants.models import Membership, Organization, Role, User
from tests.tiny import make_tiny


@pytest.fixture
def fresh(settings, tmp_path, db, monkeypatch):
    settings.VAR_DIR = tmp_path
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.delenv("DATABASE_URL_FILE", raising=False)
    return tmp_path


def signin(folder) -> dict:
    return json.loads((folder / "demo_signin.json").read_text())


def test_two_demo_tenants_and_an_operator(fresh):
    call_command("bootstrap")
    assert list(Organization.objects.order_by("name").values_list("name", "slug")) == [
        ("Acme Research", "acme-research"),
        ("Northwind Labs", "northwind-labs"),
    ]
    demo = User.objects.get(email="demo@jigsaw.local")
    assert user_actor(user=demo, slug="acme-research").role is Role.OWNER
    partner = User.objects.get(email="partner@jigsaw.local")
    assert user_actor(user=partner, slug="northwind-labs").role is Role.OWNER
    assert User.objects.get(is_staff=True).email == "operator@jigsaw.local"
    assert Membership.objects.count() == 2


def test_the_sign_in_works_and_is_for_the_owner_of_the_machine_only(fresh):
    call_command("bootstrap")
    shown = signin(fresh)
    assert shown["email"] == "demo@jigsaw.local" and shown["organizations"] == ["Acme Research"]
    for entry in (shown, *shown["others"]):
        assert authenticate(username=entry["email"], password=entry["password"]) is not None
    assert stat.S_IMODE((fresh / "demo_signin.json").stat().st_mode) == 0o600


def test_again_changes_nothing(fresh):
    call_command("bootstrap")
    before = signin(fresh), User.objects.count(), Dataset.objects.count()
    call_command("bootstrap")
    assert (signin(fresh), User.objects.count(), Dataset.objects.count()) == before


def test_a_lost_file_is_made_anew_and_works(fresh):
    call_command("bootstrap")
    old = signin(fresh)
    (fresh / "demo_signin.json").unlink()
    call_command("bootstrap")
    assert signin(fresh)["password"] != old["password"]
    assert authenticate(username=old["email"], password=signin(fresh)["password"]) is not None
    assert authenticate(username=old["email"], password=old["password"]) is None


def test_a_database_of_ones_own_gets_no_demo_unless_asked(fresh, monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgresql://app@db/jigsaw")
    call_command("bootstrap")
    assert not User.objects.exists()
    assert Dataset.objects.count() >= 2
    call_command("bootstrap", demo=True)
    assert User.objects.count() == 3


def test_the_model_is_registered_once_it_is_there(fresh, settings, capsys):
    call_command("bootstrap")
    assert "--models makes it" in capsys.readouterr().out
    make_tiny(settings.MODELS_DIR / "SmolLM2-135M-Instruct")
    call_command("bootstrap")
    assert BaseModel.objects.get().name == "SmolLM2-135M-Instruct"
