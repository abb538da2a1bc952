"""From what a client posts, in OpenAI's shape, to the resolved job spec.

    {"model", "training_file", "seed", "suffix", "metadata",
     "method": {"type": "reinforcement", "reinforcement": {"grader", "hyperparameters"}},
     "rl": {...}, "environment": {...}, "start_from": "ckpt-..."}

``rl`` is ours: every field of ``workers.spec.RLConfig``; and so are ``environment``, for episodes of several
turns, and ``start_from``, a checkpoint or the job that wrote it. ``grader`` may also stand at the top, as in
a resolved spec, which is a request too. Built-in datasets bring a grader, an environment and settings for
what is left out; ``null`` says that there is none. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, ValidationError

from backend.common.errors import InvalidRequest
from backend.jobs.methods import (
    GRADER_PATH,
    SAME_AS,
    Hyperparameters,
    Method,
    algorithm_of,
    method_of,
)
from workers.spec import (
    ALGORITHMS,
    Algorithm,
    JobSpec,
    RLConfig,
    Strict,
    default_learning_rate,
    first_error,
)

#: Fields of which null means none; of others it means that nothing is said.
MAY_BE_NONE = ("grader", "environment")


class JobRequest(Strict):
    model: str = Field(min_length=1, max_length=200)
    training_file: str = Field(min_length=1, max_length=200)
    method: Method | None = None
    grader: dict[str, Any] | None = None
    rl: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, Any] | None = None
    start_from: str | None = Field(None, min_length=1, max_length=200)
    seed: int | None = None
    suffix: str | None = None
    metadata: dict[str, str] | None = None


@dataclass(frozen=True)
class Data:
    """What the training data and the checkpoint to start from bring to the request.

    ``start`` is the checkpoint's id, ``tuning`` what made it: what the request leaves out is as it is there.
    """

    rows: int
    grader: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None
    recommended: dict[str, Any] = field(default_factory=dict)
    start: str | None = None
    tuning: dict[str, Any] | None = None


def parse_request(body: object) -> JobRequest:
    """The request with its outer fields checked; ``InvalidRequest`` names the first one at fault."""
    if not isinstance(body, dict):
        raise InvalidRequest("The request must be a JSON object.")
    given = {name: value for name, value in body.items() if value is not None or name in MAY_BE_NONE}
    try:
        return JobRequest.model_validate(given)
    except ValidationError as error:
        raise refusal(error) from None


def resolve(request: JobRequest, data: Data) -> JobSpec:
    """The whole spec, every default filled in."""
    rl = _rl(request, data)
    method = ALGORITHMS.get(rl.get("algorithm", RLConfig.model_fields["algorithm"].default))
    content = {
        "model": request.model,
        "training_file": request.training_file,
        "grader": _grader(request, data, method),
        "environment": _environment(request, data, method),
        "start_from": data.start,
        "rl": rl,
        "seed": request.seed or 0,
        "suffix": request.suffix,
        "metadata": request.metadata or {},
    }
    try:
        return JobSpec.model_validate(content)
    except ValidationError as error:
        raise refusal(error, grader_path(request)) from None


def grader_path(request: JobRequest) -> str:
    """Where the client wrote the grader, or would have."""
    return "grader" if request.grader is not None else GRADER_PATH


# ---------------------------------------------------------------- grader and environment


def _grader(request: JobRequest, data: Data, method: Algorithm | None) -> Any:
    asked = request.method and request.method.reinforcement
    if asked is not None and "grader" in asked.model_fields_set:
        if "grader" in request.model_fields_set and request.grader != asked.grader:
            raise InvalidRequest("grader and method.reinforcement.grader are two.", param="grader")
        return asked.grader
    if "grader" in request.model_fields_set:
        return request.grader
    return data.grader if _samples(method) else None


def _environment(request: JobRequest, data: Data, method: Algorithm | None) -> Any:
    if "environment" in request.model_fields_set:
        return request.environment
    return data.environment if _samples(method) else None


def _samples(method: Algorithm | None) -> bool:
    """Whether the algorithm has a use for what the data bring; one that there is not is refused anyway."""
    return method is None or method.rolls_out


# ---------------------------------------------------------------- settings


def _rl(request: JobRequest, data: Data) -> dict[str, Any]:
    hyper = Hyperparameters() if request.method is None else request.method.hyperparameters
    named = algorithm_of(request.method, request.rl.get("algorithm"))
    said = merge(request.rl, {} if named is None else {"algorithm": named})
    asked = merge(_from_hyperparameters(request, hyper, said), said)
    rl = merge(suitable(data.recommended, asked), asked)
    if data.tuning is not None:
        rl["tuning"] = merge({"tuning": data.tuning}, _only(asked, "tuning"))["tuning"]
    if hyper.learning_rate_multiplier is not None:
        _multiply_rate(request, rl, asked, hyper.learning_rate_multiplier)
    if hyper.n_epochs is not None:
        _steps_of_epochs(request, rl, asked, hyper.n_epochs, data.rows)
    return rl


def _hyper_path(request: JobRequest, name: str) -> str:
    assert request.method is not None
    return f"method.{request.method.type}.hyperparameters.{name}"


def _from_hyperparameters(request: JobRequest, hyper: Hyperparameters, rl: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, path in SAME_AS.items():
        value = getattr(hyper, name, None)
        if value is None:
            continue
        other = _look(rl, path)
        if other is not None and other != value:
            raise InvalidRequest(
                f"{name} is {value}, but rl.{'.'.join(path)} is {other}: they name the same setting.",
                param=_hyper_path(request, name),
            )
        found = merge(found, _nest(path, value))
    return found


def _multiply_rate(request: JobRequest, rl: dict[str, Any], asked: dict[str, Any], factor: float) -> None:
    """OpenAI's multiplier applies to the rate that would have been taken."""
    if _look(asked, ("optimizer", "learning_rate")) is not None:
        raise InvalidRequest(
            "learning_rate_multiplier scales the default rate; a rate is given as well.",
            param=_hyper_path(request, "learning_rate_multiplier"),
        )
    base = _look(rl, ("optimizer", "learning_rate"))
    if base is None:
        tuning = _look(rl, ("tuning", "type"))
        base = default_learning_rate(rl.get("algorithm", "grpo"), "full" if tuning == "full" else "lora")
    rl.update(merge(rl, _nest(("optimizer", "learning_rate"), base * factor)))


