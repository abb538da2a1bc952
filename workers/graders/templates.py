"""Templates of graders: ``{{item.answer}}``, ``{{item.parts[0].text}}``, ``{{sample.output_text}}``,
``{{sample.output_json.answer}}``.

``item`` is the dataset row, ``output_json`` the completion read as JSON. Text is inserted as it is, any other
value as JSON (``3``, ``true``, ``[1, 2]``). After https://developers.openai.com/api/docs/guides/graders
"""

from __future__ import annotations

import json
import re
from typing import Any

from workers.graders.grades import ErrorType, GradeError, GradeInput, read_json
from workers.spec import TEMPLATE

PART = re.compile(r"([a-zA-Z0-9_]+)|\[([0-9]+)\]")
PATH = re.compile(r"[a-zA-Z0-9_]+(?:\.[a-zA-Z0-9_]+|\[[0-9]+\])*")
BRACES = re.compile(r"\{\{(.*?)(?:\}\}|$)", re.DOTALL)
TEXT, JSON = "sample.output_text", "sample.output_json"
SAMPLE_JSON = re.compile(r"sample\.output_json(?=[.\[]|$)")


class TemplateError(ValueError):
    """A template that cannot be filled in; ``path`` is what stands between its braces."""

    def __init__(self, path: str, reason: str):
        super().__init__(f"{{{{{path}}}}}: {reason}")
        self.path, self.reason = path, reason


class Filler:
    """Fills templates with one sample; its JSON is read at most once."""

    def __init__(self, sample: GradeInput):
        self._sample = sample
        self._json: Any = None
        self._read = False

    def fill(self, template: str) -> str:
        """The template with every placeholder filled in. Raises GradeError."""
        try:
            check_template(template)
        except TemplateError as error:
            raise GradeError(ErrorType.TEMPLATE, str(error)) from None
        return TEMPLATE.sub(lambda match: as_text(self._value(match[1])), template)

    def _value(self, path: str) -> Any:
        if path == TEXT:
            return self._sample.output_text
        try:
            if SAMPLE_JSON.match(path):
                return self._of_json(path)
            return item_value(path.removeprefix("item."), self._sample.item)
        except TemplateError as error:
            kind = ErrorType.SAMPLE if SAMPLE_JSON.match(path) else ErrorType.TEMPLATE
            raise GradeError(kind, str(error)) from None

    def _of_json(self, path: str) -> Any:
        if not self._read:
            try:
                self._json = read_json(self._sample.output_text)
            except ValueError:
                raise TemplateError(path, "the completion is not JSON") from None
            self._read = True
        return value_at(path, path.removeprefix(JSON), self._json, JSON, "the completion's JSON")


def check_template(template: str) -> None:
    """Refuse what no row could fill in: a malformed path, an unknown namespace. Raises TemplateError."""
    for match in BRACES.finditer(template):
        path = match[1].strip()
        if not TEMPLATE.fullmatch(match[0]) or not PATH.fullmatch(path):
            raise TemplateError(path, "expected a path like item.answer or item.parts[0].text")
        namespace = re.split(r"[.\[]", path)[0]
        if namespace == "sample" and path != TEXT and not SAMPLE_JSON.match(path):
            raise TemplateError(path, "the fields of sample are output_text and output_json")
        if namespace not in {"item", "sample"} or not path.startswith(f"{namespace}."):
            raise TemplateError(path, "expected item.<field>, sample.output_text or sample.output_json")


def item_paths(*templates: str) -> list[str]:
    """The paths that the templates read below ``item``, without the namespace, in order, each once."""
    paths = (path for template in templates for path in TEMPLATE.findall(template))
    return list(dict.fromkeys(path.removeprefix("item.") for path in paths if path.startswith("item.")))


def item_value(path: str, item: dict[str, Any]) -> Any:
    """The row's value at ``answer`` or ``parts[0].text``. Raises TemplateError that names what is missing."""
    return value_at(f"item.{path}", path, item, "item", "the row")


def value_at(whole: str, path: str, value: Any, root: str, where: str) -> Any:
    """What stands at ``path`` below ``value``; ``whole``, ``root`` and ``where`` name it in errors."""
    seen = root
    for key, index in PART.findall(path):
        step = f".{key}" if key else f"[{index}]"
        try:
            value = step_into(value, key, index)
        except LookupError:
            raise TemplateError(whole, f"{where} has no {seen}{step}") from None
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
