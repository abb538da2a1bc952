"""What a built-in dataset and a built-in corpus are, and how their files are written."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.spec import Grader

Row = dict[str, Any]


@dataclass(frozen=True)
class BuiltinDataset:
    """``rl`` are the fields of ``RLConfig`` that differ from its defaults, and ``environment`` is one of
    ``workers.spec``, both as a tenant would write them. ``grader`` None: the environment gives the rewards.
    """

    name: str
    title: str
    description: str
    path: Path
    grader: Grader | None
    environment: dict[str, Any] | None = None
    rl: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BuiltinCorpus:
    """Passages for tools to search: a JSONL file of ``{"title", "text"}``."""

    name: str
    title: str
    path: Path


def recommended(
    learning_rate: float,
    warmup_steps: int,
    max_tokens: int,
    *,
    temperature: float = 1.0,
    algorithm: str = "grpo",
    **others: Any,
) -> dict[str, Any]:
    """20 steps of 4 x 8 samples, unless ``others`` say otherwise.

    Warm-up and decay: late steps at a high constant rate can collapse.
    """
    return {
        "algorithm": algorithm,
        "steps": 20,
        "micro_batch_size": 16,
        # Too small to hold anything back: with a penalty the divergence is measured and drawn.
        "loss": {"kl_beta": 0.001},
        "sampling": {"max_tokens": max_tokens, "temperature": temperature},
        "optimizer": {"learning_rate": learning_rate, "schedule": "linear", "warmup_steps": warmup_steps},
        **others,
    }


def write_rows(path: Path, make: Callable[[random.Random], list[Row]]) -> Path:
    """The file, complete whenever it is there."""
    text = "".join(json.dumps(row) + "\n" for row in make(random.Random(0)))
    if not path.exists() or path.read_text() != text:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as part:
            part.write(text)
        Path(part.name).chmod(0o644)
        Path(part.name).replace(path)
    return path


def prompt(system: str, *talk: str) -> list[dict[str, str]]:
    """Messages: the system's, then the user's and the assistant's by turns.

    A system message of our own keeps a chat template's longer default out of every prompt.
    """
    turns = [
        {"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(talk)
    ]
    return [{"role": "system", "content": system}, *turns]
