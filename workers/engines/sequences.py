"""What is asked of the engine and what it gives back: plain values that travel between processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Request:
    """One completion to sample. ``stream`` names its random numbers: nothing else about the batch matters."""

    run_key: str
    key: tuple[int, ...]  # the caller's name of the sequence, unique within the run
    prompt: tuple[int, ...]
    max_tokens: int
    stream: tuple[int, ...]  # (job seed, step, group, sample)
    temperature: float = 1.0  # 0 takes the likeliest token; log-probs are then those of temperature 1
    top_p: float = 1.0
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()


@dataclass
class Rollout:
    """A request and what has been sampled for it; ``finish`` is None while unfinished.

    ``tokens`` are kept as sampled, the one that stopped included. ``logprobs`` are of the whole softmax at
    the sampling temperature: top_p only restricts what is drawn, it does not renormalize. ``versions`` names
    the weights that made each token.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None

    @property
    def context(self) -> int:
        return len(self.request.prompt) + len(self.tokens)

    @property
    def longest(self) -> int:
        """Tokens of KV cache it may come to need."""
        return len(self.request.prompt) + self.request.max_tokens


@dataclass
class Progress:
    """What a prefill or decode call did. Counts cover the runs that were asked for."""

    finished: list[Rollout] = field(default_factory=list)
    prompt_tokens: int = 0  # computed for prompts and for replayed completions
    sampled_tokens: int = 0
    running: int = 0
    waiting: int = 0
