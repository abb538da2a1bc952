"""Episodes of several turns: games, tools, a scripted talk, and worlds of a tenant's own.

Every environment ends an episode after ``max_turns`` turns of the model, each of at most ``turn_tokens``;
``rl.sampling.max_tokens`` bounds the whole, answers included, and ``episode_s`` its wall clock.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from workers.spec.base import Strict
from workers.spec.graders import SecretName, Url


class Episodes(Strict):
    """What all environments have in common."""

    max_turns: int = Field(4, ge=1, le=64)
    turn_tokens: int = Field(16, ge=1, le=8192, description="longest turn of the model, in tokens")
    episode_s: float = Field(
        600.0, gt=0, le=3600, description="longest time the environment may take over an episode, in seconds"
    )


class GuessingGame(Episodes):
    """A secret number in several turns: each guess is answered by "higher" or "lower".

    A row of the data names the number (``number_field``). Finding it is worth 1, at the end; what was never
    found is worth what the nearest guess was near to it. ``delay_s`` makes the game answer after so many
    seconds, drawn anew for each turn: tools of the world take their time.
    """

    type: Literal["guessing_game"] = "guessing_game"
    number_field: str = Field("number", min_length=1, max_length=64)
    delay_s: tuple[float, float] = Field((0.0, 0.0), description="shortest and longest wait for an answer")

    @field_validator("delay_s")
    @classmethod
    def _delay_in_order(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 <= value[0] <= value[1] <= 60:
            raise ValueError("needs 0 <= shortest <= longest <= 60 seconds")
        return value


class GridWorld(Episodes):
    """A small map in text: words like "up" and "left" move, walls stop, the goal is worth 1.

    A row of the data holds the map in ``map_field``: lines of ``#`` (wall), ``.``, ``S`` (start), ``G``
    (goal). Coming nearer is worth something on the way.
    """

    type: Literal["grid_world"] = "grid_world"
    map_field: str = Field("map", min_length=1, max_length=64)


class Chat(Episodes):
    """A talk with a scripted user: a row's ``turns_field`` lists what the user says after each turn."""

    type: Literal["chat"] = "chat"
    turns_field: str = Field("turns", min_length=1, max_length=64)


class Calculator(Strict):
    """``calculator(expression)``: arithmetic with + - * / ** ( ) and a few functions."""

    type: Literal["calculator"] = "calculator"


class PythonTool(Strict):
    """``python(code)``: runs the code in the sandbox; what it prints is the answer."""

    type: Literal["python"] = "python"
    timeout_s: float = Field(5.0, gt=0, le=60)


class Search(Strict):
    """``search(query)``: the best passages of a corpus by BM25 (https://doi.org/10.1561/1500000019).

    A corpus is a JSONL file of ``{"title", "text"}`` rows: an uploaded file's id, or a built-in one's name.
    """

    type: Literal["search"] = "search"
    corpus: str = Field(min_length=1, max_length=200)
    passages: int = Field(3, ge=1, le=20, description="passages in an answer")


Tool = Annotated[Calculator | PythonTool | Search, Field(discriminator="type")]


class Tools(Episodes):
    """Tools for the model. A call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``; what is
    wrong with one is answered to the model. A turn without a call ends the episode.

    The tools and the format are said in the first message of the prompt.
    """

    type: Literal["tools"] = "tools"
    turn_tokens: int = Field(64, ge=1, le=8192, description="longest turn of the model, in tokens")
    tools: tuple[Tool, ...] = Field(min_length=1, max_length=8)
    tool_timeout_s: float = Field(
        30.0, gt=0, le=300, description="longest time of one call; its answer then says so"
    )

    @model_validator(mode="after")
    def _each_once(self) -> Tools:
        names = [tool.type for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("tools names one twice: the model calls them by their types")
        return self


class ReasoningGym(Episodes):
    """A puzzle of the library reasoning-gym, scored by it: https://github.com/open-thought/reasoning-gym

    A row of the data names it in ``puzzle_field``: ``{"task", "version", "seed", "size", "index"}``. An
    answer is the turn, or what stands in it between ``<answer>`` and ``</answer>``; while turns are left, a
    wrong one may be mended, and the last one counts.
    """

    type: Literal["reasoning_gym"] = "reasoning_gym"
    max_turns: int = Field(1, ge=1, le=64)
    turn_tokens: int = Field(48, ge=1, le=8192, description="longest turn of the model, in tokens")
    puzzle_field: str = Field("puzzle", min_length=1, max_length=64)


class OwnEnvironment(Episodes):
    """A tenant's ``class Environment``, in the sandbox:

        def __init__(self, item: dict, seed: int)
        def step(self, turn: str) -> str | None | {"observation", "reward", "done"}

    It may be built again and be given the earlier turns anew: what it draws must come from ``seed``.
    """

    type: Literal["python"]
    source: str = Field(min_length=1, max_length=256 * 1024)
    timeout_s: float = Field(10.0, gt=0, le=60, description="wall-clock limit of one turn, in seconds")


class RemoteEnvironment(Episodes):
    """A tenant's server: each turn is posted to it, signed by Standard Webhooks.

    {"episode", "seed", "item", "turn", "text"} -> {"observation", "reward", "done"}
    """

    type: Literal["remote"]
    url: Url
    secret: SecretName
    timeout_s: float = Field(30.0, gt=0, le=300, description="wall-clock limit of one turn, in seconds")


Environment = Annotated[
    GuessingGame | GridWorld | Chat | Tools | ReasoningGym | OwnEnvironment | RemoteEnvironment,
    Field(discriminator="type"),
]


def gives_rewards(environment: Environment) -> bool:
    """Whether episodes have rewards of their own, so that a grader is not needed."""
    return not isinstance(environment, Chat | Tools)


def corpora_of(environment: Environment | None) -> set[str]:
    """The files that the environment's tools search."""
    if not isinstance(environment, Tools):
        return set()
    return {tool.corpus for tool in environment.tools if isinstance(tool, Search)}
