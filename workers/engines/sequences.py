"""What is asked of the engine and what it gives back: plain values that travel between processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

#: The version of tokens that no weights made.
NOBODY = -1


@dataclass(frozen=True)
class Request:
    """One completion to sample. ``stream`` names its random numbers: nothing else about the batch matters.

    A completion of several turns ends a turn as it would end: at a stop id or text, or after ``turn_tokens``
    of the turn (None: as many as there may be). ``keep`` asks the engine to hold its cache then, for the
    sequence that comes back with an answer.
    """

    run_key: str
    key: tuple[int, ...]  # the caller's name of the sequence, unique within the run
    prompt: tuple[int, ...]
    max_tokens: int  # after the prompt, over all turns, answers included
    stream: tuple[int, ...]  # (job seed, step, group, sample)
    temperature: float = 1.0  # 0 takes the likeliest token; log-probs are then those of temperature 1
    top_p: float = 1.0
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    turn_tokens: int | None = None
    keep: bool = False


@dataclass
class Rollout:
    """A request and what follows its prompt so far; ``finish`` is None while its turn goes on.

    ``tokens`` are kept as sampled, the one that stopped included. ``logprobs`` are of the whole softmax at
    the sampling temperature: top_p only restricts what is drawn, it does not renormalize. ``versions`` names
    the weights that made each token. ``sampled`` is False for tokens of an answer; their log-prob is 0.0 and
    their version ``NOBODY``. The turn's tokens begin at ``turn_start``.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    sampled: list[bool] = field(default_factory=list)  # left out: every token was
    turn_start: int = 0

    def __post_init__(self) -> None:
        if not self.sampled:
            self.sampled = [True] * len(self.tokens)

    @property
    def context(self) -> int:
        return len(self.request.prompt) + len(self.tokens)

    @property
    def longest(self) -> int:
        """Tokens of KV cache it may come to need."""
        return len(self.request.prompt) + self.request.max_tokens

    @property
    def left(self) -> int:
        """Tokens that may still follow."""
        return self.request.max_tokens - len(self.tokens)

    def sample(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        self.sampled.append(True)

    def answer(self, observation: Sequence[int]) -> None:
        """Begin the next turn after ``observation``, what the environment said (may be empty).

        ``ValueError`` while the turn goes on, or when no token could follow the observation.
        """
        if self.finish is None:
            raise ValueError(f"sequence {self.request.key} is still sampling its turn")
        if self.left <= len(observation):
            raise ValueError(
                f"sequence {self.request.key} has room for {self.left} tokens, "
                f"its answer takes {len(observation)}"
            )
        self.tokens += observation
        self.logprobs += [0.0] * len(observation)
        self.versions += [NOBODY] * len(observation)
        self.sampled += [False] * len(observation)
        self.finish = None
        self.turn_start = len(self.tokens)


def refusal(sequence: Rollout, vocab: int, limit: int) -> str | None:
    """Why an engine with a context of ``limit`` tokens cannot take the sequence."""
    request = sequence.request
    tokens = (*request.prompt, *sequence.tokens)
    if not request.prompt:
        return "the prompt is empty"
    if min(tokens) < 0 or max(tokens) >= vocab:
        return f"the prompt or what follows holds a token id outside the vocabulary of {vocab}"
    if request.max_tokens < 1 or (request.turn_tokens is not None and request.turn_tokens < 1):
        return "max_tokens and turn_tokens must be at least 1"
    if sequence.longest > limit:
        return (
            f"prompt of {len(request.prompt)} tokens and max_tokens {request.max_tokens} "
            f"exceed the {limit} tokens of context"
        )
    if request.temperature < 0 or not 0 < request.top_p <= 1:
        return "temperature must be 0 or more and top_p above 0, at most 1"
    if sequence.finish is not None or sequence.left < 1:
        return "is finished already"
    return None


@dataclass
class Progress:
    """What a prefill or decode call did. Counts cover the runs that were asked for."""

    finished: list[Rollout] = field(default_factory=list)
    prompt_of: dict[str, int] = field(
        default_factory=dict
    )  # computed for prompts, replays and answers, by run
    sampled_of: dict[str, int] = field(default_factory=dict)
    forwards: int = 0  # passes through the model
    running: int = 0
    waiting: int = 0

    def computed(self, run_key: str, tokens: int) -> None:
        if tokens:
            self.prompt_of[run_key] = self.prompt_of.get(run_key, 0) + tokens

    def sampled(self, run_key: str) -> None:
        self.sampled_of[run_key] = self.sampled_of.get(run_key, 0) + 1

    @property
    def prompt_tokens(self) -> int:
        return sum(self.prompt_of.values())

    @property
    def sampled_tokens(self) -> int:
        return sum(self.sampled_of.values())
