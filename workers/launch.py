"""Creating and finding the actors of a run on a Ray cluster.

All are detached and named, so that a daemon that starts anew finds what runs:

    pipeline-<attempt>              one per attempt, no device, no CPU reserved
    rollout|<device>|<weights>      rollout engine over these weights on this device
    trainer|<device>|<weights>      trainer over the same
    graders|<node>                  sandboxed grader processes of a node

Nothing here decides anything. Ray's own resources are not used to place: the scheduler has decided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from workers.protocol import DeviceRef, Launch, pipeline_name

NAMESPACE = "jigsaw"
ROLES = ("rollout", "trainer")
#: Calls that a resident serves at the same time, each on a thread: every run of an engine waits for its news.
RESIDENT_CALLS = 256


@dataclass(frozen=True)
class NodeSeen:
    """A live machine of the cluster. ``memory_bytes`` is what Ray leaves to processes."""

    name: str
    ray_node_id: str
    address: str
    cpus: int
    gpus: int
    gpu_type: str
    memory_bytes: int


def connect(address: str) -> None:
    """Join the cluster at ``address``; raises ``ConnectionError`` when it does not answer."""
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="warning")


def disconnect() -> None:
    ray.shutdown()


def nodes() -> list[NodeSeen]:
    return sorted(
        (_node(row) for row in ray.nodes() if row["Alive"]), key=lambda node: (node.name, node.ray_node_id)
    )


def _node(row: dict[str, Any]) -> NodeSeen:
    resources = row["Resources"]
    types = [
        name.removeprefix("accelerator_type:") for name in resources if name.startswith("accelerator_type:")
    ]
    return NodeSeen(
        name=row["NodeName"],
        ray_node_id=row["NodeID"],
        address=row["NodeManagerAddress"],
        cpus=int(resources.get("CPU", 0)),
        gpus=int(resources.get("GPU", 0)),
        gpu_type=types[0] if types else "gpu",
        memory_bytes=int(resources.get("memory", 0)),
    )


def _on(ray_node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(ray_node_id, soft=False)


def pipeline_start(launch: Launch) -> Any:
    """The attempt's actor, started if it does not run yet."""
    from workers.pipeline import Pipeline

    handle = (
        ray.remote(Pipeline)
        .options(
            name=pipeline_name(launch.attempt_id),
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=0,
        )
        .remote(launch)
    )
    handle.start.remote()
    return handle


def pipeline_find(attempt_id: int) -> Any | None:
    return _find(pipeline_name(attempt_id))


def pipeline_kill(attempt_id: int) -> None:
    _kill(pipeline_name(attempt_id))


def _find(name: str) -> Any | None:
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def _kill(name: str) -> None:
    handle = _find(name)
    if handle is not None:
        ray.kill(handle)


def rollout_resident(device: DeviceRef, weights_key: str, model_path: str, precision: str) -> Any:
    return _resident(_rollout_actor, "rollout", device, weights_key, model_path, precision)


def trainer_resident(device: DeviceRef, weights_key: str, model_path: str, precision: str) -> Any:
    return _resident(_trainer_actor, "trainer", device, weights_key, model_path, precision)


def _rollout_actor() -> type:
    from workers.residents.rollout import RolloutResident

    return RolloutResident


def _trainer_actor() -> type:
    from workers.residents.trainer import TrainerResident

    return TrainerResident


def _resident(
    actor: Callable[[], type],
    role: str,
    device: DeviceRef,
    weights_key: str,
    model_path: str,
    precision: str,
) -> Any:
    """The resident of that role; concurrent creators get the same one. Calls may overlap (threads).

    Who finds one does not load its class, and torch with it: that is for who must start one.
    """
    name = resident_name(role, device.name, weights_key)
    return _find(name) or (
        ray.remote(actor())
        .options(
            name=name,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            num_gpus=0,
            max_restarts=0,
            max_concurrency=RESIDENT_CALLS,
            scheduling_strategy=_on(device.ray_node_id),
        )
        .remote(device, model_path, precision)
    )


def resident_name(role: str, device: str, weights_key: str) -> str:
    return f"{role}|{device}|{weights_key}"


def residents() -> set[tuple[str, str]]:
    """(device, weights key) of every resident of the cluster."""
    parts = (name.split("|") for name in list_named_actors())
    return {(part[1], part[2]) for part in parts if part[0] in ROLES and len(part) == 3}


def residents_evict(device: str, weights_key: str) -> None:
    for role in ROLES:
        _kill(resident_name(role, device, weights_key))


def run_release(device: str, weights_key: str, run_key: str) -> None:
    """Tell the residents to forget a run whose pipeline is gone; what they compute for it stops."""
    for role in ROLES:
        handle = _find(resident_name(role, device, weights_key))
        if handle is not None:
            handle.close.remote(run_key)


def grader_pool(ray_node_id: str) -> Any:
    """The node's grader processes."""
    from workers.graders.pool import GraderPool

    return (
        ray.remote(GraderPool)
        .options(
            name=f"graders|{ray_node_id}",
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=64,
            scheduling_strategy=_on(ray_node_id),
        )
        .remote()
    )


__all__ = [
    "ActorUnavailableError",
    "NodeSeen",
    "RayActorError",
    "RayError",
    "connect",
    "disconnect",
    "grader_pool",
    "nodes",
    "pipeline_find",
    "pipeline_kill",
    "pipeline_start",
    "residents",
    "residents_evict",
    "rollout_resident",
    "run_release",
    "trainer_resident",
]
