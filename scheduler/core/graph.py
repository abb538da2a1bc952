"""The sub-stage graph of a pipeline's next steps: what may begin when.

With rollouts ``R`` of workers a and b, the trainers' chain ``T``, and steps counted from 0:

    SYNC                                ASYNC, eta = 1 (ONE_STEP_OFF is the same)

    Ra0 ─┐      ┌─ Ra1 ─┐               Ra0 ─── Ra1 ─── Ra2 ─── Ra3      CHAIN: own rollouts in order
         ├─ T0 ─┤       ├─ T1           Rb0 ─── Rb1 ─── Rb2 ─── Rb3
    Rb0 ─┘      └─ Rb1 ─┘               T0: after Ra0, Rb0               BARRIER: all rollouts of the step
                                        T1: after Ra1, Rb1 and T0
    STREAM: early parts of T0 begin     Ra2, Rb2: after T0               STALENESS: weights of k - 1 - eta
    with the last parts of Ra0, Rb0     Ra3, Rb3: after T1

A step's ``T`` is a chain of parts. A part that needs devices is a *gang*: one node for each train worker. All
of them begin together, once everything that the gang waits for is over, the whole gang before it included. So
an edge names a gang instead of its members: it takes one edge between two gangs and not W * W, and W between
the rollouts and a gang; edges stay linear in the nodes. A *unit* below is a gang, or a node outside of gangs.

Steps before the graph's first are over. A part that does not occur in a step has a node all the same: whoever
runs the step marks it done, as it marks what ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import chain, pairwise

from scheduler.core.state import OFF_DEVICE, Kind, Mode, Outlook, Segment, Shape

#: Kinds that run in micro-batches and can make room between two of them.
YIELDING = frozenset({Kind.LOGPROB, Kind.UPDATE})


class EdgeKind(StrEnum):
    """Why one waits for the other.

    CHAIN: the same worker rolls out one after the other. BARRIER: all of the one before any of the other.
    STALENESS: the rollout's weights must have seen that step. STREAM: enough sequences are over to begin.
    """

    CHAIN = "chain"
    BARRIER = "barrier"
    STALENESS = "staleness"
    STREAM = "stream"


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A sub-stage of one worker; ``part`` is its place in its chain of the outlook.

    ``mergeable``: its sequences may move to another worker. ``yields``: it can make room before it is over.
    """

    id: str
    step: int
    worker: int
    part: int
    gang: str
    segment: Segment
    mergeable: bool
    yields: bool

    @property
    def unit(self) -> str:
        """The name by which edges call it."""
        return self.gang or self.id


@dataclass(frozen=True, slots=True)
class Edge:
    """``after`` begins when ``before`` is over; both are units."""

    before: str
    after: str
    kind: EdgeKind


@dataclass(frozen=True)
class Graph:
    nodes: tuple[GraphNode, ...]
    edges: tuple[Edge, ...]

    @cached_property
    def units(self) -> Mapping[str, tuple[GraphNode, ...]]:
        """The nodes of each unit."""
        members: dict[str, list[GraphNode]] = {}
        for node in self.nodes:
            members.setdefault(node.unit, []).append(node)
        return {unit: tuple(nodes) for unit, nodes in members.items()}

    @cached_property
    def before(self) -> Mapping[str, tuple[str, ...]]:
        """For each unit those that it waits for."""
        return self._beside((edge.after, edge.before) for edge in self.edges)

    @cached_property
    def after(self) -> Mapping[str, tuple[str, ...]]:
        """For each unit those that wait for it."""
        return self._beside((edge.before, edge.after) for edge in self.edges)

    def _beside(self, pairs: Iterator[tuple[str, str]]) -> Mapping[str, tuple[str, ...]]:
        found: dict[str, list[str]] = {unit: [] for unit in self.units}
        for own, other in pairs:
            found[own].append(other)
        return {unit: tuple(others) for unit, others in found.items()}


# ---------------------------------------------------------------- building


@dataclass(frozen=True, slots=True)
class _Step:
    """The nodes of a step: ``rollout`` holds a chain for each worker, ``train`` a unit for each part."""

    rollout: tuple[tuple[GraphNode, ...], ...]
    train: tuple[tuple[GraphNode, ...], ...]


