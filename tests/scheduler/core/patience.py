"""How long offered tasks wait: the bound on waiting, watched over a run.

*Overdue* is a task that has waited longer than a whole step of its pipeline takes alone. *First in line* is
one that no other offered task comes before on any of its devices. **Bound:** once both, a task starts at the
latest at the next decision that asks it after all is over that computed on its devices at that moment: nobody
who starts there later keeps it out. What waits on purpose (look-ahead), and what lacks a device or memory, is
left out while it does.
"""

from __future__ import annotations

from scheduler.core.board import Board
from scheduler.core.state import DeviceState, NodeState, Plan, RefusalCode, Wait
from scheduler.core.tasks import Task, offered

Key = tuple[int, str]


class Patience:
    """Asked before and after every decision; ``late`` fills with what waited longer than it may."""

    def __init__(self) -> None:
        self.late: list[str] = []
        self._first: dict[Key, Task] = {}
        self._blockers: dict[Key, set[Key]] = {}

    def before(self, board: Board) -> None:
        self._first = firsts(board)
        self._blockers = {
            key: self._blockers.get(key, computing(board, self._first[key])) for key in self._first
        }

    def after(self, board: Board, decided: Plan) -> None:
        waits = {action.pipeline for action in decided.actions if isinstance(action, Wait)}
        for key, task in self._first.items():
            nodes = board.nodes.get(task.pipeline, {})
            waiting = all(n.id in nodes and nodes[n.id].state is NodeState.READY for n in task.nodes)
            here = computing(board, task)
            self._blockers[key] &= here
            lacks_memory = RefusalCode.MEMORY in {
                r.code for r in decided.refusals if r.pipeline == task.pipeline
            }
            if task.pipeline in waits or lacks_memory or not waiting:
                del self._blockers[key]
            elif not self._blockers[key]:
                self.late.append(f"at {board.now}: {key} is first in line, and {sorted(here)} compute there")


def computing(board: Board, task: Task) -> set[Key]:
    return {key for name in task.devices for key in board.running[name]}


def firsts(board: Board) -> dict[Key, Task]:
    """Overdue tasks that are first on all of their devices."""
    again = Board.of(board.snapshot(), board.shares)
    again.touch_all()
    found: dict[Key, Task] = {}
    taken: set[str] = set()
    for task in offered(again):
        lost = any(board.devices[name].state is DeviceState.LOST for name in task.devices)
        overdue = board.now - task.nodes[0].since > board.pipelines[task.pipeline].outlook.seconds
        if overdue and not lost and not taken & set(task.devices):
            found[task.pipeline, task.nodes[0].id] = task
        taken |= set(task.devices)
    return found
