"""``manage.py model_add NAME FOLDER_OR_HUB_ID``: put a base model into the catalog."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from backend.catalog.services import model_add
from backend.common.errors import ServiceError
from backend.tenants.models import Organization


class Command(BaseCommand):
    help = "Add a base model: a local folder in the Hugging Face layout, or an id on the hub."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="what jobs call the model")
        parser.add_argument("source", help="a folder, or an id like HuggingFaceTB/SmolLM2-135M-Instruct")
        parser.add_argument("--organization", help="slug of the only organization that may use it")

    def handle(self, *args: Any, name: str, source: str, organization: str | None, **options: Any) -> None:
        owner = None
        if organization is not None:
            owner = Organization.objects.filter(slug=organization).first()
            if owner is None:
                raise CommandError(f"there is no organization {organization!r}")
        try:
            model = model_add(name=name, source=source, organization=owner)
        except ServiceError as error:
            raise CommandError(error.message) from None
        self.stdout.write(f"{model.name}: {model.architecture}, {model.parameters:,} parameters")
