"""JSON messages, each preceded by its length in 4 bytes, big-endian."""

from __future__ import annotations

import json
import os
import struct


def send(fd: int, message: dict) -> None:
    body = json.dumps(message, ensure_ascii=False).encode("utf-8", "replace")
    data = memoryview(struct.pack(">I", len(body)) + body)
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int) -> dict | None:
    head = read_exactly(fd, 4)
    body = read_exactly(fd, struct.unpack(">I", head)[0]) if head else None
    return json.loads(body) if body is not None else None


def read_exactly(fd: int, count: int) -> bytes | None:
    """``count`` bytes, or None when the parent closed the pipe."""
    parts = []
    while count:
        part = os.read(fd, min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
