"""Facts about a model folder, from its ``config.json`` and the headers of its safetensors files only."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from workers.models.config import read_config, read_json
from workers.models.layout import check_shapes

HEADER_LIMIT = 100 * 1024 * 1024
DTYPES = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True)
class ModelInfo:
    architecture: str
    parameters: int
    context: int
    vocab: int
    layers: int
    bytes: int


def describe(folder: Path) -> ModelInfo:
    """``ValueError`` with a readable reason when the folder is no supported model.

    The tensors' names and shapes are checked against the config: what passes can be loaded.
    """
    config = read_config(folder)
    files = weight_files(folder)
    shapes = {name: shape for path in files for name, shape in _shapes(path).items()}
    check_shapes(config, shapes)
    return ModelInfo(
        architecture=config.architecture,
        parameters=sum(math.prod(shape) for shape in shapes.values()),
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
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        raise ValueError("model.safetensors.index.json: weight_map must name a file for each tensor")
    names = sorted(set(placed.values()))
    for name in names:
        # A file name out of the folder would let an uploaded index read anything.
        if Path(name).name != name or not (folder / name).exists():
            raise ValueError(
                f"model.safetensors.index.json names {name!r}, which is not a file of the folder"
            )
    if not names:
        raise ValueError("model.safetensors.index.json names no files")
    return [folder / name for name in names]


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The file's tensors. The header is 8 bytes of little-endian length, then that much JSON."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > HEADER_LIMIT:
                raise ValueError("the header is too long")
            header = json.loads(file.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in entries.items()}
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        dtypes = {name: entry["dtype"] for name, entry in entries.items()}
    except (OSError, struct.error, ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None
    if path.stat().st_size != 8 + length + end:
        raise ValueError(f"{path} is not whole: {path.stat().st_size} bytes, expected {8 + length + end}")
    for name, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise ValueError(f"tensor {name} is of type {dtype}; supported: {', '.join(sorted(DTYPES))}")
    return shapes
