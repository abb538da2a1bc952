"""Which of the core's policies the daemon can carry out."""

from __future__ import annotations

from scheduler.core.state import POLICIES, Policy

#: The others plan actions that pipelines and residents do not know yet; the simulator runs them all.
CARRIED_OUT = ("exclusive",)


def policy_named(name: str) -> Policy:
    """Raises ``ValueError`` that says which names there are."""
    if name in CARRIED_OUT:
        return POLICIES[name]
    choices = ", ".join(CARRIED_OUT)
    if name in POLICIES:
        raise ValueError(
            f"JIGSAW_POLICY={name}: only the simulator (python -m scheduler.sim) runs this policy; "
            f"the daemon carries out: {choices}"
        )
    raise ValueError(f"JIGSAW_POLICY={name}: no such policy; the daemon carries out: {choices}")
