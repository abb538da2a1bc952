"""Requests, and what comes of one alone, for the engine's tests."""

from __future__ import annotations

from collections.abc import Sequence

from tests.workers.engines.adapters import random_adapter
from workers.engines.engine import TorchEngine
from workers.engines.sequences import Request, Rollout
from workers.engines.weights import Weights


def request(
    run: str, key: int, prompt: Sequence[int] = (7, 8, 9), max_tokens: int = 12, **more: object
) -> Request:
    return Request(run, (key,), tuple(prompt), max_tokens, (0, 0, key), **more)  # type: ignore[arg-type]


def tokens_by_key(sequences: Sequence[Rollout]) -> dict[tuple[str, tuple[int, ...]], list[int]]:
    return {(entry.request.run_key, entry.request.key): entry.tokens for entry in sequences}


def run_alone(tiny: Weights, entry: Request, seed: int | None = None) -> Rollout:
    engine = TorchEngine(tiny)
    engine.load_adapter(entry.run_key, 0, None if seed is None else random_adapter(tiny.config, seed), 2.0)
    engine.submit([entry])
    (sequence,) = engine.decode().finished
    return sequence
