"""Pass ``start``: run every offered sub-stage that may run now.

One that needs a device runs when its pipeline holds its devices and nothing else of the same worker runs on
the worker's; of several offered by one worker the earliest step goes first. A gang runs whole. The rest
runs at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.core.draft import Draft
from scheduler.core.state import OFF_DEVICE, DeviceState, Node, NodeState, Pipeline, Start

#: Share of its device that a sub-stage gets: the policy ``exclusive`` gives all.
WHOLE = 1.0


def start(draft: Draft) -> Draft:
    snapshot = draft.snapshot
    pipelines = {pipeline.id: pipeline for pipeline in snapshot.pipelines}
    alive = {device.name for device in snapshot.devices if device.state is not DeviceState.LOST}
    busy = {
        (node.pipeline, node.worker)
        for node in snapshot.nodes
        if node.state is NodeState.RUNNING and node.kind not in OFF_DEVICE
    }
    actions = []
    for unit in _units(snapshot.nodes):
        pipeline = pipelines.get(unit[0].pipeline)
        if pipeline is None:
            continue
        if unit[0].kind in OFF_DEVICE:
            actions += [Start(n.id, n.pipeline, None, WHOLE, "needs no device") for n in unit]
            continue
        places = [(node, _device_of(node, pipeline)) for node in unit]
        workers = {(node.pipeline, node.worker) for node in unit}
        if all(device in alive for _, device in places) and not workers & busy:
            busy |= workers
            actions += [Start(n.id, n.pipeline, device, WHOLE, "its pipeline's turn") for n, device in places]
    return draft.with_actions(actions)


def _units(nodes: Iterable[Node]) -> list[list[Node]]:
    """What is offered, in the order in which it is served; a gang is one unit."""
    units: dict[tuple[int, str], list[Node]] = {}
    for node in sorted(nodes, key=lambda n: (n.pipeline, n.worker, n.step, n.id)):
        if node.state is NodeState.READY:
            units.setdefault((node.pipeline, node.gang or node.id), []).append(node)
    return list(units.values())


def _device_of(node: Node, pipeline: Pipeline) -> str | None:
    """The worker's device, once its pipeline holds all of them."""
    whole = len(pipeline.holds) == pipeline.devices
    return pipeline.holds[node.worker] if whole and 0 <= node.worker < pipeline.devices else None
