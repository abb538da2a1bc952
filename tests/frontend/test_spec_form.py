"""The form shows every setting of the spec, and what it sends means what it shows."""

from __future__ import annotations

from typing import Any

import pytest
from django.http import QueryDict
from pydantic import ValidationError

from frontend.web import spec_form
from workers.spec import (
    ALGORITHMS,
    Asynchronous,
    FullFineTuning,
    JobSpec,
    LoRA,
    RLConfig,
    default_learning_rate,
)

GRADER = {"type": "math", "reference": "{{item.answer}}"}


def knobs() -> list[spec_form.Knob]:
    found = []
    for section in spec_form.sections(spec_form.default_values()):
        found += section.knobs
        for variant in section.variants:
            found += variant.knobs
    return found


def form(changes: dict[str, Any] | None = None) -> QueryDict:
    """What a browser sends of the form as it is first shown, with some inputs changed; None unticks."""
    data = QueryDict(mutable=True)
    data["rl.tuning.type"] = "lora"
    for knob in knobs():
        if knob.kind == "choices":
            data.setlist(knob.path, knob.value)
        elif knob.kind != "flag":
            data[knob.path] = knob.shown
        elif knob.value:
            data[knob.path] = "on"
    for path, value in (changes or {}).items():
        data.pop(path, None)
        if isinstance(value, list):
            data.setlist(path, value)
        elif value is not None:
            data[path] = value
    return data


def test_every_field_of_the_spec_is_shown_once_with_its_default_and_a_word_of_help():
    leaves = spec_form.flat(spec_form.default_values(), "rl")
    del leaves["rl.algorithm"]  # chosen before everything else
    del leaves["rl.tuning.type"], leaves["rl.mode.type"]  # the choice between a section's variants
    leaves["rl.mode.max_staleness"] = Asynchronous().max_staleness  # of the variant that is not chosen
    shown = {knob.path: knob for knob in knobs()}
    assert len(shown) == len(knobs())
    assert {path: knob.value for path, knob in shown.items()} == leaves
    assert all(knob.help for knob in shown.values())
    for section in spec_form.sections(spec_form.default_values()):
        assert section.title and section.about


def test_help_comes_from_the_schema():
    shown = {knob.path: knob for knob in knobs()}
    assert shown["rl.group_size"].help == RLConfig.model_fields["group_size"].description
    assert (shown["rl.group_size"].minimum, shown["rl.group_size"].maximum) == (1, 1024)
    assert shown["rl.loss.average"].options == ("", "token", "sequence", "constant")


def test_what_is_left_to_the_algorithm_is_said():
    values = spec_form.default_values()
    for algorithm, clip, normalize in (
        ("grpo", "0.2", "yes"),
        ("dr_grpo", "0.2", "no"),
        ("dapo", "0.28", "yes"),
    ):
        shown = {
            knob.path: knob
            for section in spec_form.sections({**values, "algorithm": algorithm})
            for knob in section.knobs
        }
        assert (shown["rl.loss.clip_high"].shown, shown["rl.loss.clip_high"].usual) == ("", clip)
        assert (shown["rl.normalize_advantage"].shown, shown["rl.normalize_advantage"].usual) == (
            "",
            normalize,
        )
        assert shown["rl.steps"].usual == ""


@pytest.mark.parametrize(("said", "meant"), [("yes", True), ("no", False), ("", None), ("maybe", "maybe")])
def test_a_yes_or_no_may_be_left_to_the_algorithm(said, meant):
    rl = spec_form.rl_from_form(form({"rl.normalize_advantage": said}))
    assert rl.get("normalize_advantage") == meant


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_an_algorithm_ignores_is_hidden_and_not_sent(algorithm):
    changes = {
        "rl.algorithm": algorithm,
        "rl.sampling.temperature": "0.7",
        "rl.loss.dpo_beta": "0.3",
        "rl.value.lam": "0.9",
        "rl.group_size": "4",
        "rl.mode.type": "async",
        "rl.group_baseline": "yes",
    }
    rl = spec_form.rl_from_form(form(changes))
    config = RLConfig.model_validate(rl)
    assert config.algorithm == algorithm
    method = ALGORITHMS[algorithm]
    assert (config.sampling.temperature == 0.7) == method.rolls_out
    assert config.asynchronous == method.rolls_out
    assert (config.loss.dpo_beta == 0.3) == (algorithm == "dpo")
    assert (config.value is not None and config.value.lam == 0.9) == (algorithm == "ppo")
    assert (config.group_baseline is True) == (algorithm == "reinforce_pp")
    for section in spec_form.sections({**spec_form.default_values(), "algorithm": algorithm}):
        for knob in section.knobs:
            assert knob.path in spec_form.flat(rl, "rl") or algorithm in knob.ignored_by or knob.shown == ""
    value = next(s for s in spec_form.sections(spec_form.default_values()) if s.path == "rl.value")
    assert (algorithm in value.ignored_by) == (algorithm != "ppo")


