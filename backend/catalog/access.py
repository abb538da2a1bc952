"""The door to the catalog: a tenant's own things and the service's, never another tenant's."""

from __future__ import annotations

from django.db.models import F, Q, QuerySet

from backend.catalog.models import BaseModel, Checkpoint, Corpus, Dataset, File
from backend.common.errors import NotFound
from backend.tenants.access import Actor, require_write
from backend.tenants.models import Organization


def file_access(actor: Actor, public_id: str, write: bool = False) -> File:
    file = None
    if "\0" not in public_id:
        file = files(actor.organization).filter(public_id=public_id).first()
    if file is None:
        raise NotFound(f"There is no file {public_id!r}.")
    if write:
        require_write(actor)
    return file


def checkpoint_access(actor: Actor, public_id: str) -> Checkpoint:
    checkpoint = None
    if "\0" not in public_id:
        checkpoint = (
            Checkpoint.objects.select_related("base_model")
            .filter(organization=actor.organization, deleted_at__isnull=True)
            .filter(public_id=public_id)
            .first()
        )
    if checkpoint is None:
        raise NotFound(f"There is no checkpoint {public_id!r}.")
    return checkpoint


def model_access(actor: Actor, name: str) -> BaseModel:
    """The model of that name: the organization's own before the service's."""
    model = None
    if "\0" not in name:
        model = (
            models(actor.organization)
            .filter(name=name)
            .order_by(F("organization").asc(nulls_last=True))
            .first()
        )
    if model is None:
        raise NotFound(f"There is no model {name!r}.", code="model_not_found")
    return model


def dataset_access(actor: Actor, name: str) -> Dataset:
    """A built-in dataset; every tenant may use every one."""
    dataset = None
    if "\0" not in name:
        dataset = Dataset.objects.filter(name=name).first()
    if dataset is None:
        raise NotFound(f"There is no dataset {name!r}.")
    return dataset


def corpus_access(actor: Actor, name: str) -> File | Corpus:
    """An uploaded corpus by its id, or a built-in one by its name."""
    try:
        return file_access(actor, name)
    except NotFound:
        pass
    corpus = Corpus.objects.filter(name=name).first() if "\0" not in name else None
    if corpus is None:
        raise NotFound(f"There is no corpus {name!r}: neither an uploaded file nor a built-in one.")
    return corpus


def files(organization: Organization) -> QuerySet[File]:
    return File.objects.filter(organization=organization, deleted_at__isnull=True)


def models(organization: Organization) -> QuerySet[BaseModel]:
    return BaseModel.objects.filter(Q(organization=organization) | Q(organization__isnull=True))
