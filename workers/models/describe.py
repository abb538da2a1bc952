"""Facts about a model folder, from its ``config.json`` and the headers of its safetensors files only."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.models.config import read_config, read_json

HEADER_LIMIT = 100 * 1024 * 1024


@dataclass(frozen=True)
class ModelInfo:
    architecture: str
    parameters: int
    context: int
    vocab: int
    layers: int
    bytes: int


def describe(folder: Path) -> ModelInfo:
    """``ValueError`` with a readable reason when the folder is no supported model."""
    config = read_config(folder)
    files = weight_files(folder)
    shapes = [entry["shape"] for path in files for entry in _header(path).values()]
    return ModelInfo(
        architecture=config.architecture,
        parameters=sum(math.prod(shape) for shape in shapes),
        context=config.context,
        vocab=config.vocab,
        layers=config.layers,
        bytes=sum(path.stat().st_size for path in files),
    )


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files: one, or the shards its index names."""
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    if not (folder / "model.safetensors.index.json").exists():
        raise ValueError(
            f"model folder {folder} has neither model.safetensors nor model.safetensors.index.json"
        )
    index = read_json(folder, "model.safetensors.index.json")
    names = sorted(set(index.get("weight_map", {}).values()))
    for name in names:
        # A file name out of the folder would let an uploaded index read anything.
        if Path(name).name != name or not (folder / name).exists():
            raise ValueError(
                f"model.safetensors.index.json names {name!r}, which is not a file of the folder"
            )
    if not names:
        raise ValueError("model.safetensors.index.json names no files")
    return [folder / name for name in names]


def _header(path: Path) -> dict[str, Any]:
    """The tensors' entries: 8 bytes of little-endian length, then that much JSON."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > HEADER_LIMIT:
                raise ValueError("the header is too long")
            header = json.loads(file.read(length))
    except (OSError, struct.error, ValueError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None
    header.pop("__metadata__", None)
    return dict(header)
