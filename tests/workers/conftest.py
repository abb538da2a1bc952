from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny import make_tiny
from tests.workers.local import Cluster, attempt
from workers.engines.weights import Weights, load_weights
from workers.models.chat import ChatTokenizer
from workers.pipeline import Pipeline


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Weights:
    return load_weights(tiny_folder, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def tokenizer(tiny_folder: Path) -> ChatTokenizer:
    return ChatTokenizer(tiny_folder)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [
        json.dumps({"messages": [{"role": "user", "content": f"say {n}"}], "number": n}) for n in range(5)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster(monkeypatch)
    yield made
    made.graders.actor._sandbox.close()


@pytest.fixture
def start(tiny_folder: Path, rows: Path, cluster: Cluster, tmp_path: Path) -> Callable[..., Pipeline]:
    """``start(name, rl, **launch)``: an attempt in a folder of its own."""
    return lambda name, rl=None, **more: attempt(tiny_folder, rows, tmp_path / name, rl, **more)
