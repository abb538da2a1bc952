"""The new-job form, made from the spec's own schema: each field of ``RLConfig`` is a knob on the page.

    request (what /v1 takes)  ◄── body(form data) ── form ◄── sections(values) ── defaults + recommended

A knob is named by its dotted path in the request, ``rl.sampling.temperature``; errors come back under the
same names. A new field of the spec appears in the form by itself. The algorithm is chosen first: what it has
no use for is neither shown nor sent, and what it chooses by itself stands as the placeholder of an empty
input.
"""

from __future__ import annotations

import re
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from django.http import QueryDict
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from backend.jobs.requests import located, merge
from frontend.web.spec_words import (
    HELP,
    LABELS,
    MACHINE,
    MACHINE_WORDS,
    RL,
    SECTION_WORDS,
    VARIANT_WORDS,
)
from workers.spec import (
    ALGORITHMS,
    UNION_TAGS,
    Asynchronous,
    FullFineTuning,
    LoRA,
    RLConfig,
    Synchronous,
    Value,
)

ALGORITHM = f"{RL}.algorithm"
TUNING = f"{RL}.tuning"
#: Fields that are one of several models, by tag; the first is the default.
UNIONS: dict[str, dict[str, type[BaseModel]]] = {
    "mode": {"sync": Synchronous, "async": Asynchronous},
    "tuning": {"lora": LoRA, "full": FullFineTuning},
}
#: A yes or no that may be left to the algorithm.
ANSWERS = {"": None, "yes": True, "no": False}


@dataclass(frozen=True)
class Knob:
    """One input. ``kind``: integer, number, flag, answer, choice, choices, texts.

    A value of None leaves the setting to the algorithm; ``usual`` is what that is now. ``ignored_by`` are the
    algorithms that have no use for it.
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
    ignored_by: tuple[str, ...] = ()

    @property
    def element_id(self) -> str:
        return self.path.replace(".", "-")

    @property
    def shown(self) -> str:
        """The value as the input's text."""
        if self.kind == "texts":
            return "\n".join(text.replace("\\", "\\\\").replace("\n", "\\n") for text in self.value)
        return said(self.value)

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

    @property
    def ignored_by(self) -> tuple[str, ...]:
        """The algorithms that have no use for anything in it."""
        if self.variants:
            return ignored_by(self.path)
        of_knobs = [set(knob.ignored_by) for knob in self.knobs]
        return tuple(name for name in ALGORITHMS if all(name in names for names in of_knobs))


def sections(values: Mapping[str, Any]) -> list[Section]:
    """The form's sections with ``values`` (an ``rl`` tree as JSON) in the knobs."""
    usual = usual_values(values)
    return [
        replace(
            section,
            knobs=_with_usual(section.knobs, usual),
            variants=tuple(replace(each, knobs=_with_usual(each.knobs, usual)) for each in section.variants),
        )
        for section in _sections(values)
    ]


def _with_usual(knobs: tuple[Knob, ...], usual: Mapping[str, Any]) -> tuple[Knob, ...]:
    return tuple(
        replace(knob, usual=said(usual.get(knob.path))) if knob.value is None else knob for knob in knobs
    )


def _sections(values: Mapping[str, Any]) -> list[Section]:
    plain = [knob for knob in _knobs(RLConfig, RL, values) if knob.path != ALGORITHM]
    machine = {f"{RL}.{name}" for name in MACHINE}
    found = [Section(RL, *SECTION_WORDS[RL], knobs=tuple(k for k in plain if k.path not in machine))]
    for name, info in RLConfig.model_fields.items():
        path, model = f"{RL}.{name}", _model(info.annotation)
        if name in UNIONS:
            found.append(_union_section(name, values[name]))
        elif model is not None:
            knobs = tuple(_knobs(model, path, values[name]))
            found.append(Section(path, *SECTION_WORDS[path], knobs=knobs))
    last = tuple(knob for knob in plain if knob.path in machine)
    return [*found, Section(f"{RL}.machine", *MACHINE_WORDS, knobs=last)]


def _union_section(name: str, values: Mapping[str, Any]) -> Section:
    path = f"{RL}.{name}"
    variants = []
    for tag, model in UNIONS[name].items():
        shown = values if values["type"] == tag else model().model_dump(mode="json")
        knobs = tuple(knob for knob in _knobs(model, path, shown) if knob.path != f"{path}.type")
        variants.append(Variant(tag, *VARIANT_WORDS[tag], knobs))
    return Section(path, *SECTION_WORDS[path], knobs=(), variants=tuple(variants), chosen=values["type"])


def _knobs(model: type[BaseModel], prefix: str, values: Mapping[str, Any]) -> Iterator[Knob]:
    for name, info in model.model_fields.items():
        kind, options = _kind(info.annotation)
        if kind is None:
            continue
        path = f"{prefix}.{name}"
        minimum, maximum = _bounds(info)
        yield Knob(
            path=path,
            kind=kind,
            label=LABELS.get(name) or name.replace("_", " ").capitalize(),
            help=HELP.get(path) or info.description or "",
            value=values[name],
            options=("", *options) if kind == "choice" and info.default is None else options,
            minimum=minimum,
            maximum=maximum,
            ignored_by=ignored_by(path),
        )


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
        if plain == [bool]:
            return "answer", tuple(ANSWERS)
        return (None, ()) if any(_is_model(argument) for argument in plain) else _kind(plain[0])
    if origin is Annotated or _is_model(annotation):
        return None, ()
    return "text", ()


