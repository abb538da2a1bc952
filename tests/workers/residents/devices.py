from __future__ import annotations

from workers.protocol import DeviceRef


def cpu(threads: int = 1) -> DeviceRef:
    return DeviceRef(
        name="local/cpu0",
        kind="cpu",
        index=0,
        ray_node_id="f" * 56,
        threads=threads,
        memory_bytes=1 << 30,
        saturation_batch=4,
    )
