"""The new-job form, made from the spec's own schema: each field of ``RLConfig`` is a knob on the page.

    request (what /v1 takes)  ◄── body(form data) ── form ◄── sections(values) ── defaults + recommended

A knob is named by its dotted path in the request, ``rl.sampling.temperature``; errors come back under the
same names. A new field of the spec appears in the form by itself.
"""

from __future__ import annotations

import re
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from django.http import QueryDict
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from backend.jobs.requests import located, merge
from workers.spec import ALGORITHMS, Asynchronous, FullFineTuning, Grader, LoRA, RLConfig, Synchronous

RL = "rl"
ALGORITHM = f"{RL}.algorithm"
#: Those that learn from data alone have other files and are asked for by the API.
ALGORITHMS_OFFERED = tuple(name for name, algorithm in ALGORITHMS.items() if algorithm.rolls_out)
TUNING = f"{RL}.tuning"
LEARNING_RATE = f"{RL}.optimizer.learning_rate"
#: Fields that are one of several models, by tag; the first is the default.
UNIONS: dict[str, dict[str, type[BaseModel]]] = {
    "mode": {"sync": Synchronous, "async": Asynchronous},
    "tuning": {"lora": LoRA, "full": FullFineTuning},
}
#: How the choice between them reads, and what is said where a model has no settings.
VARIANT_WORDS = {
    "sync": ("Synchronous", "Every step samples with the newest weights: rollouts wait for the update."),
    "async": ("Asynchronous", ""),
    "lora": ("LoRA adapter", ""),
    "full": (
        "Every weight",
        "All parameters of the model are trained. Each device holds the weights, the gradients and the "
        "optimizer's moments.",
    ),
}

SECTION_WORDS = {
    RL: ("Run", "How long, on how many samples, and what happens to them."),
    f"{RL}.sampling": ("Sampling", "How completions are drawn from the model."),
    f"{RL}.mode": ("Steps", "Whether rollouts wait for the update before them."),
    TUNING: ("What is trained", "A small adapter beside frozen weights, or every weight."),
    f"{RL}.optimizer": ("Optimizer", "AdamW over the job's optimizer steps."),
    f"{RL}.loss": ("Loss", "The clipped policy-gradient loss and its KL penalty."),
}
LABELS = {
    "steps": "Steps",
    "kl_beta": "KL weight (beta)",
    "eps": "Epsilon",
    "beta1": "Beta 1",
    "beta2": "Beta 2",
    "max_grad_norm": "Gradient clip norm",
    "average": "Average over",
}
#: Said where the schema's own description leaves a beginner alone.
HELP = {
    f"{RL}.algorithm": "how advantages are estimated and what the loss is; what is left empty is as it says",
    f"{RL}.steps": "rounds of rollouts, grading and training",
    f"{RL}.prompts_per_step": "rows of the data drawn per step",
    f"{TUNING}.rank": "width of the adapter; more learns more and costs more",
    f"{RL}.optimizer.schedule": "how the rate goes on after the warm-up",
    f"{RL}.optimizer.beta1": "decay of the gradient's running mean",
    f"{RL}.optimizer.beta2": "decay of its running square",
    f"{RL}.optimizer.eps": "keeps the division stable",
    f"{RL}.optimizer.weight_decay": "pull of the weights towards zero per step",
}


#: Settings of the first section that are about the machine rather than about learning.
MACHINE = (
    "precision",
    "devices",
    "micro_batch_size",
    "checkpoint_every",
    "keep_checkpoints",
    "sample_groups",
)
MACHINE_WORDS = ("Devices and checkpoints", "Where it runs and what it leaves behind.")

_GRADERS = get_args(get_args(Grader)[0])
#: Tags of the spec's tagged unions: ``python``, ``lora``, ...
TAGS = frozenset(
    tag
    for model in (*_GRADERS, *(model for models in UNIONS.values() for model in models.values()))
    for tag in get_args(model.model_fields["type"].annotation)
)


