"""Base models and built-in datasets."""

from __future__ import annotations

import json
import sys

import pytest
from django.core.management import CommandError, call_command

from backend.catalog.access import dataset_access, model_access
from backend.catalog.models import BaseModel, Dataset
from backend.catalog.selectors import models_all
from backend.catalog.services import datasets_register, model_add
from backend.common.errors import InvalidRequest, NotFound
from tests import factories
from tests.tiny import make_tiny

# Embeddings 65 x 128 and a norm; in each of four blocks two norms, q and o, k and v, and three of 128 x 256.
PARAMETERS = 65 * 128 + 128 + 4 * (2 * 128 + 2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 256)


@pytest.mark.django_db
def test_a_folder_is_described_from_its_files(tmp_path):
    model = model_add(name="tiny", source=str(make_tiny(tmp_path / "tiny")))
    assert (model.architecture, model.parameters, model.context_length) == (
        "LlamaForCausalLM",
        PARAMETERS,
        512,
    )
    assert model.bytes == (tmp_path / "tiny" / "model.safetensors").stat().st_size


@pytest.mark.django_db
def test_weights_that_do_not_fit_the_config_are_refused(tmp_path):
    folder = make_tiny(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 300}))
    with pytest.raises(
        InvalidRequest, match=r"gate_proj.weight has shape \(256, 128\), expected \(300, 128\)"
    ):
        model_add(name="tiny", source=str(folder))
    assert not BaseModel.objects.exists()


@pytest.mark.django_db
def test_a_folder_whose_prompts_cannot_be_written_is_refused(tmp_path):
    folder = make_tiny(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(InvalidRequest, match="the chat template cannot be read"):
        model_add(name="tiny", source=str(folder))
    assert not BaseModel.objects.exists()


@pytest.mark.django_db
def test_adding_the_same_again_changes_nothing(tmp_path):
    folder = str(make_tiny(tmp_path / "tiny"))
    assert model_add(name="tiny", source=folder) == model_add(name="tiny", source=folder)
    assert BaseModel.objects.count() == 1


@pytest.mark.django_db
def test_a_name_is_not_given_to_another_folder(tmp_path):
    model_add(name="tiny", source=str(make_tiny(tmp_path / "one")))
    with pytest.raises(InvalidRequest) as caught:
        model_add(name="tiny", source=str(make_tiny(tmp_path / "two")))
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
    folder = str(make_tiny(tmp_path / "tiny"))
    call_command("model_add", "tiny", folder, organization="acme")
    assert f"{PARAMETERS:,} parameters" in capsys.readouterr().out
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
