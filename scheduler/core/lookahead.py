"""Which of the things that could be decided now leads to the best future.

Each candidate is a question to a forecast over the devices concerned; the answer is the work done up to the
horizon, about a step of the slowest pipeline there. Waiting and merging must beat the plain start by a
margin, so that noise in the predictions moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.core.board import Board
from scheduler.core.forecast import MAX_PIPELINES, Forecast, Question, neighbours
from scheduler.core.mergers import Merger, pays
from scheduler.core.seats import rest, within_cap
from scheduler.core.state import Kind, Policy
from scheduler.core.tasks import Task

#: A horizon reaches so many steps of the slowest pipeline.
HORIZON_STEPS = 1.25
#: How many times more somebody's speed counts when the split favours it.
FAVOUR = 1.5
#: What waiting must gain at least, as a part of the work done: what it costs is sure, what it brings hangs on
#: predictions.
WAIT_MARGIN = 0.10
#: What a merger must gain that the rule of ``mergers.pays`` speaks against. One that it speaks for is done
#: unless the forecast, which is blind to differences between workers, sees a clear loss.
MERGE_MARGIN, CLEAR_LOSS = 0.05, 0.08
#: The most forecasts that one choice or one merger takes, and that all of one decision take: beyond them it
#: decides as ``greedy`` does, so that a decision that touches many takes bounded time.
PER_CHOICE, PER_MERGER, PER_DECISION = 4, 3, 7
#: Parts of a chain that go on at once: a rollout that runs is not halted for a better partner.
CONTINUING = frozenset({Kind.DECODE, Kind.TAIL})


def choose(board: Board, policy: Policy, task: Task, may_wait: bool) -> Question:
    """How to start the task, or to hold it back, given that it could start beside others."""
    devices = tuple(dict.fromkeys(task.devices))
    beside = sorted({key[0] for name in devices for key in board.running[name]} - {task.pipeline})
    if not beside:
        return Question()
    candidates = [Question()]
    if policy.shares:
        candidates.append(Question(favour=((task.pipeline, FAVOUR),)))
        candidates.append(Question(favour=tuple((id, FAVOUR) for id in beside)))
    horizon = horizon_of(board, devices)
    best, value = _best(board, policy, devices, candidates, horizon)
    if may_wait and _all_seen(board, devices) and _within_cap(board, task):
        waiting = Question(holds_back=task.pipeline)
        if Forecast(board, policy, devices, waiting).run(horizon) > value * (1 + WAIT_MARGIN):
            return waiting
    return best


def worth_merging(board: Board, policy: Policy, pipeline: int, options: Sequence[Merger]) -> Merger | None:
    devices = tuple(dict.fromkeys(board.pipelines[pipeline].home))
    horizon = horizon_of(board, devices)
    value = Forecast(board, policy, devices, Question()).run(horizon)
    best = None
    for option in options:
        found = Forecast(board, policy, devices, Question(merged=option.after)).run(horizon)
        least = 1 - CLEAR_LOSS if pays(board, option) else 1 + MERGE_MARGIN
        if found > value * least:
            best, value = option, max(found, value)
    return best


def horizon_of(board: Board, devices: Sequence[str]) -> float:
    """Seconds to look ahead on the devices."""
    steps = [board.pipelines[id].outlook.seconds for id in neighbours(board, devices)]
    return HORIZON_STEPS * max(steps, default=0.0)


def until(board: Board, task: Task) -> float:
    """When the first sub-stage that computes on the task's devices is expected to end."""
    ends = [
        board.now + board.left_now(node) / board.speed.get(key, 1.0)
        for name in dict.fromkeys(task.devices)
        for key, node in board.running[name].items()
    ]
    return min(ends, default=board.now)


def _best(
    board: Board, policy: Policy, devices: tuple[str, ...], candidates: Sequence[Question], horizon: float
) -> tuple[Question, float]:
    best, value = candidates[0], -1.0
    for question in candidates:
        found = Forecast(board, policy, devices, question).run(horizon)
        if found > value * (1 + 1e-6):
            best, value = question, found
    return best, value


def _all_seen(board: Board, devices: Sequence[str]) -> bool:
    """Whether a forecast looks at everybody there: others would use what a task that waits leaves."""
    return len({id for name in devices for id in board.at_home[name]}) <= MAX_PIPELINES


def _within_cap(board: Board, task: Task) -> bool:
    """Not what already runs, and not beyond the pipeline's own latency cap."""
    first = task.nodes[0]
    if first.kind in CONTINUING:
        return False
    pipeline = board.pipelines[task.pipeline]
    ahead = until(board, task) - pipeline.step_began
    return within_cap(pipeline, ahead + board.left_now(first) + rest(pipeline, first))
