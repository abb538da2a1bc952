"""What the world looks like after an action: one function for the plan itself, the simulator and tests.

It trusts that the action is legal (``invariants.illegal`` says so) and raises ``ValueError`` only where there
is nothing to apply it to.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.core.board import Board
from scheduler.core.state import Action, Snapshot


def apply(snapshot: Snapshot, action: Action) -> Snapshot:
    return apply_all(snapshot, (action,))


def apply_all(snapshot: Snapshot, actions: Iterable[Action]) -> Snapshot:
    """Apply one after another, in time linear in snapshot and actions together. Rows come out in order."""
    board = Board.of(snapshot)
    for action in actions:
        board.apply(action)
    return board.snapshot()
