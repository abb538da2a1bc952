"""From the posted body to the resolved spec, and the words of each refusal. No database."""

from __future__ import annotations

from typing import Any

import pytest

from backend.common.errors import InvalidRequest
from backend.jobs.requests import Data, merge, parse_request, resolve
from workers.spec import JobSpec

GRADER = {"type": "string_check", "name": "exact", "reference": "{{item.answer}}"}
DATA = Data(rows=100)
BUILT_IN = Data(rows=100, grader=GRADER, recommended={"steps": 12, "sampling": {"max_tokens": 24}})


def body(hyperparameters: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    reinforcement: dict[str, Any] = {"grader": GRADER}
    if hyperparameters is not None:
        reinforcement["hyperparameters"] = hyperparameters
    method = {"type": "reinforcement", "reinforcement": reinforcement}
    return {"model": "tiny", "training_file": "file-1", "method": method, **fields}


def spec_of(request: dict[str, Any], data: Data = DATA) -> JobSpec:
    return resolve(parse_request(request), data)


def refusal(request: Any, data: Data = DATA) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        resolve(parse_request(request), data)
    return caught.value


def test_the_resolved_spec_says_every_default():
    spec = spec_of(body())
    assert spec.rl.optimizer.learning_rate == 1e-3
    assert spec.rl.group_size == 8
    assert spec.seed == 0
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_openai_names_set_the_same_fields_as_ours():
    asked = spec_of(body({"batch_size": 5, "learning_rate": 0.002, "n_epochs": 2}))
    ours = spec_of(body(rl={"prompts_per_step": 5, "optimizer": {"learning_rate": 0.002}, "steps": 40}))
    assert asked == ours


@pytest.mark.parametrize(
    ("rows", "epochs", "batch", "steps"), [(100, 1, 8, 13), (100, 2, 8, 25), (3, 1, 8, 1)]
)
def test_an_epoch_is_every_row_once(rows, epochs, batch, steps):
    assert spec_of(body({"batch_size": batch, "n_epochs": epochs}), Data(rows=rows)).rl.steps == steps


def test_auto_and_null_leave_the_choice_to_the_defaults():
    hyperparameters = {"batch_size": "auto", "n_epochs": "auto", "learning_rate_multiplier": "auto"}
    request = body(hyperparameters, seed=None, suffix=None, metadata=None)
    assert spec_of(request) == spec_of(body())


def test_the_multiplier_scales_the_default_of_the_tuning():
    assert spec_of(body({"learning_rate_multiplier": 2})).rl.learning_rate == pytest.approx(2e-3)
    full = body({"learning_rate_multiplier": 2}, rl={"tuning": {"type": "full"}})
    assert spec_of(full).rl.learning_rate == pytest.approx(2e-5)


def test_a_built_in_dataset_brings_its_grader_and_settings():
    spec = spec_of({"model": "tiny", "training_file": "sums", "rl": {"steps": 3}}, BUILT_IN)
    assert spec.grader.reference == "{{item.answer}}"
    assert (spec.rl.steps, spec.rl.sampling.max_tokens) == (3, 24)


def test_a_recommended_rate_is_for_its_own_tuning_only():
    data = Data(rows=9, grader=GRADER, recommended={"optimizer": {"learning_rate": 2e-3, "beta2": 0.9}})
    request = {"model": "tiny", "training_file": "sums"}
    assert spec_of(request, data).rl.learning_rate == 2e-3
    full = spec_of({**request, "rl": {"tuning": {"type": "full"}}}, data)
    assert (full.rl.learning_rate, full.rl.optimizer.beta2) == (1e-5, 0.9)


REFUSALS = [
    ("not an object", [1], None, "JSON object"),
    ("no model", {"training_file": "file-1"}, "model", "required"),
    ("unknown field", body(temperature=1), "temperature", "no such field"),
    ("unknown rl field", body(rl={"temprature": 1}), "rl.temprature", "no such field"),
    ("unknown deep field", body(rl={"loss": {"clip": 1}}), "rl.loss.clip", "no such field"),
    (
        "unknown hyperparameter",
        body({"eval_samples": 4}),
        "method.reinforcement.hyperparameters.eval_samples",
        "no such field",
    ),
    ("a group of one", body(rl={"group_size": 1}), "rl.group_size", "must be at least 2"),
    ("not finite", body(rl={"loss": {"kl_beta": float("nan")}}), "rl.loss.kl_beta", "finite"),
    ("no such method", {**body(), "method": {"type": "distillation"}}, "method.type", "reinforcement"),
    ("tuning without type", body(rl={"tuning": {"rank": 4}}), "rl.tuning", "the field 'type' is required"),
    ("no such tuning", body(rl={"tuning": {"type": "prefix"}}), "rl.tuning", "'prefix' is not one of"),
    (
        "two batch sizes",
        body({"batch_size": 5}, rl={"prompts_per_step": 6}),
        "method.reinforcement.hyperparameters.batch_size",
        "batch_size is 5, but rl.prompts_per_step is 6",
    ),
    (
        "two rates",
        body({"learning_rate": 0.1}, rl={"optimizer": {"learning_rate": 0.2}}),
        "method.reinforcement.hyperparameters.learning_rate",
        "same setting",
    ),
    (
        "rate and multiplier",
        body({"learning_rate": 0.1, "learning_rate_multiplier": 2}),
        "method.reinforcement.hyperparameters.learning_rate_multiplier",
        "a rate is given as well",
    ),
    (
        "epochs and steps",
        body({"n_epochs": 1, "batch_size": 10}, rl={"steps": 11}),
        "method.reinforcement.hyperparameters.n_epochs",
        "means 10 steps, but rl.steps is 11",
    ),
    (
        "more devices than prompts",
        body(rl={"devices": 5, "prompts_per_step": 4}),
        "rl.devices",
        "each device needs at least one group",
    ),
    ("a seed too large", body(seed=2**31), "seed", "less than or equal to"),
    ("metadata of numbers", body(metadata={"a": 1}), "metadata.a", "valid string"),
]


@pytest.mark.parametrize(
    ("request_body", "param", "words"), [case[1:] for case in REFUSALS], ids=[c[0] for c in REFUSALS]
)
def test_a_refusal_names_the_field_and_the_reason(request_body, param, words):
    error = refusal(request_body)
    assert error.param == param
    assert words in error.message


def test_a_grader_at_fault_is_named_where_the_client_wrote_it():
    request = body()
    request["method"]["reinforcement"]["grader"] = {"type": "string_check", "name": "x"}
    assert refusal(request).param == "method.reinforcement.grader.reference"


def test_an_uploaded_file_brings_no_grader():
    error = refusal({"model": "tiny", "training_file": "file-1"})
    assert error.param == "method.reinforcement.grader"


def test_merge_replaces_objects_of_another_type():
    base = {"tuning": {"type": "lora", "rank": 8}, "steps": 1}
    assert merge(base, {"tuning": {"rank": 4}})["tuning"] == {"type": "lora", "rank": 4}
    assert merge(base, {"tuning": {"type": "full"}})["tuning"] == {"type": "full"}
    assert base == {"tuning": {"type": "lora", "rank": 8}, "steps": 1}