def test_the_usual_rate_is_that_of_the_algorithm_and_of_what_is_trained():
    values = spec_form.default_values()
    for algorithm, tuning in (("grpo", "lora"), ("sft", "lora"), ("dpo", "full")):
        asked = {**values, "algorithm": algorithm, "tuning": {"type": tuning}}
        usual = spec_form.usual_values(asked)["rl.optimizer.learning_rate"]
        assert usual == default_learning_rate(algorithm, tuning)
        # While something is wrong, too.
        assert spec_form.usual_values({**asked, "steps": "many"})["rl.optimizer.learning_rate"] == usual
    assert spec_form.usual_values({**values, "algorithm": "magic"}) == {}


def test_an_untouched_form_is_the_default_configuration():
    rl = spec_form.rl_from_form(form())
    assert RLConfig.model_validate(rl) == RLConfig()


def test_what_is_changed_is_what_is_sent():
    rl = spec_form.rl_from_form(
        form(
            {
                "rl.steps": " 7 ",
                "rl.shuffle": None,
                "rl.mask_truncated": "on",
                "rl.sampling.temperature": "0.7",
                "rl.sampling.stop": "END\r\n\\n\r\na\\\\n",
                "rl.tuning.targets": ["q_proj", "v_proj"],
                "rl.optimizer.learning_rate": "",
            }
        )
    )
    config = RLConfig.model_validate(rl)
    assert (config.steps, config.shuffle, config.mask_truncated) == (7, False, True)
    assert config.sampling.temperature == 0.7
    assert config.sampling.stop == ("END", "\n", "a\\n")
    assert config.tuning == LoRA(targets=("q_proj", "v_proj"))
    assert config.optimizer.learning_rate == RLConfig().optimizer.learning_rate


def test_the_other_kind_of_tuning_takes_none_of_loras_settings():
    rl = spec_form.rl_from_form(form({"rl.tuning.type": "full"}))
    assert RLConfig.model_validate(rl).tuning == FullFineTuning()


def test_an_asynchronous_run_brings_its_staleness():
    rl = spec_form.rl_from_form(form({"rl.mode.type": "async", "rl.mode.max_staleness": "3"}))
    assert RLConfig.model_validate(rl).mode == Asynchronous(max_staleness=3)
    shown = spec_form.shown_values(form({"rl.mode.type": "async"}), spec_form.default_values())
    assert shown["mode"] == {"type": "async", "max_staleness": 1}


def test_stop_texts_survive_being_shown():
    stop = ["END", "\n", "a\\n"]
    knob = next(knob for knob in knobs() if knob.path == "rl.sampling.stop")
    shown = spec_form.Knob(knob.path, knob.kind, knob.label, knob.help, stop).shown
    assert spec_form.rl_from_form(form({knob.path: shown}))["sampling"]["stop"] == stop


def test_what_was_typed_is_shown_again_right_or_wrong():
    values = spec_form.shown_values(
        form({"rl.steps": "many", "rl.loss.clip_low": "0.1"}), spec_form.default_values()
    )
    assert (values["steps"], values["loss"]["clip_low"], values["group_size"]) == ("many", 0.1, 8)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({}, {}),
        ({"rl.steps": "31"}, {"steps": 31}),
        ({"rl.sampling.max_tokens": "32", "rl.devices": "2"}, {"sampling": {"max_tokens": 32}, "devices": 2}),
        ({"rl.tuning.type": "full"}, {"tuning": {"type": "full"}}),
        ({"rl.mode.type": "async"}, {"mode": {"type": "async", "max_staleness": 1}}),
        ({"rl.tuning.rank": "8"}, {"tuning": {"type": "lora", "rank": 8}}),
    ],
)
def test_only_differences_need_saying(changes, difference):
    rl = spec_form.rl_from_form(form(changes))
    assert spec_form.differences(rl, spec_form.default_values()) == difference


def test_errors_are_told_by_dotted_path_without_the_unions_tags():
    content = {
        "model": "m",
        "training_file": "f",
        "grader": {"type": "math"},
        "rl": {"steps": "many", "group_size": 0, "tuning": {"type": "lora", "rank": 0}},
    }
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate(content)
    errors = spec_form.field_errors(caught.value)
    assert set(errors) == {"grader.reference", "rl.steps", "rl.group_size", "rl.tuning.rank"}
    assert "greater than or equal to 1" in errors["rl.group_size"]
    content["grader"]["reference"], content["rl"] = "7", {"algorithm": "cispo", "loss": {"clip_low": 0.1}}
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate(content)
    assert "no effect with algorithm cispo" in spec_form.field_errors(caught.value)["rl.loss.clip_low"]