@dataclass(frozen=True)
class Knob:
    """One input. ``kind``: integer, number, flag, answer, choice, choices, texts.

    A value of None leaves the setting to the algorithm; ``usual`` is what that is now.
    """

    path: str
    kind: str
    label: str
    help: str
    value: Any
    options: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    usual: str = ""

    @property
    def element_id(self) -> str:
        return self.path.replace(".", "-")

    @property
    def shown(self) -> str:
        """The value as the input's text."""
        if self.kind == "texts":
            return "\n".join(text.replace("\\", "\\\\").replace("\n", "\\n") for text in self.value)
        if self.kind == "answer" and self.value is not None:
            return "yes" if self.value else "no"
        return "" if self.value is None else f"{self.value}"

    @property
    def range(self) -> str:
        """The bounds a reader may want to know before the check says so."""
        if self.minimum is not None and self.maximum is not None:
            return f"{self.minimum:,g} to {self.maximum:,g}"
        if self.maximum is not None:
            return f"at most {self.maximum:,g}"
        return "" if self.minimum is None else f"at least {self.minimum:,g}"


@dataclass(frozen=True)
class Variant:
    """One alternative of a tagged union. ``about`` stands where it has no knobs."""

    tag: str
    title: str
    about: str
    knobs: tuple[Knob, ...]


@dataclass(frozen=True)
class Section:
    """Knobs under one heading. ``variants`` are the alternatives of a tagged union."""

    path: str
    title: str
    about: str
    knobs: tuple[Knob, ...]
    variants: tuple[Variant, ...] = ()
    chosen: str = ""


def sections(values: Mapping[str, Any]) -> list[Section]:
    """The form's sections with ``values`` (an ``rl`` tree as JSON) in the knobs."""
    usual = _usual(values)
    plain = list(_knobs(RLConfig, RL, values, usual))
    machine = {f"{RL}.{name}" for name in MACHINE}
    found = [Section(RL, *SECTION_WORDS[RL], knobs=tuple(k for k in plain if k.path not in machine))]
    for name, info in RLConfig.model_fields.items():
        path = f"{RL}.{name}"
        if name in UNIONS:
            found.append(_union_section(name, values[name]))
        elif _is_model(info.annotation):
            knobs = tuple(_knobs(info.annotation, path, values[name], usual[name]))
            found.append(Section(path, *SECTION_WORDS[path], knobs=knobs))
    last = tuple(knob for knob in plain if knob.path in machine)
    return [*found, Section(f"{RL}.machine", *MACHINE_WORDS, knobs=last)]


def _union_section(name: str, values: Mapping[str, Any]) -> Section:
    path = f"{RL}.{name}"
    variants = []
    for tag, model in UNIONS[name].items():
        shown = values if values["type"] == tag else model().model_dump(mode="json")
        knobs = tuple(knob for knob in _knobs(model, path, shown, shown) if knob.path != f"{path}.type")
        variants.append(Variant(tag, *VARIANT_WORDS[tag], knobs))
    return Section(path, *SECTION_WORDS[path], knobs=(), variants=tuple(variants), chosen=values["type"])


