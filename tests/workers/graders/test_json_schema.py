"""JSON against a schema, in the sandbox."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from workers.graders import sandboxed
from workers.graders.grades import ErrorType, GradeInput
from workers.graders.run import grade_batch
from workers.sandbox.pool import SandboxPool
from workers.spec import JsonSchemaGrader

PERSON = {
    "type": "object",
    "properties": {"name": {"$ref": "#/$defs/name"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "minLength": 1}},
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxPool]:
    with SandboxPool(1, scratch_root=tmp_path_factory.mktemp("scratch")) as pool:
        yield pool


def ask(pool: SandboxPool, schema: dict[str, Any], *texts: str, **settings: Any) -> list[Any]:
    grader = JsonSchemaGrader(type="json_schema", json_schema=schema, **settings)
    return grade_batch(grader, [GradeInput({}, text) for text in texts], pool=pool)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"name": "Ada", "age": 36}', 1.0),
        (' {"name": "Ada"}\n', 1.0),
        ('{"name": ""}', 0.0),
        ('{"name": "Ada", "age": -1}', 0.0),
        ('{"name": "Ada", "age": NaN}', 0.0),
        ('{"name": "Ada", "more": 1}', 0.0),
        ("[]", 0.0),
        ('{"name": "Ada"', 0.0),
        ('```json\n{"name": "Ada"}\n```', 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_what_fits_scores_one(pool: SandboxPool, text: str, score: float) -> None:
    (result,) = ask(pool, PERSON, text)
    assert (result.score, result.error) == (score, None)


def test_a_part_of_the_completions_json_can_be_checked(pool: SandboxPool) -> None:
    right, wrong, none = ask(
        pool, {"type": "integer"}, '{"n": 3}', '{"n": "x"}', "3", input="{{sample.output_json.n}}"
    )
    assert (right.score, wrong.score) == (1.0, 0.0)
    assert (none.score, none.error_type) == (None, ErrorType.SAMPLE)


def test_a_pattern_that_backtracks_for_ever_ends_at_the_limit(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandboxed, "OWN_TIMEOUT_S", 0.5)
    slow, quick = ask(pool, {"pattern": "^(a+)+$"}, '"' + "a" * 40 + '!"', '"aa"')
    assert (slow.score, slow.error_type) == (None, ErrorType.TIMEOUT)
    assert quick.score == 1.0


@pytest.mark.parametrize("reference", ["https://example.com/schema.json", "#/$defs/none", "#"])
def test_a_reference_that_leads_nowhere_is_an_error(pool: SandboxPool, reference: str) -> None:
    (result,) = ask(pool, {"$ref": reference}, "1")
    assert (result.score, result.error_type) == (None, ErrorType.EXCEPTION)
