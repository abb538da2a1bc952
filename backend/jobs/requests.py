"""From what a client posts, in OpenAI's shape, to the resolved job spec.

    {"model", "training_file", "seed", "suffix", "metadata",
     "method": {"type": "reinforcement", "reinforcement": {"grader", "hyperparameters"}},
     "rl": {...}, "environment": {...}}

``rl`` is ours: every field of ``workers.spec.RLConfig``; and so is ``environment``, for episodes of several
turns. The hyperparameters are OpenAI's names for three of them. Said twice, they must agree. Built-in
datasets bring a grader and settings for what is left out. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, ValidationError

from backend.common.errors import InvalidRequest
from workers.spec import DEFAULT_LEARNING_RATE, JobSpec, RLConfig, Strict, first_error

GRADER_PATH = "method.reinforcement.grader"
HYPER_PATH = "method.reinforcement.hyperparameters"

#: Hyperparameters of OpenAI's that name fields of ours.
SAME_AS = {"batch_size": ("prompts_per_step",), "learning_rate": ("optimizer", "learning_rate")}


def _auto(value: object) -> object:
    return None if value == "auto" else value


class Hyperparameters(Strict):
    """``auto`` leaves the choice to the defaults."""

    batch_size: Annotated[PositiveInt | None, BeforeValidator(_auto)] = None
    learning_rate: Annotated[PositiveFloat | None, BeforeValidator(_auto)] = None
    learning_rate_multiplier: Annotated[PositiveFloat | None, BeforeValidator(_auto)] = None
    n_epochs: Annotated[PositiveInt | None, BeforeValidator(_auto)] = None


class Reinforcement(Strict):
    grader: dict[str, Any] | None = None
    hyperparameters: Hyperparameters = Hyperparameters()


class Method(Strict):
    type: Literal["reinforcement"]
    reinforcement: Reinforcement = Reinforcement()


class JobRequest(Strict):
    model: str = Field(min_length=1, max_length=200)
    training_file: str = Field(min_length=1, max_length=200)
    method: Method = Method(type="reinforcement")
    rl: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, Any] | None = None
    seed: int | None = None
    suffix: str | None = None
    metadata: dict[str, str] | None = None


@dataclass(frozen=True)
class Data:
    """What the training data bring to the request."""

    rows: int
    grader: dict[str, Any] | None = None
    recommended: dict[str, Any] = field(default_factory=dict)


def parse_request(body: object) -> JobRequest:
    """The request with its outer fields checked; ``InvalidRequest`` names the first one at fault."""
    if not isinstance(body, dict):
        raise InvalidRequest("The request must be a JSON object.")
    given = {name: value for name, value in body.items() if value is not None}
    try:
        return JobRequest.model_validate(given)
    except ValidationError as error:
        raise _refusal(error) from None


def resolve(request: JobRequest, data: Data) -> JobSpec:
    """The whole spec, every default filled in."""
    grader = request.method.reinforcement.grader or data.grader
    if grader is None:
        raise InvalidRequest("A job on an uploaded file needs a grader.", param=GRADER_PATH)
    content = {
        "model": request.model,
        "training_file": request.training_file,
        "grader": grader,
        "environment": request.environment,
        "rl": _rl(request, data),
        "seed": request.seed or 0,
        "suffix": request.suffix,
        "metadata": request.metadata or {},
    }
    try:
        return JobSpec.model_validate(content).resolved()
    except ValidationError as error:
        raise _refusal(error) from None


def _rl(request: JobRequest, data: Data) -> dict[str, Any]:
    hyper = request.method.reinforcement.hyperparameters
    asked = merge(_from_hyperparameters(hyper, request.rl), request.rl)
    rl = merge(_suitable(data.recommended, asked), asked)
    if hyper.learning_rate_multiplier is not None:
        _multiply_rate(rl, asked, hyper.learning_rate_multiplier)
    if hyper.n_epochs is not None:
        _steps_of_epochs(rl, asked, hyper.n_epochs, data.rows)
    return rl


def _from_hyperparameters(hyper: Hyperparameters, rl: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, path in SAME_AS.items():
        value = getattr(hyper, name)
        if value is None:
            continue
        other = _look(rl, path)
        if other is not None and other != value:
            raise InvalidRequest(
                f"{name} is {value}, but rl.{'.'.join(path)} is {other}: they name the same setting.",
                param=f"{HYPER_PATH}.{name}",
            )
        found = merge(found, _nest(path, value))
    return found


def _multiply_rate(rl: dict[str, Any], asked: dict[str, Any], factor: float) -> None:
    """OpenAI's multiplier applies to the rate that would have been taken."""
    if _look(asked, ("optimizer", "learning_rate")) is not None:
        raise InvalidRequest(
            "learning_rate_multiplier scales the default rate; a rate is given as well.",
            param=f"{HYPER_PATH}.learning_rate_multiplier",
        )
    base = _look(rl, ("optimizer", "learning_rate"))
    if base is None:
        base = DEFAULT_LEARNING_RATE.get(_look(rl, ("tuning", "type")) or "lora", 1.0)
    rl.update(merge(rl, _nest(("optimizer", "learning_rate"), base * factor)))


def _steps_of_epochs(rl: dict[str, Any], asked: dict[str, Any], epochs: int, rows: int) -> None:
    """An epoch is every row once, ``prompts_per_step`` rows a step."""
    prompts = rl.get("prompts_per_step", RLConfig.model_fields["prompts_per_step"].default)
    if not isinstance(prompts, int) or prompts < 1:
        return  # the spec refuses it by name
    steps = math.ceil(rows * epochs / prompts)
    if asked.get("steps") not in {None, steps}:
        raise InvalidRequest(
            f"n_epochs {epochs} over {rows:,} rows means {steps:,} steps, but rl.steps is {asked['steps']}.",
            param=f"{HYPER_PATH}.n_epochs",
        )
    rl["steps"] = steps


def _suitable(recommended: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """The recommendation without its learning rate when that was meant for the other kind of tuning."""
    kind = _look(asked, ("tuning", "type"))
    if kind is None or kind == (_look(recommended, ("tuning", "type")) or "lora"):
        return recommended
    optimizer = {k: v for k, v in recommended.get("optimizer", {}).items() if k != "learning_rate"}
    return {**recommended, "optimizer": optimizer}


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``over`` laid on ``base``, object by object; one of another ``type`` replaces instead."""
    merged = dict(base)
    for name, value in over.items():
        below = merged.get(name)
        mergeable = isinstance(below, dict) and isinstance(value, dict)
        if mergeable and value.get("type", below.get("type")) == below.get("type"):
            merged[name] = merge(below, value)
        else:
            merged[name] = value
    return merged


def _look(tree: dict[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = tree
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _nest(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return value


def _refusal(error: ValidationError) -> InvalidRequest:
    path, reason = first_error(error)
    path = path.replace("grader", GRADER_PATH, 1) if path.split(".")[0] == "grader" else path
    entry = error.errors(include_url=False)[0]
    kind, context = entry["type"], entry.get("ctx", {})
    if kind == "extra_forbidden":
        reason = "there is no such field"
    elif kind == "missing":
        reason = "this field is required"
    elif kind == "union_tag_not_found":
        reason = f"the field {context['discriminator']} is required"
    elif kind == "union_tag_invalid":
        reason = f"the type {context['tag']!r} is not one of {context['expected_tags']}"
    return InvalidRequest(f"{path}: {reason}" if path else reason, param=path or None)
