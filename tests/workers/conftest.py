from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny import make_tiny
from workers.engines.weights import Weights, load_weights
from workers.models.chat import ChatTokenizer


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
