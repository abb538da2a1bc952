"""OpenAI's methods, what data bring, and what a resolved spec is as a request. No database."""

from __future__ import annotations

from typing import Any

import pytest

from backend.common.errors import InvalidRequest
from backend.jobs.requests import Data, parse_request, resolve
from workers.spec import ALGORITHMS, JobSpec, default_learning_rate

GRADER = {"type": "string_check", "name": "exact", "reference": "{{item.answer}}"}
GAME = {"type": "guessing_game", "max_turns": 6}
BASE = {"model": "tiny", "training_file": "file-1"}


def spec_of(data: Data | None = None, **fields: Any) -> JobSpec:
    return resolve(parse_request({**BASE, **fields}), data or Data(rows=100))


def refusal(data: Data | None = None, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        spec_of(data, **fields)
    return caught.value


def method(type: str, **inner: Any) -> dict[str, Any]:
    return {"type": type, type: inner}


@pytest.mark.parametrize(("name", "algorithm"), [("supervised", "sft"), ("dpo", "dpo")])
def test_a_method_names_its_algorithm(name, algorithm):
    spec = spec_of(method=method(name))
    assert (spec.rl.algorithm, spec.grader, spec.environment) == (algorithm, None, None)
    assert spec.rl.learning_rate == default_learning_rate(algorithm, "lora")
    assert spec_of(method={"type": name}) == spec == spec_of(rl={"algorithm": algorithm})


def test_openais_hyperparameters_of_preferences():
    spec = spec_of(
        method=method(
            "dpo",
            hyperparameters={
                "beta": 0.3,
                "batch_size": 5,
                "n_epochs": 2,
                "learning_rate_multiplier": 2,
            },
        )
    )
    assert (spec.rl.loss.dpo_beta, spec.rl.prompts_per_step, spec.rl.steps) == (0.3, 5, 40)
    assert spec.rl.learning_rate == pytest.approx(2 * default_learning_rate("dpo", "lora"))


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name not in ("sft", "dpo")])
def test_reinforcement_is_any_algorithm_that_samples(algorithm):
    spec = spec_of(method=method("reinforcement", grader=GRADER), rl={"algorithm": algorithm})
    assert spec.rl.algorithm == algorithm


TOOLS = {"type": "tools", "tools": [{"type": "calculator"}]}
SFT, DPO = method("supervised"), method("dpo")
REFUSALS = {
    "method and algorithm differ": ({"method": SFT, "rl": {"algorithm": "grpo"}}, "rl.algorithm"),
    "sft is no reinforcement": (
        {"method": method("reinforcement"), "rl": {"algorithm": "sft"}},
        "rl.algorithm",
    ),
    "settings of another method": (
        {"method": {"type": "supervised", "reinforcement": {"grader": GRADER}}},
        "method.reinforcement",
    ),
    "beta of no preferences": (
        {"method": method("supervised", hyperparameters={"beta": 0.1})},
        "method.supervised.hyperparameters.beta",
    ),
    "beta twice": (
        {"method": method("dpo", hyperparameters={"beta": 0.1}), "rl": {"loss": {"dpo_beta": 0.2}}},
        "method.dpo.hyperparameters.beta",
    ),
    "a grader for sft": ({"method": SFT, "grader": GRADER}, "grader"),
    "an environment for dpo": ({"method": DPO, "environment": GAME}, "environment"),
    "a temperature for sft": (
        {"method": SFT, "rl": {"sampling": {"temperature": 0.5}}},
        "rl.sampling.temperature",
    ),
    "a clip for cispo": (
        {"grader": GRADER, "rl": {"algorithm": "cispo", "loss": {"clip_low": 0.1}}},
        "rl.loss.clip_low",
    ),
    "a value head for grpo": ({"grader": GRADER, "rl": {"value": {"lam": 0.9}}}, "rl.value"),
    "no reward at all": ({}, "method.reinforcement.grader"),
    "tools give no reward": ({"environment": TOOLS}, "method.reinforcement.grader"),
    "a clip that never clips": ({"grader": GRADER, "rl": {"loss": {"clip_low": 0.1}}}, "rl.loss.clip_low"),
    "turns longer than the episode": (
        {"environment": {**GAME, "turn_tokens": 65}},
        "environment.turn_tokens",
    ),
    "an unknown algorithm": ({"grader": GRADER, "rl": {"algorithm": "magic"}}, "rl.algorithm"),
    "two graders": (
        {"grader": GRADER, "method": method("reinforcement", grader={**GRADER, "name": "b"})},
        "grader",
    ),
}


