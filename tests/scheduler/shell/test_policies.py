"""The daemon's policy is a setting; one that it cannot carry out is refused when it starts."""

from __future__ import annotations

import pytest
from django.core.management import CommandError, call_command

from scheduler.core.state import Policy
from scheduler.shell.policies import policy_named


def test_the_default_gives_whole_devices(settings):
    assert policy_named(settings.SCHEDULER_POLICY) == Policy(name="exclusive")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lookahead", "JIGSAW_POLICY=lookahead: only the simulator .* carries out: exclusive"),
        ("fastest", "JIGSAW_POLICY=fastest: no such policy; the daemon carries out: exclusive"),
    ],
)
def test_what_the_daemon_cannot_carry_out_is_refused(settings, monkeypatch, name, reason):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    settings.SCHEDULER_POLICY = name
    with pytest.raises(CommandError, match=reason):
        call_command("run_scheduler")
