"""Which tasks truly run where, and how fast.

What changes within a moment is marked; ``refresh`` then brings the devices concerned up to date once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from scheduler.core.board import Board, Key
from scheduler.core.interference import Interference
from scheduler.core.rates import Running, Slot, gang_speed, slot_of, speeds
from scheduler.core.state import Policy
from scheduler.sim.attempt import Task
from scheduler.sim.ledger import Broken, Ledger, Occupant


class Floor:
    def __init__(
        self, devices: Iterable[str], policy: Policy, table: Interference, board: Board, ledger: Ledger
    ) -> None:
        self._policy, self._table, self._board, self._ledger = policy, table, board, ledger
        self._on: dict[str, dict[Key, Task]] = {name: {} for name in devices}
        self._outages: Counter[str] = Counter()
        self._dirty: dict[str, None] = {}
        self._changed: dict[Task, None] = {}

    def start(self, task: Task, node: str, device: str | None, share: float, now: float) -> None:
        task.since = now
        task.places[node], task.shares[node] = device, share
        if device is not None:
            self._on[device][task.attempt.pipeline, node] = task
            self._dirty[device] = None
        self._changed[task] = None

    def resize(self, task: Task, node: str, share: float) -> None:
        task.shares[node] = share
        self.change(task)

    def stop(self, task: Task, node: str) -> None:
        """The node runs no more; the rest of its gang may still."""
        device = task.places.pop(node)
        task.shares.pop(node)
        task.worker_speeds.pop(node, None)
        task.version += 1
        if device is not None:
            del self._on[device][task.attempt.pipeline, node]
            self._dirty[device] = None
        self._changed[task] = None

    def leave(self, task: Task) -> None:
        for node in list(task.places):
            self.stop(task, node)

    def change(self, task: Task) -> None:
        """What it truly does, or its share, is another from now on."""
        self._dirty.update((name, None) for name in task.places.values() if name is not None)
        self._changed[task] = None

    def lose(self, device: str) -> None:
        self._outages[device] += 1
        self._dirty[device] = None

    def bring_back(self, device: str) -> bool:
        """Whether it is there again: no other outage goes on."""
        self._outages[device] -= 1
        self._dirty[device] = None
        return not self._outages[device]

    def require_whole_gangs(self) -> None:
        for task in self._changed:
            if len(task.places) not in (0, len(task.nodes)):
                raise Broken(f"{task.unit} of {task.attempt.job.id}: only {sorted(task.places)} run")

    def refresh(self, now: float) -> Iterator[Task]:
        """Settle what changed at its old speed; yields each running one with its new speeds."""
        affected, self._changed = self._changed, {}
        dirty, self._dirty = self._dirty, {}
        for device in dirty:
            here = self._on[device]
            running = [_running(key, task) for key, task in here.items()]
            if running:
                found = speeds(running, self._table)
                for key, task in here.items():
                    task.worker_speeds[key[1]] = found[key]
                    affected[task] = None
            self._write(device, running, now)
        for task in affected:
            if task.runs:
                task.settle(now)
                self._pace(task)
                yield task

    def _pace(self, task: Task) -> None:
        task.speed = task.predicted_speed = 1.0
        task.version += 1
        if task.on_device:
            task.speed = gang_speed(tuple(task.worker_speeds.values()), self._policy.shares)
            task.predicted_speed = self._board.speed.get((task.attempt.pipeline, task.nodes[0].id), 1.0)

    def _write(self, device: str, running: list[Running], now: float) -> None:
        members: Counter[Slot] = Counter(one.slot for one in running)
        if len(members) > self._policy.max_computing:
            raise Broken(f"{device}: {sorted(members)} compute at once")
        occupants = []
        for (key, task), one in zip(self._on[device].items(), running, strict=True):
            job, part = task.attempt.job, one.share / members[one.slot]
            occupants.append(
                Occupant(key, job.id, job.tenant, one.segment.kind, one.share, part, one.segment.batch)
            )
        self._ledger.occupy(device, now, occupants, lost=self._outages[device] > 0)


def _running(key: Key, task: Task) -> Running:
    queued = task.attempt.queued
    slot = slot_of(key[0], queued.weights_key, queued.fusible, task.true.kind)
    return Running(key, slot, task.true, task.shares[key[1]])
