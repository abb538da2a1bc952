"""From what was seen to what is to be done: the core's plan, screened, and the world after it.

Policies that multiplex look only at what was touched since the last decision.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from scheduler.core.board import Board
from scheduler.core.draft import ordered
from scheduler.core.invariants import screened
from scheduler.core.plan import PASSES, plan
from scheduler.core.plan import decide as decide_on_board
from scheduler.core.state import Action, Plan, Policy, Snapshot
from scheduler.shell.observe import World
from scheduler.shell.touch import EVERYTHING, Touch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """``after`` is the world once ``plan`` is carried out, ``devices`` those whose speeds may be new."""

    world: World
    policy: Policy
    plan: Plan
    after: Board
    devices: frozenset[str]

    def without(self, lost: Collection[Action]) -> Decision:
        """What is left when these cannot be done."""
        actions = tuple(action for action in self.plan.actions if action not in lost)
        after = board_of(self.world.snapshot, self.policy)
        for action in actions:
            after.apply(action)
        left = Plan(actions, self.plan.refusals)
        return Decision(self.world, self.policy, left, after, self.devices)


def multiplexes(policy: Policy) -> bool:
    """Whether it decides by what was touched; the others look at everything."""
    return policy.name not in PASSES


def decide(world: World, policy: Policy, touch: Touch = EVERYTHING) -> Decision:
    snapshot = ordered(world.snapshot)
    looked_at: Iterable[str]
    if not multiplexes(policy):
        decided, looked_at = plan(snapshot, policy), [device.name for device in snapshot.devices]
    else:
        board = board_of(snapshot, policy)
        _touch(board, touch)
        looked_at = set(board.touched)
        decided = decide_on_board(board, policy)
    after = board_of(snapshot, policy)
    kept, wrong = screened(after, decided, policy)
    if wrong:
        log.error("actions left out, they break: %s; snapshot: %r", wrong, snapshot)
    return Decision(world, policy, kept, after, frozenset(looked_at))


def board_of(snapshot: Snapshot, policy: Policy) -> Board:
    """The world as it is, with nothing to decide."""
    board = Board.of(ordered(snapshot), policy.shares)
    board.untouch()
    return board


def _touch(board: Board, touch: Touch) -> None:
    if touch.everything:
        board.touch_all()
        return
    board.admission = touch.admission
    board.touched |= touch.devices & board.devices.keys()
    for id in sorted(touch.pipelines & board.pipelines.keys()):
        board.offering[id] = None
        board.touched.update(name for name in board.pipelines[id].home if name in board.devices)
