"""Rows of a snapshot that contradict each other, whatever the policy; and bytes of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

from scheduler.core.memory import overflow_bytes
from scheduler.core.state import OFF_DEVICE, ROLLOUT, Kind, Node, NodeState, Pipeline, Snapshot


def contradictions(snapshot: Snapshot) -> list[str]:
    return [
        *_duplicates("device", (d.name for d in snapshot.devices)),
        *_duplicates("tenant", (t.id for t in snapshot.tenants)),
        *_duplicates("job", (j.id for j in snapshot.queue)),
        *_duplicates("pipeline", (p.id for p in snapshot.pipelines)),
        *_duplicates("node", ((n.pipeline, n.id) for n in snapshot.nodes)),
        *_duplicates("resident", ((r.device, r.weights_key) for r in snapshot.residents)),
        *_duplicates("holder of", (name for p in snapshot.pipelines for name in p.holds)),
        *_tenants(snapshot),
        *_pipelines(snapshot),
        *_nodes(snapshot),
        *_memory(snapshot),
    ]


def _duplicates(what: str, keys: Iterable[Hashable]) -> list[str]:
    return [f"more than one {what} {key}" for key, times in Counter(keys).items() if times > 1]


def _tenants(snapshot: Snapshot) -> list[str]:
    known = {tenant.id for tenant in snapshot.tenants}
    wrong = [f"tenant {t.id}: weight {t.weight}" for t in snapshot.tenants if not t.weight > 0]
    wrong += [f"job {j.id}: unknown tenant {j.tenant}" for j in snapshot.queue if j.tenant not in known]
    wrong += [f"pipeline {p.id}: unknown tenant" for p in snapshot.pipelines if p.tenant not in known]
    return wrong


def _pipelines(snapshot: Snapshot) -> list[str]:
    wrong = []
    for pipeline in snapshot.pipelines:
        if len(pipeline.home) != pipeline.devices or len(set(pipeline.home)) != pipeline.devices:
            wrong.append(f"pipeline {pipeline.id}: homes {pipeline.home} for {pipeline.devices} workers")
        if pipeline.holds not in ((), pipeline.home):
            wrong.append(f"pipeline {pipeline.id}: holds {pipeline.holds}, not all of its homes or nothing")
    return wrong


def _nodes(snapshot: Snapshot) -> list[str]:
    wrong = []
    devices = {pipeline.id: pipeline.devices for pipeline in snapshot.pipelines}
    for node in snapshot.nodes:
        needs_device = node.kind not in OFF_DEVICE and node.state is NodeState.RUNNING
        if not 0 <= node.worker < devices.get(node.pipeline, 0):
            wrong.append(f"node {node.id}: no worker {node.worker} of pipeline {node.pipeline}")
        elif node.device is not None and not needs_device:
            wrong.append(f"node {node.id}: on {node.device}, needs none now")
        elif node.left < 0:
            wrong.append(f"node {node.id} of pipeline {node.pipeline}: {node.left} s left")
    return wrong


def _memory(snapshot: Snapshot) -> list[str]:
    wrong = []
    for device in snapshot.devices:
        used = used_bytes(snapshot, device.name)
        if used > device.memory_bytes:
            wrong.append(f"device {device.name}: {used} of {device.memory_bytes} bytes used")
    return wrong


def used_bytes(snapshot: Snapshot, device: str) -> int:
    """Weights once per key, each pipeline's own bytes, idle residents, and of what training needs the most
    that one pipeline does, or what those need whose training has begun and is not over.
    """
    at_home = [pipeline for pipeline in snapshot.pipelines if device in pipeline.home]
    weights: dict[str, int] = {}
    for pipeline in at_home:
        weights[pipeline.weights_key] = max(pipeline.weights_bytes, weights.get(pipeline.weights_key, 0))
    idle = sum(r.bytes for r in snapshot.residents if r.device == device and r.weights_key not in weights)
    own = {pipeline.id: pipeline for pipeline in at_home}
    begun = [
        node
        for node in snapshot.nodes
        if node.pipeline in own
        and own[node.pipeline].home[node.worker : node.worker + 1] == (device,)
        and _begun(node, own[node.pipeline])
    ]
    training = {node.pipeline for node in begun if node.kind not in ROLLOUT | OFF_DEVICE}
    rolling = {node.pipeline for node in begun if node.kind in ROLLOUT or node.kind is Kind.TOOL}
    most = max((pipeline.peak_bytes for pipeline in at_home), default=0)
    peak = sum(own[id].peak_bytes + own[id].overlap_bytes * (id in rolling) for id in training)
    grown = sum(
        overflow_bytes(node, own[node.pipeline])
        for node in snapshot.nodes
        if node.device == device and node.kind is Kind.TAIL and node.pipeline in own
    )
    run = sum(pipeline.run_bytes for pipeline in at_home)
    return sum(weights.values()) + run + max(most, peak) + grown + idle


def _begun(node: Node, pipeline: Pipeline) -> bool:
    """Whether its chain has begun: what training or rollouts hold stays there from part to part."""
    if node.state is NodeState.RUNNING:
        return True
    if node.kind in ROLLOUT or node.kind is Kind.TOOL:
        return node.part > 0
    train = pipeline.outlook.train
    return node.part > next((i for i, segment in enumerate(train) if segment.kind not in OFF_DEVICE), 0)
