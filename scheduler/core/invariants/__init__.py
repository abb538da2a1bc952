"""What must hold of every snapshot and every plan, said a second time and plainly: scans, no indexes.

Each function returns sentences about what is wrong; an empty list is the proof that tests ask for. Where a
policy is left out it is ``exclusive``. The rules by noun: ``rows`` and ``computing`` of a snapshot,
``actions`` of one action, and of a whole plan ``turns`` (policy ``exclusive``) or ``sharing`` and ``caps``
(those that let several pipelines compute on a device).
"""

from __future__ import annotations

from scheduler.core.board import Board
from scheduler.core.draft import ordered
from scheduler.core.invariants import actions, caps, computing, rows, sharing, turns
from scheduler.core.state import Action, Evict, Merge, Plan, Policy, Resize, Snapshot, Start, Wait, Yield

#: Actions of which nothing is asked beyond the pipeline's homes and who lives there.
NEARBY = (Start, Resize, Yield, Merge, Wait)


def check(snapshot: Snapshot, policy: Policy | None = None) -> list[str]:
    """Contradictions inside a snapshot, as it is between two decisions."""
    policy = policy or Policy()
    return [*_always(snapshot, policy), *computing.unsettled(snapshot, policy)]


def illegal(snapshot: Snapshot, action: Action, policy: Policy) -> list[str]:
    """Why the action may not be done on this snapshot."""
    return actions.illegal(snapshot, action, policy)


def screen(snapshot: Snapshot, plan: Plan, policy: Policy) -> tuple[Plan, list[str]]:
    """The plan without the actions that may not be done after those before them, and why each was left out.

    What a daemon asks before it writes: one wrong action must stop neither the others nor the refusals.
    """
    return screened(Board.of(ordered(snapshot), policy.shares), plan, policy)


def screened(board: Board, plan: Plan, policy: Policy) -> tuple[Plan, list[str]]:
    """``screen`` of the world on ``board``, which is after what was kept.

    An action on a pipeline that lives somewhere is judged by what is around it, so that a long plan for a
    large pool costs what it touches.
    """
    kept: list[Action] = []
    wrong: list[str] = []
    for action in plan.actions:
        world = board.around(action.pipeline) if isinstance(action, NEARBY) else board.snapshot()
        reasons = illegal(world, action, policy)
        if reasons:
            wrong += reasons
        else:
            board.apply(action)
            kept.append(action)
    return Plan(tuple(kept), plan.refusals), wrong


def check_plan(snapshot: Snapshot, plan: Plan, policy: Policy | None = None) -> list[str]:
    """What is wrong with a plan of the whole snapshot, or with the world it leads to and was not before."""
    policy = policy or Policy()
    before = ordered(snapshot)
    after, wrong = _replay(before, plan, policy)
    if after is None:
        return wrong
    if policy.name == "exclusive":
        return wrong + turns.broken(before, after, plan, policy)
    return wrong + sharing.broken(before, after, plan, policy) + caps.broken(before, after, plan, policy)


def check_decision(snapshot: Snapshot, plan: Plan, policy: Policy) -> list[str]:
    """Like ``check_plan``, of a decision about only what was touched: what does not ask for every answer."""
    before = ordered(snapshot)
    after, wrong = _replay(before, plan, policy)
    if after is None or policy.name == "exclusive":
        return wrong
    wrong += sharing.restarted(plan) + sharing.idle(after, plan, policy)
    return wrong + caps.broken(before, after, plan, policy)


def _replay(before: Snapshot, plan: Plan, policy: Policy) -> tuple[Snapshot | None, list[str]]:
    """The world after the plan, or None where an action may not be done; and what is wrong on the way."""
    known = set(check(before, policy))
    board = Board.of(before, policy.shares)
    after, wrong = before, []
    for position, action in enumerate(plan.actions):
        reasons = illegal(after, action, policy)
        if isinstance(action, Evict):
            reasons += actions.out_of_turn(after, action, plan.actions[position:])
        wrong += reasons
        if reasons:
            return None, wrong
        board.apply(action)
        after = board.snapshot()
        # An eviction or a move makes room for what follows, so memory is judged after every single action.
        wrong += [problem for problem in _always(after, policy) if problem not in known]
    return after, wrong + [p for p in computing.unsettled(after, policy) if p not in known]


def _always(snapshot: Snapshot, policy: Policy) -> list[str]:
    """Contradictions that not even a plan half done may have."""
    return [*rows.contradictions(snapshot), *computing.contradictions(snapshot, policy)]