def staleness(shape: Shape) -> int:
    """Steps by which a rollout's weights may lag: rollout k needs the update of step k - 1 - this."""
    return {Mode.SYNC: 0, Mode.ONE_STEP_OFF: 1}.get(shape.mode, shape.max_staleness)


def build(shape: Shape, outlook: Outlook, first_step: int, steps: int) -> Graph:
    """The graph of ``steps`` steps, in O(nodes). Raises ``ValueError`` for parts that no worker could run.

    A pipeline without train parts changes no weights, so its rollouts wait for nothing but their own chain.
    One without rollouts trains step after step.
    """
    _require_workers(shape, outlook)
    laid = [_lay(shape, outlook, step) for step in range(first_step, first_step + steps)]
    nodes = tuple(node for step in laid for unit in (*step.rollout, *step.train) for node in unit)
    edges = [*_orders(laid), *_weights(laid, shape)]
    for step in laid:
        edges.extend(_gathering(step, shape.mode))
    return Graph(nodes, tuple(edges))


def _require_workers(shape: Shape, outlook: Outlook) -> None:
    if shape.max_staleness < 0:
        raise ValueError(f"max_staleness is {shape.max_staleness}, must be at least 0")
    for name, workers, parts in (
        ("rollout", shape.rollout_workers, outlook.rollout),
        ("train", shape.train_workers, outlook.train),
    ):
        if len(set(workers)) < len(workers):
            raise ValueError(f"{name} workers {workers} name one twice")
        if parts and not workers:
            raise ValueError(f"{len(parts)} {name} parts, but no {name} workers")


def _lay(shape: Shape, outlook: Outlook, step: int) -> _Step:
    return _Step(
        rollout=tuple(
            tuple(
                _node(step, worker, f"{part}", part, segment) for part, segment in enumerate(outlook.rollout)
            )
            for worker in shape.rollout_workers
            if outlook.rollout
        ),
        train=tuple(
            _train_unit(step, shape.train_workers, part, segment)
            for part, segment in enumerate(outlook.train)
        ),
    )


def _train_unit(step: int, workers: Sequence[int], part: int, segment: Segment) -> tuple[GraphNode, ...]:
    """A gang; or one node for what runs beside the devices, because workers do not divide that."""
    if segment.kind in OFF_DEVICE:
        return (_node(step, workers[0], f"t{part}", part, segment),)
    gang = f"s{step}.{segment.kind}.t{part}"
    return tuple(_node(step, worker, f"t{part}", part, segment, gang) for worker in workers)


def _node(step: int, worker: int, name: str, part: int, segment: Segment, gang: str = "") -> GraphNode:
    kind = segment.kind
    return GraphNode(
        id=f"s{step}.w{worker}.{kind}.{name}",
        step=step,
        worker=worker,
        part=part,
        gang=gang,
        segment=segment,
        mergeable=kind is Kind.TAIL,
        yields=kind in YIELDING,
    )


def _orders(laid: Sequence[_Step]) -> Iterator[Edge]:
    """Each rollout worker's own order and the trainers' order, through all steps."""
    for chains in zip(*(step.rollout for step in laid), strict=True):
        for before, after in pairwise(chain.from_iterable(chains)):
            yield Edge(before.unit, after.unit, EdgeKind.CHAIN)
    for first, second in pairwise(unit for step in laid for unit in step.train):
        yield Edge(first[0].unit, second[0].unit, EdgeKind.BARRIER)


def _weights(laid: Sequence[_Step], shape: Shape) -> Iterator[Edge]:
    """What rollouts wait for: the last train part of the step whose weights they need at the least."""
    eta = staleness(shape)
    synchronous = shape.mode is Mode.SYNC or (shape.mode is Mode.STREAM and eta == 0)
    kind = EdgeKind.BARRIER if synchronous else EdgeKind.STALENESS
    for needed, step in zip(laid, laid[1 + eta :], strict=False):
        for worker in step.rollout if needed.train else ():
            yield Edge(needed.train[-1][0].unit, worker[0].unit, kind)


def _gathering(step: _Step, mode: Mode) -> Iterator[Edge]:
    """What the trainers wait for: all rollouts of the step, but early parts for a piece of each.

    The last part is never early: a step is not over before its rollouts are.
    """
    if not step.train:
        return
    early = _early(step.train) if mode is Mode.STREAM else 0
    for worker in step.rollout:
        if early:
            yield Edge(_thick(worker).unit, step.train[0][0].unit, EdgeKind.STREAM)
        yield Edge(worker[-1].unit, step.train[early][0].unit, EdgeKind.BARRIER)


