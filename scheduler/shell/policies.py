"""The daemon's policy by name: one of the core's, with parts of it switched off to measure their worth.

``lookahead`` is a policy, ``lookahead-no-fuse-no-merge`` the same without two of its parts.
"""

from __future__ import annotations

from dataclasses import replace

from scheduler.core.state import POLICIES, Policy

#: What can be switched off.
SWITCHES = ("fuse", "merge", "shares", "wait", "stream")


def policy_named(name: str) -> Policy:
    """Raises ``ValueError`` that says which names there are."""
    base, *off = name.split("-no-")
    if base not in POLICIES:
        raise ValueError(f"JIGSAW_POLICY={name}: no such policy; there are: {', '.join(POLICIES)}")
    policy = POLICIES[base]
    for switch in off:
        if switch not in SWITCHES or not getattr(policy, switch):
            on = ", ".join(f"-no-{one}" for one in SWITCHES if getattr(policy, one)) or "nothing"
            raise ValueError(f"JIGSAW_POLICY={name}: of {base} one can switch off: {on}")
    return replace(policy, **dict.fromkeys(off, False))