def _usual(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is chosen for everything that ``values`` leave out; as for the defaults where they do not fit."""
    said = {name: value for name, value in _said(values).items() if name not in UNIONS}
    try:
        return RLConfig.model_validate({**said, "tuning": values["tuning"]}).model_dump(mode="json")
    except ValidationError:
        return RLConfig().model_dump(mode="json")


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is left out."""
    return {
        name: _said(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if value is not None
    }


def _knobs(
    model: type[BaseModel], prefix: str, values: Mapping[str, Any], usual: Mapping[str, Any]
) -> Iterator[Knob]:
    for name, info in model.model_fields.items():
        kind, options = _kind(info.annotation)
        if kind is None:
            continue
        path = f"{prefix}.{name}"
        if path == ALGORITHM:
            options = ALGORITHMS_OFFERED
        minimum, maximum = _bounds(info)
        yield Knob(
            path=path,
            kind=kind,
            label=LABELS.get(name) or name.replace("_", " ").capitalize(),
            help=info.description or HELP.get(path, ""),
            value=values[name],
            options=options,
            minimum=minimum,
            maximum=maximum,
            usual=_words(usual.get(name)) if info.default is None else "",
        )


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else f"{value}"


def _kind(annotation: Any) -> tuple[str | None, tuple[str, ...]]:
    """The kind of input for a field's type; None for a nested object, which is a section of its own."""
    if annotation is bool:
        return "flag", ()
    if annotation is int:
        return "integer", ()
    if annotation is float:
        return "number", ()
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "choice", tuple(str(option) for option in arguments)
    if origin is tuple:
        inner = _kind(arguments[0])
        return ("choices", inner[1]) if inner[0] == "choice" else ("texts", ())
    if origin in {Union, types.UnionType}:
        plain = [argument for argument in arguments if argument is not type(None)]
        if any(_is_model(argument) for argument in plain):
            return None, ()
        kind, options = _kind(plain[0])
        return ("answer", ("", "yes", "no")) if kind == "flag" else (kind, ("", *options) if options else ())
    if origin is Annotated or _is_model(annotation):
        return None, ()
    return "text", ()


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _bounds(info: FieldInfo) -> tuple[float | None, float | None]:
    """Inclusive bounds for the input; exclusive ones are left to the check on the server."""
    low = next((m.ge for m in info.metadata if isinstance(m, annotated_types.Ge)), None)
    high = next((m.le for m in info.metadata if isinstance(m, annotated_types.Le)), None)
    return low, high


def default_values() -> dict[str, Any]:
    """Every default of ``RLConfig``; None for what is left to the algorithm."""
    return _defaults(RLConfig)


def _defaults(model: type[BaseModel]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        if isinstance(info.default, BaseModel):
            found[name] = _defaults(type(info.default))
        else:
            found[name] = list(info.default) if isinstance(info.default, tuple) else info.default
    return found


def flat(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """``{"rl.sampling.temperature": 1.0, ...}`` of a tree; lists are leaves."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}.{name}"
        leaves.update(flat(value, path) if isinstance(value, Mapping) else {path: value})
    return leaves


def rl_from_form(data: QueryDict) -> dict[str, Any]:
    """The ``rl`` object the form describes. An empty input asks for the default; text stays text where a
    number is due, so that the spec's own check names it."""
    tree: dict[str, Any] = {}
    tags = {name: data.get(f"{RL}.{name}.type", next(iter(models))) for name, models in UNIONS.items()}
    for knob in _all_knobs(tags.values()):
        value = _read(knob, data)
        if value is not None:
            _put(tree, knob.path.split(".")[1:], value)
    for name, tag in tags.items():
        _put(tree, [name, "type"], tag)
    return tree


def shown_values(data: QueryDict, start: Mapping[str, Any]) -> dict[str, Any]:
    """``start`` with what the form says laid over it, right or wrong: what was typed is shown again."""
    said = rl_from_form(data)
    for name, models in UNIONS.items():
        if said[name]["type"] != start[name]["type"]:
            start = {**start, name: models[said[name]["type"]]().model_dump(mode="json")}
    return merge(dict(start), said)


def _all_knobs(tags: Collection[str]) -> Iterator[Knob]:
    for section in sections(default_values()):
        yield from section.knobs
        for variant in section.variants:
            if variant.tag in tags:
                yield from variant.knobs


def _read(knob: Knob, data: QueryDict) -> Any:
    if knob.kind == "flag":
        return knob.path in data
    if knob.kind == "choices":
        return data.getlist(knob.path)
    text = data.get(knob.path, "")
    if knob.kind == "texts":
        return [ESCAPED.sub(_unescape, line) for line in text.replace("\r\n", "\n").split("\n") if line]
    text = text.strip()
    if text == "":
        return None
    if knob.kind == "answer":
        return {"yes": True, "no": False}.get(text, text)
    return number(text) if knob.kind in {"integer", "number"} else text


#: A line cannot hold a line feed, so it is written as in a program: ``\\n``.
ESCAPED = re.compile(r"\\([n\\])")


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else "\\"


def number(text: str) -> int | float | str:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def differences(rl: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``rl`` must be said to get it from ``base``: the leaves that differ, as a tree."""
    if rl.get("type", base.get("type")) != base.get("type"):
        return dict(rl)
    said: dict[str, Any] = {}
    for name, value in rl.items():
        if isinstance(value, Mapping) and isinstance(base.get(name), Mapping):
            below = differences(value, base[name])
            if below:
                # A tagged union's settings need the tag beside them.
                said[name] = {"type": value["type"], **below} if "type" in value else below
        elif value != base.get(name):
            said[name] = value
    return said


def field_errors(error: ValidationError) -> dict[str, str]:
    """The first complaint about each field, by its dotted path in the request."""
    found: dict[str, str] = {}
    for entry in error.errors(include_url=False):
        names = [str(part) for part in entry["loc"]]
        path = ".".join(name for i, name in enumerate(names) if not _is_tag(names, i))
        path, said = located(path, entry["msg"].removeprefix("Value error, "))
        found.setdefault(path, said)
    return found


def _is_tag(names: list[str], index: int) -> bool:
    """Pydantic puts the tag of a tagged union behind the field that holds it."""
    return index > 0 and names[index - 1] in {"grader", *UNIONS} and names[index] in TAGS
