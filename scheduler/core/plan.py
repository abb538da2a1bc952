"""``plan(snapshot, policy)``: the one place where it is decided who runs where. See README.md beside it."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.core.admit import admit
from scheduler.core.draft import Draft, ordered
from scheduler.core.start import start
from scheduler.core.state import Pipeline, Plan, Policy, QueuedJob, Snapshot
from scheduler.core.turns import turns

Pass = Callable[[Draft], Draft]

#: The passes of each policy, in order. A later pass sees the world after the actions of the earlier ones.
PASSES: dict[str, tuple[Pass, ...]] = {"exclusive": (admit, turns, start)}


def plan(snapshot: Snapshot, policy: Policy) -> Plan:
    """Decide. The same snapshot, in whatever order its rows come, gives the same plan, byte for byte.

    Raises ``ValueError`` for an unknown policy, and for a row that the rules cannot read.
    """
    if policy.name not in PASSES:
        raise ValueError(f"policy {policy.name!r} is not one of {', '.join(sorted(PASSES))}")
    _require_readable(snapshot)
    draft = Draft(ordered(snapshot), policy)
    for step in PASSES[policy.name]:
        draft = step(draft)
    return Plan(draft.actions, draft.refusals)


def _require_readable(snapshot: Snapshot) -> None:
    tenants = {tenant.id for tenant in snapshot.tenants}
    for tenant in snapshot.tenants:
        if not tenant.weight > 0:
            raise ValueError(f"tenant {tenant.id}: weight is {tenant.weight}, must be above 0")
    everything: list[QueuedJob | Pipeline] = [*snapshot.queue, *snapshot.pipelines]
    for work in everything:
        if work.tenant not in tenants:
            raise ValueError(f"{work.id}: tenant {work.tenant} is not in the snapshot")
        if work.devices < 1:
            raise ValueError(f"{work.id}: devices is {work.devices}, must be at least 1")
