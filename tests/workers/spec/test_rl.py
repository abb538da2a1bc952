"""The configuration of a run: resolved when it is made, the same when read again, and nothing ignored."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from workers.spec import ALGORITHMS, RLConfig, Strict, warmup_factor
from workers.spec.rl import JOB_FIELDS

NAMES = sorted(ALGORITHMS)
#: For each field that some algorithm ignores a value that is not its default.
OTHER: dict[str, Any] = {
    "mode": {"type": "async"},
    "group_size": 5,
    "normalize_advantage": True,
    "group_baseline": True,
    "mask_truncated": True,
    "overlong_buffer": 4,
    "overlong_penalty": 2.0,
    "sampling_rounds": 3,
    "max_grade_errors": 0.1,
    "max_idle_steps": 3,
    "sample_groups": 0,
    "value": {},
    "sampling.temperature": 0.5,
    "sampling.stop": ["x"],
    "loss.average": "token",
    "loss.clip_low": 0.3,
    "loss.clip_high": 0.3,
    "loss.dual_clip": 3.0,
    "loss.kl_beta": 0.1,
    "loss.kl_in": "reward",
    "loss.kl_estimator": "k2",
    "loss.entropy_coef": 0.1,
    "loss.importance": "mask",
    "loss.importance_cap": 3.0,
    "loss.dpo_beta": 0.2,
}
IGNORED = [(name, field) for name in NAMES for field in sorted(ALGORITHMS[name].ignores - JOB_FIELDS)]


def nested(path: str, value: Any) -> dict[str, Any]:
    *outer, name = path.split(".")
    return {outer[0]: {name: value}} if outer else {name: value}


def refusal(**fields: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        RLConfig(**fields)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_is_resolved_and_reads_the_same_again(name):
    made = RLConfig(algorithm=name)
    again = RLConfig.model_validate_json(made.model_dump_json())
    assert again == made
    assert again.model_dump() == made.model_dump()
    for path, value in ALGORITHMS[name].defaults.items():
        if value is not None:
            found: Any = made
            for part in path.split("."):
                found = getattr(found, part)
            assert found == value, path
    assert made.learning_rate > 0


@pytest.mark.parametrize(("name", "field"), IGNORED)
def test_what_an_algorithm_ignores_is_refused_by_name(name, field):
    text = refusal(algorithm=name, **nested(field, OTHER[field]))
    assert f"{field} has no effect with algorithm {name}" in text


@pytest.mark.parametrize("name", NAMES)
def test_what_an_algorithm_does_not_ignore_is_taken(name):
    """With what the field needs beside it."""
    beside = {
        "loss.kl_in": {"kl_beta": 0.1},
        "loss.kl_estimator": {"kl_beta": 0.1},
        "loss.importance_cap": {"importance": "cap"},
    }
    for field, value in OTHER.items():
        if field in ALGORITHMS[name].ignores:
            continue
        fields = nested(field, value)
        fields.setdefault("loss", {}).update(beside.get(field, {}))
        if field == "overlong_penalty":
            fields["overlong_buffer"] = 4
        if field == "mode" or (field == "sampling_rounds" and not ALGORITHMS[name].compares_in_group):
            continue
        made = RLConfig(algorithm=name, updates_per_step=2, **fields)
        assert RLConfig.model_validate(made.model_dump()) == made


@pytest.mark.parametrize("name", [n for n in NAMES if ALGORITHMS[n].rolls_out])
def test_a_group_of_one_is_refused_where_it_is_compared(name):
    if ALGORITHMS[name].compares_in_group:
        assert f"group_size must be at least 2 with algorithm {name}" in refusal(algorithm=name, group_size=1)
    else:
        assert RLConfig(algorithm=name, group_size=1).group_size == 1


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"updates_per_step": 5}, "updates_per_step exceeds prompts_per_step"),
        ({"devices": 5}, "devices exceeds prompts_per_step"),
        ({"algorithm": "reinforce_pp", "group_baseline": True, "group_size": 1}, "with group_baseline"),
        ({"loss": {"clip_low": 0.1}}, "loss.clip_low needs updates_per_step above 1"),
        ({"loss": {"kl_in": "reward"}}, "loss.kl_in needs loss.kl_beta above 0"),
        ({"loss": {"importance_cap": 3}}, "loss.importance_cap needs loss.importance"),
        ({"mode": {"type": "async"}, "loss": {"importance": "off"}}, "may not be off with mode async"),
        ({"mode": {"type": "async"}, "sampling_rounds": 2}, "needs mode sync"),
        ({"algorithm": "ppo", "sampling_rounds": 2}, "sampling_rounds above 1 has no effect"),
        ({"overlong_penalty": 1.0}, "overlong_penalty needs an overlong_buffer above 0"),
        ({"overlong_buffer": 64}, "overlong_buffer must be below sampling.max_tokens"),
        ({"sample_groups": 64, "group_size": 9}, "exceeds 512 stored completions"),
    ],
)
def test_misfits_are_refused(fields, text):
    assert text in refusal(**fields)


def test_dapo_takes_a_fifth_of_the_length_for_its_overlong_penalty():
    made = RLConfig(algorithm="dapo", sampling={"max_tokens": 200})
    assert (made.overlong_buffer, made.overlong_penalty, made.sampling_rounds) == (40, 1.0, 3)
    assert RLConfig(algorithm="dapo", mode={"type": "async"}).sampling_rounds == 1


def test_what_is_trained_of_a_row():
    counts = {name: RLConfig(algorithm=name).samples_per_group for name in ("grpo", "sft", "dpo")}
    assert counts == {"grpo": 8, "sft": 1, "dpo": 2}
    assert RLConfig(algorithm="dpo").needs_reference and not RLConfig(algorithm="sft").needs_reference


@pytest.mark.parametrize(
    ("optimizer", "factors"),
    [
        ({"warmup_steps": 2}, [0.5, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "cosine"}, [1, 0.904508, 0.654508, 0.345492, 0.095492]),
    ],
)
def test_schedules_by_hand(optimizer, factors):
    made = RLConfig(steps=5, optimizer=optimizer)
    assert [warmup_factor(made, step) for step in range(5)] == pytest.approx(factors, abs=1e-6)


def test_no_field_is_without_a_place():
    """A new field that algorithms ignore has a value here, so that its refusal is tested."""
    assert {field for _, field in IGNORED} <= OTHER.keys()
    assert issubclass(RLConfig, Strict)
