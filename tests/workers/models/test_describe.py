from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import make_tiny
from workers.models.describe import ModelInfo, describe


def test_facts_come_from_config_and_headers(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors").values()
    assert describe(tmp_path) == ModelInfo(
        architecture="LlamaForCausalLM",
        parameters=sum(tensor.numel() for tensor in tensors),
        context=512,
        vocab=65,
        layers=4,
        bytes=(tmp_path / "model.safetensors").stat().st_size,
    )


def test_unsupported_and_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        describe(tmp_path)
    make_tiny(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        describe(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        describe(tmp_path)


def test_index_may_not_point_out_of_the_folder(tmp_path: Path) -> None:
    make_tiny(tmp_path / "model")
    (tmp_path / "model/model.safetensors").rename(tmp_path / "secret.safetensors")
    index = {"weight_map": {"model.norm.weight": "../secret.safetensors"}}
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="not a file of the folder"):
        describe(tmp_path / "model")


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({NORM: None}, f"the model has no tensor {NORM}"),
        ({NORM: torch.zeros(127)}, rf"tensor {NORM} has shape \(127,\), expected \(128,\)"),
        ({NORM: torch.zeros(128, dtype=torch.int8)}, f"tensor {NORM} is of type I8"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)}, "q_proj.bias is not one of the model's"),
        ({"model.layers.4.input_layernorm.weight": torch.zeros(128)}, "layers.4.*is not one of the model's"),
    ],
)
def test_tensors_must_be_those_of_the_config(
    change: dict[str, torch.Tensor | None], reason: str, tmp_path: Path
) -> None:
    make_tiny(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | change
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=reason):
        describe(tmp_path)


def test_what_follows_from_the_rest_may_be_stored_too(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    derived = {
        "lm_head.weight": torch.zeros(65, 128),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16),
    }
    save_file(load_file(tmp_path / "model.safetensors") | derived, tmp_path / "model.safetensors")
    assert describe(tmp_path).layers == 4


def test_a_file_that_was_cut_off(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is not whole"):
        describe(tmp_path)


def test_an_index_of_another_kind(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": ["model.safetensors"]}))
    with pytest.raises(ValueError, match="weight_map must name a file for each tensor"):
        describe(tmp_path)
