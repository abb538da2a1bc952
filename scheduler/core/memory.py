"""Bytes on devices, and the choice of a device by them.

A pipeline occupies every device that is home to one of its workers, whether it has its turn or not: its
weights, once for all pipelines with the same ``weights_key`` there, and its own ``run_bytes``. Of what only
training needs there is room for the largest, since they can train one after the other. Residents that
no pipeline at home there uses are idle: they fill memory but give way, least recently used first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from scheduler.core.state import (
    OFF_DEVICE,
    ROLLOUT,
    Kind,
    Node,
    NodeState,
    Pipeline,
    QueuedJob,
    Resident,
    Snapshot,
)

Load = QueuedJob | Pipeline


def alone_bytes(load: Load) -> int:
    """What the load needs of a device that it has to itself."""
    return load.weights_bytes + load.run_bytes + load.peak_bytes


def tokens_at_end(node: Node) -> int:
    """Tokens in its cache when the sub-stage ends, if all of its sequences last so long."""
    segment = node.segment
    if segment is None or segment.forward_seconds <= 0:
        return node.tokens
    return node.tokens + int(segment.batch * node.left / segment.forward_seconds)


def overflow_bytes(node: Node, pipeline: Pipeline) -> int:
    """What a merged tail needs beyond the pipeline's own cache."""
    return max(0, tokens_at_end(node) - pipeline.kv_tokens) * pipeline.kv_bytes


def has_begun(node: Node, pipeline: Pipeline) -> bool:
    """Whether the node's chain, its worker's rollouts or the training, has begun: what it needs of memory it
    holds from part to part.
    """
    if node.state is NodeState.RUNNING:
        return True
    if node.kind in ROLLOUT or node.kind is Kind.TOOL:
        return node.part > 0
    train = pipeline.outlook.train
    return node.part > next((i for i, segment in enumerate(train) if segment.kind not in OFF_DEVICE), 0)


class Memory:
    """What is left on each device. ``limit`` bounds the pipelines at home on one device."""

    def __init__(self, snapshot: Snapshot, limit: int) -> None:
        self.limit = limit
        self.capacity = {device.name: device.memory_bytes for device in snapshot.devices}
        self.left = dict(self.capacity)
        self.pipelines = dict.fromkeys(self.left, 0)
        self._claims: dict[str, dict[str, list[int]]] = {name: {} for name in self.left}
        self._peaks: dict[str, list[int]] = {name: [] for name in self.left}
        self._residents: dict[str, dict[str, Resident]] = {name: {} for name in self.left}
        for resident in snapshot.residents:
            if resident.device in self.left:
                self._residents[resident.device][resident.weights_key] = resident
        for pipeline in snapshot.pipelines:
            for name in dict.fromkeys(pipeline.home):
                if name in self.left:
                    self.add(name, pipeline)
        pipelines = {pipeline.id: pipeline for pipeline in snapshot.pipelines}
        for name, used in _trained_at_once(snapshot, pipelines).items():
            if name in self.left:
                self.left[name] -= max(0, used - max(self._peaks[name]))
        for node in snapshot.nodes:
            if node.kind is Kind.TAIL and node.device in self.left and node.pipeline in pipelines:
                self.left[node.device] -= overflow_bytes(node, pipelines[node.pipeline])

    def needs(self, device: str, load: Load) -> int:
        """Bytes the load would add to the device."""
        loaded = max(self._claims[device].get(load.weights_key, (0,)))
        peak = max(self._peaks[device], default=0)
        return max(0, load.weights_bytes - loaded) + load.run_bytes + max(0, load.peak_bytes - peak)

    def shortage(self, device: str, load: Load) -> tuple[int, int]:
        """Pipelines and bytes that must go before the load fits; (0, 0) when it does."""
        over = self.pipelines[device] + 1 - self.limit
        return max(0, over), max(0, self.needs(device, load) - self.left[device])

    def fits(self, device: str, load: Load) -> bool:
        return self.shortage(device, load) == (0, 0)

    def add(self, device: str, load: Load) -> None:
        self.left[device] -= self.needs(device, load)
        self.pipelines[device] += 1
        self._claims[device].setdefault(load.weights_key, []).append(load.weights_bytes)
        self._peaks[device].append(load.peak_bytes)

    def remove(self, device: str, load: Load) -> None:
        claims = self._claims[device][load.weights_key]
        claims.remove(load.weights_bytes)
        self._peaks[device].remove(load.peak_bytes)
        if not claims:
            del self._claims[device][load.weights_key]
        self.left[device] += self.needs(device, load)
        self.pipelines[device] -= 1

    def weights(self, device: str) -> Iterable[str]:
        """Keys of the weights that are, or are about to be, loaded on the device."""
        return dict.fromkeys((*self._claims[device], *self._residents[device]))

    def evict(self, device: str) -> list[Resident]:
        """Take idle residents away, least recently used first, until the rest fits; what was taken."""
        idle = [r for key, r in self._residents[device].items() if key not in self._claims[device]]
        idle.sort(key=lambda resident: (resident.last_used, resident.weights_key))
        surplus = sum(resident.bytes for resident in idle) - self.left[device]
        evicted = []
        for resident in idle:
            if surplus <= 0:
                break
            surplus -= resident.bytes
            evicted.append(self._residents[device].pop(resident.weights_key))
        return evicted


