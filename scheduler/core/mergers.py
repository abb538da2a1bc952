"""Which tails of a pipeline could be gathered on fewer devices, and when that is worth it.

When all of a pipeline's rollouts that still run are in their tail, its sequences can go on on fewer
devices, in batches below the saturation batch that their KV memory holds. Nothing is dropped: the
sequences' tokens are prefilled again where they go.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scheduler.core.board import Board, Key, merge
from scheduler.core.memory import tokens_at_end
from scheduler.core.rates import speeds
from scheduler.core.seats import free_bytes, made_late, projected, table_of
from scheduler.core.state import ROLLOUT, Kind, Merge, Node, NodeState


@dataclass(frozen=True, slots=True)
class Merger:
    """Targets and what each takes; ``after`` replaces the pipeline's nodes in a forecast."""

    moves: tuple[tuple[Node, tuple[Node, ...]], ...]
    after: tuple[tuple[Key, Node | None], ...]

    def actions(self, reason: str) -> list[Merge]:
        return [
            Merge(target.pipeline, tuple(source.id for source in sources), target.id, reason)
            for target, sources in self.moves
        ]


def mergers(board: Board, pipeline: int) -> Iterator[Merger]:
    """To the fewest devices that hold the tails, then to twice as many, as long as that frees some."""
    tails = _tails(board, pipeline)
    if len(tails) < 2:
        return
    fewest = next((m for m in range(1, len(tails)) if _spread(board, tails, m) is not None), len(tails))
    for count in (fewest, 2 * fewest):
        if count < len(tails):
            spread = _spread(board, tails, count)
            if spread is not None:
                yield _merger(board, pipeline, spread)


def pays(board: Board, merger: Merger) -> bool:
    """The rule without look-ahead: what becomes free is worth more to others than the tails lose.

    A tail leaves most of its device to others, so its device time counts by the least share; what the
    pipeline loses, all its devices lose.
    """
    targets = [target for target, _ in merger.moves]
    sources = [source for _, sources in merger.moves for source in sources]
    others = any(len(board.at_home[source.device or ""]) > 1 for source in sources)
    after = [node for _, node in merger.after if node is not None]
    before_left = [board.left_now(node) for node in (*targets, *sources)]
    least = board.tables[board.devices[targets[0].device or ""].type].shares[0]
    freed = least * sum(board.left_now(source) for source in sources)
    longer = max(node.left for node in after) - max(before_left)
    return others and freed > max(0.0, longer) * (len(targets) + len(sources))


def keeps_caps(board: Board, merger: Merger) -> bool:
    """Whether neither the pipeline nor who computes beside its targets would miss a latency cap by it."""
    tails = [node for target, sources in merger.moves for node in (target, *sources)]
    alone = max(projected(board, node, board.speed.get((node.pipeline, node.id), 1.0)) for node in tails)
    for key, merged in merger.after:
        table = table_of(board, merged.device or "") if merged is not None else None
        if merged is None or merged.segment is None or table is None:
            continue
        here = [
            replace(one, segment=merged.segment) if one.key == key else one
            for one in board.on(merged.device or "")
        ]
        paces = speeds(here, table)
        for other in board.running[merged.device or ""]:
            pace = paces.get(other)
            if pace is None:
                continue
            pipeline, node = board.pipelines[other[0]], board.nodes[other[0]][other[1]]
            if other == key:
                then, now = projected(board, merged, pace), alone
            else:
                then = projected(board, node, min(pace, board.with_gang(other, pace)))
                now = projected(board, node, board.speed.get(other, 1.0))
            if made_late(pipeline, then, now):
                return False
    return True


def _in_company(board: Board, node: Node) -> bool:
    """Whether others decode in the same batch."""
    own = board.slot(node)
    return sum(board.slot(other) == own for other in board.running[node.device or ""].values()) > 1


def _tails(board: Board, pipeline: int) -> list[Node]:
    """Its running tails, the largest batch first; none when one of its rollouts is no tail, waits, decodes
    with others' rows, or is a straggler of which nobody knows when it ends.
    """
    rollouts = [node for node in board.nodes[pipeline].values() if node.kind in ROLLOUT]
    if any(node.kind is not Kind.TAIL or node.state is not NodeState.RUNNING for node in rollouts):
        return []
    if any(node.kind is Kind.TOOL for node in board.nodes[pipeline].values()):
        return []
    if any(table_of(board, node.device or "") is None for node in rollouts):
        return []
    if len({node.step for node in rollouts}) != 1 or any(map(board.overran, rollouts)):
        return []
    if any(_in_company(board, node) for node in rollouts):  # a row of a fused batch costs the same elsewhere
        return []
    return sorted(rollouts, key=lambda node: (_crowd(board, node), -_batch(node), node.worker))


def _crowd(board: Board, node: Node) -> int:
    return len(board.at_home[node.device or ""])


def _batch(node: Node) -> int:
    return node.segment.batch if node.segment is not None else 0


def _spread(board: Board, tails: list[Node], count: int) -> list[list[Node]] | None:
    """The tails on the first ``count`` of their devices, each source where the batch is smallest."""
    groups = [[tail] for tail in tails[:count]]
    for source in tails[count:]:
        min(groups, key=lambda group: sum(map(_batch, group))).append(source)
    return groups if all(_holds(board, group) for group in groups) else None


def _holds(board: Board, group: list[Node]) -> bool:
    pipeline = board.pipelines[group[0].pipeline]
    table = board.tables[board.devices[group[0].device or ""].type]
    if sum(map(_batch, group)) >= table.saturation:
        return False
    grown = sum(map(tokens_at_end, group))
    if not pipeline.kv_tokens or grown <= pipeline.kv_tokens:
        return True
    if not pipeline.kv_bytes:
        return False
    # As much as is left when everybody at home has trained, one at a time.
    device = group[0].device or ""
    peak = max(board.pipelines[id].peak_bytes for id in board.at_home[device])
    return (grown - pipeline.kv_tokens) * pipeline.kv_bytes <= free_bytes(board, device) - peak


def _merger(board: Board, pipeline: int, spread: list[list[Node]]) -> Merger:
    moves = tuple((group[0], tuple(group[1:])) for group in spread if len(group) > 1)
    outlook = board.pipelines[pipeline].outlook
    after: list[tuple[Key, Node | None]] = []
    for target, sources in moves:
        settled = [_now(board, node) for node in (target, *sources)]
        after.append(((pipeline, target.id), merge(settled[0], settled[1:], outlook)))
        after += [((pipeline, source.id), None) for source in sources]
    return Merger(moves, tuple(after))


def _now(board: Board, node: Node) -> Node:
    return replace(node, left=board.left_now(node), since=board.now)