def _model(annotation: Any) -> type[BaseModel] | None:
    """The one model that a field holds, or may hold."""
    plain = [part for part in get_args(annotation) if part is not type(None)] or [annotation]
    return plain[0] if len(plain) == 1 and _is_model(plain[0]) else None


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _bounds(info: FieldInfo) -> tuple[float | None, float | None]:
    """Inclusive bounds for the input; exclusive ones are left to the check on the server."""
    low = next((m.ge for m in info.metadata if isinstance(m, annotated_types.Ge)), None)
    high = next((m.le for m in info.metadata if isinstance(m, annotated_types.Le)), None)
    return low, high


# ---------------------------------------------------------------- values


def ignored_by(path: str) -> tuple[str, ...]:
    """The algorithms that have no use for a setting, by its dotted path in the request."""
    names = path.removeprefix(f"{RL}.").split(".")
    above = {".".join(names[:length]) for length in range(1, len(names) + 1)}
    return tuple(name for name, algorithm in ALGORITHMS.items() if above & algorithm.ignores)


def default_values() -> dict[str, Any]:
    """Every default of ``RLConfig``; None where the algorithm chooses."""
    found: dict[str, Any] = RLConfig().model_dump(mode="json")
    for name, info in RLConfig.model_fields.items():
        model = _model(info.annotation)
        if model is None:
            found[name] = None if info.default is None else found[name]
        else:
            inner = found[name] or Value().model_dump(mode="json")
            chosen = {field for field, about in model.model_fields.items() if about.default is None}
            found[name] = {field: None if field in chosen else value for field, value in inner.items()}
    return found


def usual_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a request that says ``values`` has in every setting, flat; while they are wrong, what their
    algorithm and their kind of tuning have by themselves.
    """
    asked = _asked(values, RL, values.get("algorithm"))
    named = {
        "algorithm": asked.get("algorithm"),
        "tuning": {"type": (asked.get("tuning") or {}).get("type")},
    }
    for tree in (asked, named):
        try:
            return flat(RLConfig.model_validate(tree).model_dump(mode="json"), RL)
        except ValidationError:
            continue
    return {}


def _asked(values: Mapping[str, Any], prefix: str, algorithm: Any) -> dict[str, Any]:
    """What the form sends of ``values``: without what is left out, and without what the algorithm ignores."""
    found = {}
    for name, value in values.items():
        path = f"{prefix}.{name}"
        if value is None or algorithm in ignored_by(path):
            continue
        found[name] = _asked(value, path, algorithm) if isinstance(value, Mapping) else value
    return found


def said(value: Any) -> str:
    """A value as an input or its placeholder has it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else f"{value}"


def flat(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """``{"rl.sampling.temperature": 1.0, ...}`` of a tree; lists are leaves."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}.{name}"
        leaves.update(flat(value, path) if isinstance(value, Mapping) else {path: value})
    return leaves


# ---------------------------------------------------------------- what a browser sends


def rl_from_form(data: QueryDict) -> dict[str, Any]:
    """The ``rl`` object the form describes, without what its algorithm has no use for. An empty input asks
    for the default; text stays text where a number is due, so that the spec's own check names it.
    """
    algorithm = data.get(ALGORITHM, RLConfig.model_fields["algorithm"].default)
    tree: dict[str, Any] = {"algorithm": algorithm}
    tags = {
        name: data.get(f"{RL}.{name}.type", next(iter(models)))
        for name, models in UNIONS.items()
        if algorithm not in ignored_by(f"{RL}.{name}")
    }
    for knob in _all_knobs(tags.values()):
        value = None if algorithm in knob.ignored_by else _read(knob, data)
        if value is not None:
            _put(tree, knob.path.split(".")[1:], value)
    for name, tag in tags.items():
        _put(tree, [name, "type"], tag)
    return tree


def shown_values(data: QueryDict, start: Mapping[str, Any]) -> dict[str, Any]:
    """``start`` with what the form says laid over it, right or wrong: what was typed is shown again."""
    typed = rl_from_form(data)
    for name, models in UNIONS.items():
        tag = typed.get(name, start[name])["type"]
        if tag != start[name]["type"]:
            start = {**start, name: models[tag]().model_dump(mode="json")}
    return merge(dict(start), typed)


def _all_knobs(tags: Collection[str]) -> Iterator[Knob]:
    for section in _sections(default_values()):
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
    if knob.kind == "answer":
        return ANSWERS.get(text, text)
    if text == "":
        return None
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
    different: dict[str, Any] = {}
    for name, value in rl.items():
        if isinstance(value, Mapping) and isinstance(base.get(name), Mapping):
            below = differences(value, base[name])
            if below:
                # A tagged union's settings need the tag beside them.
                different[name] = {"type": value["type"], **below} if "type" in value else below
        elif value != base.get(name):
            different[name] = value
    return different


def field_errors(error: ValidationError) -> dict[str, str]:
    """The first complaint about each field, by its dotted path in the request."""
    found: dict[str, str] = {}
    for entry in error.errors(include_url=False):
        names = [str(part) for part in entry["loc"]]
        plain = ".".join(name for index, name in enumerate(names) if not index or name not in UNION_TAGS)
        path, reason = located(plain, entry["msg"].removeprefix("Value error, "))
        found.setdefault(path, reason)
    return found
