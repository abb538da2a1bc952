"""Reading the catalog, the tenant first."""

from __future__ import annotations

from django.db.models import F

from backend.catalog.access import files, models
from backend.catalog.models import BaseModel, Corpus, Dataset, File
from backend.common.pages import Page, page_by_id
from backend.tenants.models import Organization


def files_page(
    organization: Organization, *, limit: int = 20, after: str | None = None, purpose: str | None = None
) -> Page[File]:
    """The organization's files, the newest first."""
    rows = files(organization)
    if purpose is not None:
        rows = rows.filter(purpose=purpose)
    return page_by_id(rows, limit=limit, after=after)


def models_all(organization: Organization) -> list[BaseModel]:
    """What a job may start from, by name. An own model hides the service's of the same name."""
    by_name: dict[str, BaseModel] = {}
    for model in models(organization).order_by("name", F("organization").asc(nulls_last=True)):
        by_name.setdefault(model.name, model)
    return list(by_name.values())


def datasets_all() -> list[Dataset]:
    return list(Dataset.objects.order_by("name"))


def corpora_all() -> list[Corpus]:
    return list(Corpus.objects.order_by("name"))