@pytest.mark.parametrize(("fields", "param"), REFUSALS.values(), ids=REFUSALS)
def test_what_has_no_effect_is_refused_by_its_name(fields, param):
    error = refusal(**fields)
    assert error.param == param
    assert len(error.message) > len(param)


def test_the_same_grader_may_stand_in_both_places():
    both = spec_of(grader=GRADER, method=method("reinforcement", grader=GRADER))
    assert both == spec_of(grader=GRADER) == spec_of(method=method("reinforcement", grader=GRADER))


def test_a_dataset_brings_its_environment_unless_another_or_none_is_asked_for():
    data = Data(rows=9, grader=GRADER, environment=GAME)
    assert spec_of(data).environment.max_turns == 6
    assert spec_of(data, environment={"type": "guessing_game", "max_turns": 2}).environment.max_turns == 2
    assert spec_of(data, environment=None).environment is None
    game = spec_of(data, grader=None)
    assert (game.grader, game.environment.type) == (None, "guessing_game")
    sft = spec_of(data, method=method("supervised"))
    assert (sft.grader, sft.environment) == (None, None)


def test_a_recommendation_for_one_algorithm_is_none_for_another():
    data = Data(
        rows=9,
        grader=GRADER,
        recommended={
            "algorithm": "dapo",
            "steps": 12,
            "updates_per_step": 2,
            "sampling_rounds": 2,
            "loss": {"clip_high": 0.3, "kl_beta": 0.001},
            "sampling": {"max_tokens": 24},
            "optimizer": {"learning_rate": 2e-3, "schedule": "linear"},
        },
    )
    assert spec_of(data).rl.algorithm == "dapo"
    rloo = spec_of(data, rl={"algorithm": "rloo"}).rl
    assert (rloo.steps, rloo.sampling_rounds, rloo.loss.clip_high, rloo.learning_rate) == (12, 1, 0.2, 2e-3)
    sft = spec_of(data, rl={"algorithm": "sft"}).rl
    assert (sft.sampling.max_tokens, sft.optimizer.schedule) == (24, "linear")
    assert sft.learning_rate == default_learning_rate("sft", "lora")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_can_be_asked_of_a_dataset_that_recommends_another(algorithm):
    for recommended in (
        {"algorithm": "dapo", "overlong_buffer": 8, "overlong_penalty": 0.5, "sampling_rounds": 4},
        {"algorithm": "ppo", "value": {"lam": 0.9}, "loss": {"kl_beta": 0.01, "kl_in": "reward"}},
        {"algorithm": "dpo", "loss": {"dpo_beta": 0.2}},
        {"mask_truncated": True, "loss": {"entropy_coef": 0.01, "importance": "cap"}, "max_idle_steps": 5},
    ):
        data = Data(rows=9, grader=GRADER, environment=GAME, recommended=recommended)
        assert spec_of(data, rl={"algorithm": algorithm}).rl.algorithm == algorithm


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_a_resolved_spec_is_a_request_for_the_same(algorithm, tuning):
    rolls = ALGORITHMS[algorithm].rolls_out
    spec = spec_of(
        **({"grader": GRADER} if rolls else {}),
        rl={"algorithm": algorithm, "tuning": {"type": tuning}},
        suffix="a",
        seed=7,
        metadata={"k": "v"},
    )
    other = Data(rows=9, grader=GRADER, environment=GAME, recommended={"algorithm": "dapo", "steps": 3})
    assert resolve(parse_request(spec.model_dump(mode="json")), other) == spec


def test_a_resolved_spec_of_an_asynchronous_run_too():
    spec = spec_of(grader=GRADER, rl={"algorithm": "dapo", "mode": {"type": "async"}})
    assert resolve(parse_request(spec.model_dump(mode="json")), Data(rows=9)) == spec


def test_a_start_brings_its_tuning():
    data = Data(rows=9, start="ckpt-1", tuning={"type": "lora", "rank": 4, "alpha": 8.0})
    spec = spec_of(data, grader=GRADER, start_from="ftjob-1")
    assert (spec.start_from, spec.rl.tuning.rank, spec.rl.tuning.alpha) == ("ckpt-1", 4, 8.0)
    asked = spec_of(data, grader=GRADER, start_from="ftjob-1", rl={"tuning": {"rank": 8}})
    assert (asked.rl.tuning.rank, asked.rl.tuning.alpha) == (8, 8.0)
