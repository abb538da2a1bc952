"""What is likely to happen: the fluid simulation behind look-ahead.

A forecast looks at some devices and the pipelines that live there, up to a horizon. It is coarser than the
graph: devices on which the same pipelines live and roll out form one *place* (their workers are taken to
move together, at the pace of the slowest), and a pipeline is what it rolls out in each place and what it
trains. In it everybody starts what may start as soon as that gains, with what the decision in question
changes: whose speed counts more, who holds back, which tails are merged.

The value of a future is the work done in it, in solo seconds: a pipeline that runs undisturbed does one a
second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from scheduler.core import graph
from scheduler.core.board import Board, Key
from scheduler.core.mix import Mixes
from scheduler.core.rates import slot_of, worth_starting
from scheduler.core.state import (
    OFF_DEVICE,
    ROLLOUT,
    Kind,
    Mode,
    Node,
    NodeState,
    Pipeline,
    Policy,
    QueuedJob,
    Segment,
)

#: Bounds on the work of one forecast: pipelines looked at, and ends of sub-stages.
MAX_PIPELINES = 6
MAX_EVENTS = 20


@dataclass(frozen=True, slots=True)
class Question:
    """What would be decided now.

    ``favour`` weighs pipelines when shares are divided, ``holds_back`` starts nothing until something ends
    where it would compute, ``merged`` replaces nodes (None: the node's sequences went to another).
    """

    favour: tuple[tuple[int, float], ...] = ()
    holds_back: int | None = None
    merged: tuple[tuple[Key, Node | None], ...] = ()


class Track:
    """Where a pipeline is: steps ``rolled`` and ``trained``, and what of it is open."""

    def __init__(self, pipeline: Pipeline) -> None:
        shape = pipeline.shape
        self.id, self.outlook = pipeline.id, pipeline.outlook
        self.weights_key, self.fusible = pipeline.weights_key, pipeline.fusible
        self.stream = shape is not None and shape.mode is Mode.STREAM
        self.staleness = staleness(pipeline)
        self.trained = self.rolled = pipeline.stepped
        #: Devices of the pipeline in each place.
        self.rolls_in: dict[int, int] = {}
        self.trains_in: dict[int, int] = {}
        self.open_rollouts = 0
        #: Of them, those that have not reached their last part.
        self.thick = 0
        self.training = False
        self.train_part = 0

    @property
    def last_part(self) -> int:
        return len(self.outlook.rollout) - 1


_NUMBERS = count()


class Act:
    """A sub-stage of a pipeline in some places."""

    __slots__ = (
        "held",
        "left",
        "number",
        "off",
        "owner",
        "part",
        "places",
        "rollout",
        "running",
        "segment",
        "slot",
        "track",
    )

    def __init__(
        self, track: Track, places: tuple[int, ...], segment: Segment, part: int, rollout: bool, left: float
    ) -> None:
        self.number, self.owner = next(_NUMBERS), track.id
        self.track, self.places, self.segment = track, places, segment
        self.part, self.rollout, self.left = part, rollout, left
        self.running = self.off = segment.kind in OFF_DEVICE
        self.held = False
        self.slot = slot_of(track.id, track.weights_key, track.fusible, segment.kind)


class Forecast:
    def __init__(self, board: Board, policy: Policy, devices: Sequence[str], question: Question) -> None:
        self._policy = policy
        table = board.tables[board.devices[devices[0]].type]
        self._mixes = Mixes(table, policy.shares, dict(question.favour), board.memo)
        ids = neighbours(board, devices)
        nodes = {id: _open_nodes(board, id, dict(question.merged)) for id in ids}
        place_of = _places(board, devices, nodes)
        self._acts: list[Act] = []
        for id in ids:
            track = Track(board.pipelines[id])
            own = self._lay_out(track, board, nodes[id], place_of)
            own += self._begin(track)
            for act in own:
                act.held = id == question.holds_back and not act.running
            self._acts += own

    def _lay_out(
        self, track: Track, board: Board, nodes: list[Node], place_of: Mapping[str, int]
    ) -> list[Act]:
        pipeline = board.pipelines[track.id]
        for worker, name in enumerate(pipeline.home):
            place = place_of.get(name)
            if place is not None and rolls(pipeline, worker):
                track.rolls_in[place] = track.rolls_in.get(place, 0) + 1
            if place is not None and trains(pipeline, worker):
                track.trains_in[place] = track.trains_in.get(place, 0) + 1
        rollouts: dict[int, Act] = {}
        training: Act | None = None
        for node in nodes:
            if node.segment is None:
                continue
            left, running = board.left_now(node), node.state is NodeState.RUNNING
            if node.kind in ROLLOUT or node.kind is Kind.TOOL:
                place = place_of.get(pipeline.home[node.worker])
                if place is None:
                    continue
                track.rolled = max(track.rolled, node.step)
                known = rollouts.get(place)
                if known is None or left > known.left:
                    act = Act(track, (place,), node.segment, node.part, True, left)
                    act.running = act.running or (running and (known is None or known.running))
                    rollouts[place] = act
            elif training is None:
                training = Act(track, tuple(track.trains_in), node.segment, node.part, False, left)
                training.running = training.running or running
                track.training, track.train_part = True, node.part + 1
                if not node.segment.early:
                    track.rolled = max(track.rolled, node.step + 1)
        track.open_rollouts = len(rollouts)
        track.thick = sum(act.part < track.last_part for act in rollouts.values())
        return [*rollouts.values(), *([training] if training else [])]

    # ------------------------------------------------------------ run

    def run(self, horizon: float) -> float:
        """Solo seconds of work done until the horizon, by all.

        Where the ends of sub-stages that are looked at do not reach it, the rest goes on at the mean speed so
        far.
        """
        now = work = 0.0
        acts = self._acts
        for _ in range(MAX_EVENTS):
            pace = self._dispatch(acts)
            if not pace:
                return work
            step = min(horizon - now, min(act.left / speed for act, speed in pace))
            now += step
            ended = []
            for act, speed in pace:
                work += step * speed * self._weight(act)
                act.left -= step * speed
                if act.left <= 1e-9:
                    ended.append(act)
            if now >= horizon:
                return work
            for act in ended:
                acts.remove(act)
                for other in acts:
                    if other.held and set(other.places) & set(act.places):
                        other.held = False
                acts += self._follow(act)
        return work * horizon / now if now > 0 else work

    def _weight(self, act: Act) -> float:
        """Of a place's rollouts: their part of the pipeline."""
        if not act.rollout:
            return 1.0
        return act.track.rolls_in[act.places[0]] / sum(act.track.rolls_in.values())

    def _follow(self, ended: Act) -> list[Act]:
        """What comes after a sub-stage."""
        track = ended.track
        if ended.rollout:
            part = _next_part(track.outlook.rollout, ended.part + 1)
            if ended.part < track.last_part and (part is None or part == track.last_part):
                track.thick -= 1
            if part is not None:
                segment = track.outlook.rollout[part]
                following = [Act(track, ended.places, segment, part, True, segment.seconds)]
                return following + self._begin(track)
            track.open_rollouts -= 1
            if track.open_rollouts == 0:
                track.rolled += 1
        else:
            track.training = False
            if _next_part(track.outlook.train, track.train_part) is None:
                track.trained += 1
                track.train_part = 0
        return self._begin(track)

    def _begin(self, track: Track) -> list[Act]:
        """What may begin: the next rollouts while they are not too stale, the next part of training."""
        found = []
        first = _next_part(track.outlook.rollout, 0)
        if track.open_rollouts == 0 and first is not None and track.rolled - track.staleness <= track.trained:
            segment = track.outlook.rollout[first]
            found = [Act(track, (place,), segment, first, True, segment.seconds) for place in track.rolls_in]
            track.open_rollouts = len(found)
            track.thick = len(found) if first < track.last_part else 0
        part = _next_part(track.outlook.train, track.train_part)
        if not track.training and part is not None:
            segment = track.outlook.train[part]
            streams = track.stream and segment.early and track.open_rollouts > 0 and track.thick == 0
            # Who rolls out nothing trains step after step.
            gathered = first is None or track.rolled > track.trained
            if gathered or (streams and track.rolled == track.trained):
                found.append(Act(track, tuple(track.trains_in), segment, part, False, segment.seconds))
                track.training, track.train_part = True, part + 1
        return found

    # ------------------------------------------------------------ who computes, and how fast

    def _dispatch(self, acts: list[Act]) -> list[tuple[Act, float]]:
        """Start what may start; then the speed of everything that runs."""
        present: dict[int, list[Act]] = {}
        for act in acts:
            if act.running and not act.off:
                for place in act.places:
                    present.setdefault(place, []).append(act)
        for act in acts:
            if act.running or act.held:
                continue
            if all(self._may_join(act, present.get(place)) for place in act.places):
                act.running = True
                for place in act.places:
                    present.setdefault(place, []).append(act)
        speeds = {place: self._mixes.of(here).speeds for place, here in present.items()}
        return [(act, self._pace(act, speeds)) for act in acts if act.running]

    def _pace(self, act: Act, speeds: Mapping[int, Mapping[int, float]]) -> float:
        if act.off or not act.places:
            return 1.0
        if act.rollout:
            return speeds[act.places[0]][act.number]
        own = [speeds[place][act.number] for place in act.places]
        if not self._policy.shares:
            return min(own)
        counts = [act.track.trains_in[place] for place in act.places]
        return sum(speed * devices for speed, devices in zip(own, counts, strict=True)) / sum(counts)

    def _may_join(self, act: Act, here: list[Act] | None) -> bool:
        if not here:
            return True
        policy = self._policy
        if any(other.slot == act.slot for other in here):
            if not (policy.fuse and act.track.fusible and act.rollout):
                return False
        elif len({other.slot for other in here}) >= policy.max_computing or not (
            policy.corun.issuperset({act.segment.kind, *(other.segment.kind for other in here)})
        ):
            return False
        others_left = min(other.left for other in here)
        totals = self._mixes.of(here).total, self._mixes.of([*here, act]).total
        return worth_starting(*totals, act.left, others_left)


def neighbours(board: Board, devices: Sequence[str]) -> list[int]:
    """Pipelines at home on the devices: those with most of them first, as many as a forecast looks at."""
    times: dict[int, int] = {}
    for name in devices:
        for id in board.at_home[name]:
            times[id] = times.get(id, 0) + 1
    chosen = sorted(times, key=lambda id: (-times[id], id))[:MAX_PIPELINES]
    return sorted(id for id in chosen if board.pipelines[id].outlook.seconds > 0)


def staleness(pipeline: Pipeline | QueuedJob) -> int:
    """Steps that rollouts may be ahead of the update they wait for."""
    return 0 if pipeline.shape is None else graph.staleness(pipeline.shape)


def rolls(pipeline: Pipeline | QueuedJob, worker: int) -> bool:
    return pipeline.shape is None or worker in pipeline.shape.rollout_workers


def trains(pipeline: Pipeline | QueuedJob, worker: int) -> bool:
    return pipeline.shape is None or worker in pipeline.shape.train_workers


def _open_nodes(board: Board, pipeline: int, merged: dict[Key, Node | None]) -> list[Node]:
    found = []
    for id, node in board.nodes[pipeline].items():
        replacement = merged.get((pipeline, id), node)
        if replacement is not None:
            found.append(replacement)
    return found


def _places(board: Board, devices: Sequence[str], nodes: Mapping[int, list[Node]]) -> dict[str, int]:
    """Number the devices so that those with the same residents and the same rollouts have the same number."""
    rolling: dict[str, list[int]] = {}
    for id, own in nodes.items():
        home = board.pipelines[id].home
        for node in own:
            if node.kind in ROLLOUT or node.kind is Kind.TOOL:
                rolling.setdefault(home[node.worker], []).append(id)
    numbers: dict[tuple[object, ...], int] = {}
    return {
        name: numbers.setdefault(
            (tuple(id for id in board.at_home[name] if id in nodes), tuple(rolling.get(name, ()))),
            len(numbers),
        )
        for name in devices
    }


def _next_part(chain: Sequence[Segment], part: int) -> int | None:
    for index in range(part, len(chain)):
        if chain[index].seconds > 0:
            return index
    return None
