"""``manage.py bootstrap``: what a fresh installation needs before anybody can use it; safe to repeat.

Always the built-in datasets and corpora, and the base model if its folder is there (``--models`` makes it).
On the embedded default, or with ``--demo``, two demo tenants and three people, whose passwords are made once
and kept in ``var/demo_signin.json``, for the owner of the machine only.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from backend import env
from backend.catalog.services import corpora_register, datasets_register, model_add
from backend.common.errors import ServiceError
from backend.tenants.models import Organization, Role, User
from backend.tenants.services import member_add, organization_create, user_create

MODEL = "SmolLM2-135M-Instruct"
SIGNIN_FILE = "demo_signin.json"


@dataclass(frozen=True)
class Person:
    email: str
    name: str
    organization: str | None  # None: an operator of the service


DEMO = Person("demo@jigsaw.local", "Demo", "Acme Research")
PEOPLE = (
    DEMO,
    Person("partner@jigsaw.local", "Partner", "Northwind Labs"),
    Person("operator@jigsaw.local", "Operator", None),
)


class Command(BaseCommand):
    help = (
        "Register built-in datasets, corpora and the base model; on the embedded default also demo tenants."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--demo", action="store_true", help="demo tenants on any database")
        parser.add_argument("--models", action="store_true", help=f"make {MODEL} if it is not there")

    def handle(self, *args: Any, demo: bool, models: bool, **options: Any) -> None:
        try:
            for dataset in datasets_register():
                self.stdout.write(f"dataset {dataset.name}: {dataset.rows:,} rows")
            for corpus in corpora_register():
                self.stdout.write(f"corpus {corpus.name}: {corpus.passages:,} passages")
            self._register_model(make=models)
            if demo or env.secret("DATABASE_URL") is None:
                self._make_demo()
        except ServiceError as error:
            raise CommandError(error.message) from None

    def _register_model(self, *, make: bool) -> None:
        folder = settings.MODELS_DIR / MODEL
        if make:
            # Needs the extra "models"; a web process without it must still start.
            from workers.models.smollm2 import ensure_smollm2

            folder = ensure_smollm2(settings.MODELS_DIR)
        if not folder.exists():
            self.stdout.write(f"model {MODEL}: not in {settings.MODELS_DIR}; --models makes it")
            return
        model = model_add(name=MODEL, source=str(folder))
        self.stdout.write(f"model {model.name}: {model.parameters:,} parameters")

    def _make_demo(self) -> None:
        path = settings.VAR_DIR / SIGNIN_FILE
        passwords = read_passwords(path)
        for person in PEOPLE:
            passwords.setdefault(person.email, secrets.token_urlsafe(12))
            ensure_person(person, passwords[person.email])
        write_signin(path, passwords)
        self.stdout.write(f"demo sign-in: {path}")


def ensure_person(person: Person, password: str) -> User:
    user = User.objects.filter(email=person.email).first()
    if user is None:
        is_staff = person.organization is None
        user = user_create(email=person.email, password=password, name=person.name, is_staff=is_staff)
    elif not user.check_password(password):
        user.set_password(password)
        user.save(update_fields=["password"])
    if person.organization is not None:
        organization = Organization.objects.filter(name=person.organization).first()
        if organization is None:
            organization = organization_create(name=person.organization)
        member_add(organization=organization, user=user, role=Role.OWNER)
    return user


def read_passwords(path: Path) -> dict[str, str]:
    """By e-mail, as ``write_signin`` left them; nothing when it has not run."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return {entry["email"]: entry["password"] for entry in (content, *content["others"])}


def write_signin(path: Path, passwords: dict[str, str]) -> None:
    """Written aside with mode 0600 and renamed, so that nobody ever reads half of it or too much."""
    first, *others = (
        {
            "email": person.email,
            "password": passwords[person.email],
            "organizations": [person.organization] if person.organization else [],
        }
        for person in PEOPLE
    )
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        json.dump({**first, "others": others}, stream, indent=2)
    fresh.rename(path)
