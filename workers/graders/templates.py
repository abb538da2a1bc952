"""Templates of graders: ``{{item.answer}}``, ``{{item.parts[0].text}}``, ``{{sample.output_text}}``.

``item`` is the dataset row. Text is inserted as it is, any other value as JSON (``3``, ``true``, ``[1, 2]``).
"""

from __future__ import annotations

import json
import re
from typing import Any

from workers.spec import TEMPLATE

PART = re.compile(r"([a-zA-Z0-9_]+)|\[([0-9]+)\]")
PATH = re.compile(r"[a-zA-Z0-9_]+(?:\.[a-zA-Z0-9_]+|\[[0-9]+\])*")
BRACES = re.compile(r"\{\{(.*?)(?:\}\}|$)", re.DOTALL)


class TemplateError(ValueError):
    """A template that cannot be filled in; ``path`` is what stands between its braces."""

    def __init__(self, path: str, reason: str):
        super().__init__(f"{{{{{path}}}}}: {reason}")
        self.path, self.reason = path, reason


def render(template: str, item: dict[str, Any], output_text: str) -> str:
    """The template with every placeholder filled in. Raises TemplateError."""
    check_template(template)
    return TEMPLATE.sub(lambda match: as_text(lookup(match[1], item, output_text)), template)


def check_template(template: str) -> None:
    """Refuse what no row could fill in: a malformed path, an unknown namespace. Raises TemplateError."""
    for match in BRACES.finditer(template):
        path = match[1].strip()
        if not TEMPLATE.fullmatch(match[0]) or not PATH.fullmatch(path):
            raise TemplateError(path, "expected a path like item.answer or item.parts[0].text")
        namespace = path.split(".")[0]
        if path.startswith("sample.output_json"):
            raise TemplateError(
                path, "output_json is available to python graders only; use sample.output_text"
            )
        if namespace == "sample" and path != "sample.output_text":
            raise TemplateError(path, "the only field of sample is output_text")
        if namespace not in {"item", "sample"} or path == "item":
            raise TemplateError(path, "expected item.<field> or sample.output_text")


def item_paths(*templates: str) -> list[str]:
    """The paths that the templates read below ``item``, without the namespace, in order, each once."""
    paths = (path for template in templates for path in TEMPLATE.findall(template))
    return list(dict.fromkeys(path.removeprefix("item.") for path in paths if path.startswith("item.")))


def lookup(path: str, item: dict[str, Any], output_text: str) -> Any:
    if path == "sample.output_text":
        return output_text
    return item_value(path.removeprefix("item."), item)


def item_value(path: str, item: dict[str, Any]) -> Any:
    """The row's value at ``answer`` or ``parts[0].text``. Raises TemplateError that names what is missing."""
    value: Any = item
    seen = "item"
    for key, index in PART.findall(path):
        step = f".{key}" if key else f"[{index}]"
        try:
            value = step_into(value, key, index)
        except LookupError:
            raise TemplateError(f"item.{path}", f"the row has no {seen}{step}") from None
        seen += step
    return value


def step_into(value: Any, key: str, index: str) -> Any:
    if key and isinstance(value, dict):
        return value[key]
    if index and isinstance(value, list):
        return value[int(index)]
    raise LookupError


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
