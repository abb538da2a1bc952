"""A job's parts must fit together."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from workers.spec import JobSpec

CHECK = {"type": "string_check", "reference": "a"}
GAME = {"type": "guessing_game"}
TOOLS = {"type": "tools", "tools": [{"type": "calculator"}], "turn_tokens": 32}


def spec(**fields) -> JobSpec:
    return JobSpec.model_validate({"model": "m", "training_file": "f", **fields})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "grader is missing"),
        ({"environment": TOOLS}, "grader is missing"),
        ({"rl": {"algorithm": "sft"}, "grader": CHECK}, "grader has no effect with algorithm sft"),
        ({"rl": {"algorithm": "dpo"}, "environment": GAME}, "environment has no effect with algorithm dpo"),
        (
            {"environment": GAME | {"turn_tokens": 65}, "grader": CHECK},
            "environment.turn_tokens exceeds rl.sampling.max_tokens",
        ),
    ],
)
def test_what_does_not_fit_is_refused(fields, text):
    with pytest.raises(ValidationError, match=text):
        spec(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"grader": CHECK},
        {"environment": GAME},
        {"environment": TOOLS, "grader": CHECK},
        {"rl": {"algorithm": "sft"}},
        {"rl": {"algorithm": "dpo"}, "start_from": "ckpt-1"},
    ],
)
def test_what_fits_reads_the_same_again(fields):
    made = spec(**fields)
    assert JobSpec.model_validate_json(made.model_dump_json()) == made


def test_the_secrets_of_graders_and_environments_are_named():
    model = {
        "url": "https://x/v1",
        "model": "m",
        "input": [{"role": "user", "content": "?"}],
        "secret": "KEY",
    }
    graders = {
        "a": {"type": "score_model", **model},
        "b": {"type": "endpoint", "url": "https://y", "secret": "SIGN"},
    }
    multi = {"type": "multi", "graders": graders, "calculate_output": "a + b"}
    remote = {"type": "remote", "url": "https://z", "secret": "WORLD"}
    assert spec(grader=multi, environment=remote).secrets == {"KEY", "SIGN", "WORLD"}
    assert spec(grader=CHECK).secrets == set()