def _early(train: Sequence[tuple[GraphNode, ...]]) -> int:
    """How many parts at the beginning are early."""
    return next((i for i, unit in enumerate(train) if not unit[0].segment.early), len(train) - 1)


def _thick(worker: Sequence[GraphNode]) -> GraphNode:
    """The node before the last, which is the thin end of the tail: when it is over, most groups are whole."""
    return worker[max(0, len(worker) - 2)]


# ---------------------------------------------------------------- reading


def offered(graph: Graph, done: Set[str], begun: Set[str]) -> tuple[GraphNode, ...]:
    """The nodes that may begin and have not, in the order of ``graph.nodes``; of a gang all or none.

    ``done`` and ``begun`` are node ids; those of other steps do no harm. What yielded is begun no more.
    """
    over = {unit for unit, nodes in graph.units.items() if all(node.id in done for node in nodes)}
    free = {unit for unit, before in graph.before.items() if over.issuperset(before)}
    return tuple(
        node for node in graph.nodes if node.unit in free and node.id not in done and node.id not in begun
    )


def longest_paths(graph: Graph) -> dict[str, float]:
    """For each node the seconds from its beginning to the end of its step's last train part, undisturbed.

    It is the node's rank: those with the longest way to go are the step's critical path.
    """
    paths: dict[str, float] = {}
    longest: dict[str, float] = {}
    for unit in reversed(_in_order(graph)):
        nodes = graph.units[unit]
        same_step = [other for other in graph.after[unit] if graph.units[other][0].step == nodes[0].step]
        rest = max((longest[other] for other in same_step), default=0.0)
        paths.update((node.id, _seconds(node.segment) + rest) for node in nodes)
        longest[unit] = max(paths[node.id] for node in nodes)
    return paths


def _seconds(segment: Segment) -> float:
    """Tails are what workers differ in, and all wait for the last: count them late."""
    return max(segment.seconds, segment.late_seconds) if segment.kind is Kind.TAIL else segment.seconds


def _in_order(graph: Graph) -> list[str]:
    """All units, each after those that it waits for. Raises ``ValueError`` that names a cycle."""
    missing = {unit: len(before) for unit, before in graph.before.items()}
    order = [unit for unit, count in missing.items() if not count]
    for unit in order:
        for other in graph.after[unit]:
            missing[other] -= 1
            if not missing[other]:
                order.append(other)
    if len(order) < len(missing):
        raise ValueError(f"cycle: {' -> '.join(_cycle(graph, set(missing) - set(order)))}")
    return order


def _cycle(graph: Graph, stuck: Set[str]) -> list[str]:
    """Each stuck unit waits for a stuck one, so that walking back must come to where it was."""
    walked = [min(stuck)]
    while True:
        back = min(unit for unit in graph.before[walked[-1]] if unit in stuck)
        if back in walked:
            return [back, *reversed(walked[walked.index(back) :])]
        walked.append(back)


def validate(graph: Graph) -> None:
    """Raises ``ValueError`` that names the problem; the functions above need a graph without."""
    for name, count in Counter(node.id for node in graph.nodes).items():
        if count > 1:
            raise ValueError(f"{name}: {count} nodes have this id")
    for edge in graph.edges:
        for name in (edge.before, edge.after):
            if name not in graph.units:
                raise ValueError(f"edge {edge.before} -> {edge.after}: unknown id {name}")
    _require_whole_gangs(graph)
    _in_order(graph)


def _require_whole_gangs(graph: Graph) -> None:
    """Every gang has the same workers, each once, at the same place of the same step."""
    everyone = sorted({node.worker for node in graph.nodes if node.gang})
    for gang, nodes in graph.units.items():
        if gang != nodes[0].gang:
            continue
        workers = sorted(node.worker for node in nodes)
        if workers != everyone:
            raise ValueError(f"gang {gang} is not whole: workers {workers} of {everyone}")
        if len({(node.step, node.part, node.segment.kind) for node in nodes}) > 1:
            raise ValueError(f"gang {gang}: its nodes are different parts")
