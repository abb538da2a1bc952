"""What a node of the cluster offers to schedule: a device per GPU, or per group of CPU threads."""

from __future__ import annotations

import platform

from backend.pool.services import DeviceSeen
from workers.launch import NodeSeen

#: Running batch at which a decode step stops being bound by launches and weights (measured: a step of
#: SmolLM2-135M takes as long at batch 16 as at batch 1 on one CPU thread; 128 on a GPU).
SATURATION_BATCH = {"cpu": 16, "gpu": 128}
#: The part of a machine's memory that CPU devices share; the rest is for the services beside them.
CPU_MEMORY_PART = 0.7


def devices_of(node: NodeSeen, *, threads_per_device: int, gpu_memory_bytes: int) -> list[DeviceSeen]:
    """GPU devices where there are GPUs, else one CPU device per ``threads_per_device`` threads."""
    if node.gpus:
        return [
            DeviceSeen(index, "gpu", node.gpu_type, 1, gpu_memory_bytes, SATURATION_BATCH["gpu"])
            for index in range(node.gpus)
        ]
    count = max(1, node.cpus // threads_per_device)
    each = int(node.memory_bytes * CPU_MEMORY_PART) // count
    return [
        DeviceSeen(index, "cpu", platform.machine(), threads_per_device, each, SATURATION_BATCH["cpu"])
        for index in range(count)
    ]
