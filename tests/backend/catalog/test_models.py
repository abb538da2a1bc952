"""Base models and built-in datasets."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from backend.catalog.access import dataset_access, model_access
from backend.catalog.models import BaseModel, Dataset
from backend.catalog.selectors import models_all
from backend.catalog.services import datasets_register, model_add
from backend.common.errors import InvalidRequest, NotFound
from tests import factories


def weights(folder: Path) -> Path:
    """A model folder with one tensor of 2 x 3 in bf16."""
    factories.model_folder(folder)
    entry = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}
    header = json.dumps({"model.norm.weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    return folder


@pytest.mark.django_db
def test_a_folder_is_described_from_its_files(tmp_path):
    model = model_add(name="tiny", source=str(weights(tmp_path / "tiny")))
    assert (model.architecture, model.parameters, model.context_length) == ("LlamaForCausalLM", 6, 128)
    assert model.bytes == (tmp_path / "tiny" / "model.safetensors").stat().st_size


@pytest.mark.django_db
def test_adding_the_same_again_changes_nothing(tmp_path):
    folder = str(weights(tmp_path / "tiny"))
    assert model_add(name="tiny", source=folder) == model_add(name="tiny", source=folder)
    assert BaseModel.objects.count() == 1


@pytest.mark.django_db
def test_a_name_is_not_given_to_another_folder(tmp_path):
    model_add(name="tiny", source=str(weights(tmp_path / "one")))
    with pytest.raises(InvalidRequest) as caught:
        model_add(name="tiny", source=str(weights(tmp_path / "two")))
    assert caught.value.code == "exists"


@pytest.mark.django_db
def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="safetensors"):
        model_add(name="tiny", source=str(factories.model_folder(tmp_path / "tiny")))


@pytest.mark.django_db
def test_the_hub_needs_its_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InvalidRequest, match="needs the package huggingface_hub"):
        model_add(name="tiny", source="nobody/nothing")


@pytest.mark.django_db
def test_the_command_adds_a_model_for_one_organization(acme, northwind, tmp_path, capsys):
    folder = str(weights(tmp_path / "tiny"))
    call_command("model_add", "tiny", folder, organization="acme")
    assert "6 parameters" in capsys.readouterr().out
    assert model_access(acme.viewer, "tiny").organization == acme.organization
    with pytest.raises(NotFound):
        model_access(northwind.owner, "tiny")
    with pytest.raises(CommandError, match="no organization 'nobody'"):
        call_command("model_add", "tiny", folder, organization="nobody")


def test_an_own_model_hides_the_services_of_that_name(acme, northwind, tmp_path):
    shared = factories.base_model(tmp_path / "shared", name="b")
    own = factories.base_model(tmp_path / "own", name="b", of=acme.organization)
    first = factories.base_model(tmp_path / "first", name="a")
    assert models_all(acme.organization) == [first, own]
    assert models_all(northwind.organization) == [first, shared]
    assert model_access(acme.viewer, "b") == own
    assert model_access(northwind.viewer, "b") == shared


def test_names_with_a_nul_reach_no_query(acme):
    for access in (model_access, dataset_access):
        with pytest.raises(NotFound):
            access(acme.member, "a\0b")


def test_the_built_in_datasets_are_there_for_everybody_once(acme, northwind):
    made = datasets_register()
    assert datasets_register() == made
    assert Dataset.objects.count() == len(made) >= 2
    for dataset in made:
        assert dataset.rows > 0
        assert dataset.fields["messages"] == dataset.rows
        assert dataset_access(acme.viewer, dataset.name) == dataset_access(northwind.viewer, dataset.name)