def _trained_at_once(snapshot: Snapshot, pipelines: Mapping[int, Pipeline]) -> dict[str, int]:
    """On each device: what those need, and only then, whose training has begun there and is not over."""
    begun: dict[str, dict[int, set[bool]]] = {}
    for node in snapshot.nodes:
        pipeline = pipelines.get(node.pipeline)
        if pipeline is not None and 0 <= node.worker < len(pipeline.home) and has_begun(node, pipeline):
            here = begun.setdefault(pipeline.home[node.worker], {}).setdefault(pipeline.id, set())
            if node.kind in ROLLOUT or node.kind is Kind.TOOL:
                here.add(True)
            elif node.kind not in OFF_DEVICE:
                here.add(False)
    return {
        name: sum(
            pipelines[id].peak_bytes + pipelines[id].overlap_bytes * (True in chains)
            for id, chains in here.items()
            if False in chains
        )
        for name, here in begun.items()
    }


class Shelves:
    """Devices to choose from, shelved by pipelines and bytes left: a choice is a bisection, not a scan.

    After ``Memory`` changes for a device, ``put`` it again.
    """

    def __init__(self, memory: Memory, names: Iterable[str]) -> None:
        self._memory = memory
        self._shelves: dict[int, dict[str | None, list[tuple[int, str]]]] = defaultdict(dict)
        self._place: dict[str, tuple[int, int, tuple[str | None, ...]]] = {}
        for name in names:
            self.put(name)

    def put(self, name: str) -> None:
        self.take(name)
        pipelines, left = self._memory.pipelines[name], self._memory.left[name]
        keys = (None, *self._memory.weights(name))
        self._place[name] = pipelines, left, keys
        for key in keys:
            insort(self._shelves[pipelines].setdefault(key, []), (left, name))

    def take(self, name: str) -> None:
        """Remove the device from the choice; nothing happens when it is not there."""
        if name not in self._place:
            return
        pipelines, left, keys = self._place.pop(name)
        for key in keys:
            shelf = self._shelves[pipelines][key]
            del shelf[bisect_left(shelf, (left, name))]

    def candidates(self, load: Load) -> Iterator[str]:
        """Devices where the load fits, best first. Do not change memory or shelves while it is read.

        Fewest pipelines at home, so that turns come often; then those that know the weights, so that nothing
        is loaded; then the tightest fit, so that large holes stay for large jobs; then the name.
        """
        known = (load.weights_key, load.run_bytes)
        unknown = (None, load.weights_bytes + load.run_bytes)
        given = set()
        for pipelines in sorted(self._shelves):
            if pipelines >= self._memory.limit:
                return
            for key, least in (known, unknown):
                shelf = self._shelves[pipelines].get(key, [])
                for _, name in shelf[bisect_left(shelf, (least, "")) :]:
                    if name not in given and self._memory.fits(name, load):
                        given.add(name)
                        yield name
