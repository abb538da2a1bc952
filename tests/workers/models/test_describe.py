from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

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
