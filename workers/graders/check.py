"""What can be said of a grader before it grades."""

from __future__ import annotations

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

#: Keywords of JSON Schema that hold data, and those that hold schemas by names of the tenant's.
DATA = frozenset({"const", "enum", "default", "examples"})
NAMED = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs"})


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
    for reference in references(schema):
        shown = f"json_schema: the reference {reference[:100]!r}"
        if not reference.startswith("#"):
            raise ValueError(f"{shown} leads out of the schema; one within begins with #")
        try:
            resolver.lookup(reference)
        except Unresolvable:
            raise ValueError(f"{shown} leads nowhere") from None


def references(schema: Any) -> Iterator[str]:
    """The values of ``$ref`` and ``$dynamicRef`` where they are keywords."""
    if isinstance(schema, list):
        for each in schema:
            yield from references(each)
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in ("$ref", "$dynamicRef") and isinstance(value, str):
            yield value
        elif key in NAMED and isinstance(value, dict):
            yield from references(list(value.values()))
        elif key not in DATA:
            yield from references(value)