def _steps_of_epochs(
    request: JobRequest, rl: dict[str, Any], asked: dict[str, Any], epochs: int, rows: int
) -> None:
    """An epoch is every row once, ``prompts_per_step`` rows a step."""
    prompts = rl.get("prompts_per_step", RLConfig.model_fields["prompts_per_step"].default)
    if not isinstance(prompts, int) or prompts < 1:
        return  # the spec refuses it by name
    steps = math.ceil(rows * epochs / prompts)
    if asked.get("steps") not in {None, steps}:
        raise InvalidRequest(
            f"n_epochs {epochs} over {rows:,} rows means {steps:,} steps, but rl.steps is {asked['steps']}.",
            param=_hyper_path(request, "n_epochs"),
        )
    rl["steps"] = steps


def suitable(recommended: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """The recommendation without what was meant for another algorithm, or another kind of tuning."""
    default = RLConfig.model_fields["algorithm"].default
    meant = recommended.get("algorithm", default)
    algorithm = asked.get("algorithm", meant)
    found = recommended
    if algorithm != meant and algorithm in ALGORITHMS:
        for path in _particular() | ALGORITHMS[algorithm].ignores:
            found = _without(found, tuple(path.split(".")))
        if method_of(algorithm) != method_of(meant):
            found = _without(found, ("optimizer", "learning_rate"))
    kind = _look(asked, ("tuning", "type"))
    if kind is not None and kind != (_look(recommended, ("tuning", "type")) or "lora"):
        found = _without(found, ("optimizer", "learning_rate"))
    return found


def _particular() -> frozenset[str]:
    """Settings whose default, or whose use, is another with another algorithm."""
    return frozenset(path for algorithm in ALGORITHMS.values() for path in algorithm.defaults) | {
        "overlong_penalty",
        "loss.dual_clip",
        "value",
        "loss.dpo_beta",
    }


# ---------------------------------------------------------------- trees


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


def _without(tree: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    name, *rest = path
    if name not in tree or (rest and not isinstance(tree[name], dict)):
        return tree
    kept = {key: value for key, value in tree.items() if key != name}
    return {**kept, name: _without(tree[name], tuple(rest))} if rest else kept


def _only(tree: dict[str, Any], name: str) -> dict[str, Any]:
    return {name: tree[name]} if name in tree else {}


def _look(tree: dict[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = tree
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _nest(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return value


# ---------------------------------------------------------------- refusals


def refusal(error: ValidationError, grader: str = GRADER_PATH) -> InvalidRequest:
    """The spec's first complaint, about the field where the client wrote it."""
    path, reason = located(*first_error(error))
    if path.split(".")[0] == "grader":
        path = path.replace("grader", grader, 1)
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


def located(path: str, reason: str) -> tuple[str, str]:
    """What the spec says about several fields at once begins with the one at fault: it becomes the path."""
    fields = {"": JobSpec.model_fields, "rl": RLConfig.model_fields}.get(path, {})
    name, _, rest = reason.partition(" ")
    if name.split(".")[0] not in fields:
        return path, reason
    return (f"{path}.{name}" if path else name), rest
