"""The daemon's policy is a setting; one that it does not know is refused when it starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from django.core.management import CommandError, call_command

from scheduler.core.state import POLICIES
from scheduler.shell.policies import SWITCHES, policy_named


def test_the_default_looks_ahead(settings):
    assert policy_named(settings.SCHEDULER_POLICY) == POLICIES["lookahead"]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_of_the_core_is_carried_out(name):
    assert policy_named(name) == POLICIES[name]


def test_parts_are_switched_off_by_suffixes():
    assert policy_named("lookahead-no-fuse") == replace(POLICIES["lookahead"], fuse=False)
    off = policy_named("lookahead-no-" + "-no-".join(SWITCHES))
    assert off == replace(POLICIES["lookahead"], **dict.fromkeys(SWITCHES, False))
    assert policy_named("rollout_only-no-shares") == replace(POLICIES["rollout_only"], shares=False)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fastest", "JIGSAW_POLICY=fastest: no such policy; there are: exclusive, .*, lookahead"),
        ("lookahead-no-brain", "of lookahead one can switch off: -no-fuse, .*-no-stream"),
        ("exclusive-no-fuse", "of exclusive one can switch off: nothing"),
    ],
)
def test_what_there_is_not_is_refused(settings, monkeypatch, name, reason):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    settings.SCHEDULER_POLICY = name
    with pytest.raises(CommandError, match=reason):
        call_command("run_scheduler")
