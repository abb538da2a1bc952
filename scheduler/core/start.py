"""Pass ``start``: run every offered sub-stage that may run now.

One that needs a device runs when its pipeline holds its devices and nothing else of the same worker runs on
the worker's; of several offered by one worker the earliest step goes first. The rest runs at once.
"""

from __future__ import annotations

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
    for node in sorted(snapshot.nodes, key=lambda n: (n.pipeline, n.worker, n.step, n.id)):
        pipeline = pipelines.get(node.pipeline)
        if node.state is not NodeState.READY or pipeline is None:
            continue
        if node.kind in OFF_DEVICE:
            actions.append(Start(node.id, node.pipeline, None, WHOLE, "needs no device"))
            continue
        device = _device_of(node, pipeline)
        if device in alive and (node.pipeline, node.worker) not in busy:
            busy.add((node.pipeline, node.worker))
            actions.append(Start(node.id, node.pipeline, device, WHOLE, "its pipeline's turn"))
    return draft.with_actions(actions)


def _device_of(node: Node, pipeline: Pipeline) -> str | None:
    """The worker's device, once its pipeline holds all of them."""
    whole = len(pipeline.holds) == pipeline.devices
    return pipeline.holds[node.worker] if whole and 0 <= node.worker < pipeline.devices else None
