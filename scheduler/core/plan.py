"""``plan(snapshot, policy)``: the one place where it is decided who runs where. See README.md beside it."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.core.admit import admit
from scheduler.core.board import Board
from scheduler.core.draft import Draft, ordered
from scheduler.core.multiplex import Multiplex
from scheduler.core.start import start
from scheduler.core.state import POLICIES, Pipeline, Plan, Policy, QueuedJob, Snapshot
from scheduler.core.turns import turns

Pass = Callable[[Draft], Draft]

#: The passes of policies that give whole devices, in order; each sees the world after the earlier ones.
#: The other policies are ``multiplex.py``.
PASSES: dict[str, tuple[Pass, ...]] = {"exclusive": (admit, turns, start)}


def plan(snapshot: Snapshot, policy: Policy) -> Plan:
    """Decide. The same snapshot, in whatever order its rows come, gives the same plan, byte for byte.

    Raises ``ValueError`` for an unknown policy, and for a row that the rules cannot read.
    """
    _require_known(policy)
    _require_readable(snapshot)
    if policy.name not in PASSES:
        board = Board.of(ordered(snapshot), policy.shares)
        board.touch_all()
        return Multiplex(board, policy).decide()
    draft = Draft(ordered(snapshot), policy)
    for step in PASSES[policy.name]:
        draft = step(draft)
    return Plan(draft.actions, draft.refusals)


def decide(board: Board, policy: Policy) -> Plan:
    """Decide about what was touched since the last decision, and apply it to the board."""
    _require_known(policy)
    if policy.name not in PASSES:
        return Multiplex(board, policy).decide()
    decided = plan(board.snapshot(), policy)
    for action in decided.actions:
        board.apply(action)
    board.untouch()
    return decided


def _require_known(policy: Policy) -> None:
    if policy.name not in POLICIES:
        raise ValueError(f"policy {policy.name!r} is not one of {', '.join(sorted(POLICIES))}")


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
