"""What can be said of a grader before it grades."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from workers.graders.formula import FormulaError, parse
from workers.graders.templates import TemplateError, check_template
from workers.outside import OutsideError, check_url
from workers.sandbox.pool import check_source
from workers.spec import (
    EndpointGrader,
    Grader,
    JsonSchemaGrader,
    MultiGrader,
    PythonGrader,
    ScoreModelGrader,
    template_fields,
)
from workers.spec.graders import templates

#: Keywords of JSON Schema that hold data, not schemas.
DATA = frozenset({"const", "enum", "default", "examples"})


def check_grader(grader: Grader) -> None:
    """Refuse a grader that could grade no row. Raises ValueError that says why and where.

    Asks no server; a Python grader is compiled, in the sandbox, and not run.
    """
    if isinstance(grader, MultiGrader):
        for name, part in grader.graders.items():
            try:
                check_grader(part)
            except ValueError as error:
                raise ValueError(f"graders.{name}: {error}") from None
        try:
            parse(grader.calculate_output, grader.graders.keys())
        except FormulaError as error:
            raise ValueError(f"calculate_output: {error}") from None
        return
    for template in templates(grader):
        check_template(template)
    match grader:
        case PythonGrader():
            check_source(grader.source)
        case JsonSchemaGrader():
            check_schema(grader.json_schema)
        case ScoreModelGrader() | EndpointGrader():
            try:
                check_url(grader.url)
            except OutsideError as error:
                raise ValueError(f"url: {error}") from None


def check_templates(grader: Grader, fields: Collection[str]) -> None:
    """Refuse a grader that reads what no row has; ``fields`` are those that some row has.

    Raises TemplateError, a ValueError.
    """
    for name in sorted(template_fields(grader) - set(fields)):
        raise TemplateError(f"item.{name}", f"no row of the data has the field {name!r}")


def check_schema(schema: dict[str, Any]) -> None:
    """Refuse what is no JSON Schema, or needs more than itself. Raises ValueError."""
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        place = "".join(f"[{part!r}]" for part in error.absolute_path)
        raise ValueError(f"json_schema{place}: {error.message[:200]}") from None
    except RecursionError:
        raise ValueError("json_schema is nested too deeply") from None
    resource = DRAFT202012.create_resource(schema)
    resolver = Registry().with_resource("", resource).resolver()
    for keyword, text in strings(schema):
        if keyword == "pattern":
            check_pattern(text)
        elif not text.startswith("#"):
            raise ValueError(
                f"json_schema: {keyword} {text[:100]!r} leads out of the schema; # begins one within"
            )
        else:
            try:
                resolver.lookup(text)
            except Unresolvable:
                raise ValueError(f"json_schema: {keyword} {text[:100]!r} leads nowhere") from None


def check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"json_schema: the pattern {pattern[:100]!r} is none: {error}") from None


def strings(schema: Any) -> Iterator[tuple[str, str]]:
    """The schema's references and patterns, each with its keyword."""
    if isinstance(schema, list):
        for each in schema:
            yield from strings(each)
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in ("$ref", "$dynamicRef", "pattern") and isinstance(value, str):
            yield key, value
        elif key == "patternProperties" and isinstance(value, dict):
            yield from (("pattern", pattern) for pattern in value)
            yield from strings(list(value.values()))
        elif key == "properties" and isinstance(value, dict):
            yield from strings(list(value.values()))
        elif key not in DATA:
            yield from strings(value)
