"""What a call comes to, and the reading of replies, whose bytes are a tenant's to choose."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from workers.sandbox.child.source import GRADE, VALUE_BYTES

#: A reply is a value of at most VALUE_BYTES, or an error, and the names around it.
REPLY_BYTES = VALUE_BYTES + 4096
ERROR_CHARS = 2_000


class FailureKind(StrEnum):
    """Why a call has no value."""

    SOURCE = "source"  # the source does not compile, or its top level failed
    EXCEPTION = "exception"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    CRASHED = "crashed"  # the process ended or broke the protocol
    BAD_SCORE = "bad_score"  # not a finite number
    BAD_VALUE = "bad_value"  # no JSON, or too long
    SANDBOX = "sandbox"  # our fault, not the source's: no process could be started, or the pool was closed


@dataclass(frozen=True)
class CallResult:
    """One call: its value, JSON, or an error and its kind; ``seconds`` of wall clock."""

    value: Any
    error: str | None = None
    kind: FailureKind | None = None
    seconds: float = 0.0
    output: str = ""

    @property
    def score(self) -> float | None:
        """The value of a call of ``grade``, a finite number; None when it failed."""
        return self.value if self.error is None else None


class ReplyMissing(Exception):
    """The child gave no usable reply and has been killed."""

    def __init__(self, kind: FailureKind, message: str):
        super().__init__(message)
        self.kind = kind


def parse_reply(data: bytearray) -> dict | None:
    """The reply when all of it has arrived. The bytes are a tenant's to choose: anything odd is a crash."""
    if len(data) < 4:
        return None
    size = struct.unpack(">I", data[:4])[0]
    if size > REPLY_BYTES or len(data) > size + 4:
        raise ReplyMissing(FailureKind.CRASHED, "the sandboxed process sent an oversized reply")
    if len(data) < size + 4:
        return None
    try:
        message = json.loads(data[4:], parse_constant=refuse)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise ReplyMissing(FailureKind.CRASHED, "the sandboxed process sent an unreadable reply")
    return message


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def read_reply(function: str, reply: dict, seconds: float, output: str) -> CallResult:
    if "value" in reply and is_value(function, reply["value"]):
        return CallResult(reply["value"], seconds=seconds, output=output)
    try:
        kind = FailureKind(reply.get("kind"))
    except ValueError:
        kind = FailureKind.CRASHED
    return CallResult(None, read_error(reply), kind, seconds, output)


def is_value(function: str, value: Any) -> bool:
    if function == GRADE:
        return type(value) is float and math.isfinite(value)
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):  # e.g. half a character, which no file takes
        return False
    return True


def read_error(reply: dict) -> str:
    text = str(reply.get("error", "the sandboxed process sent a reply without a value"))
    return text[:ERROR_CHARS].encode("utf-8", "replace").decode()
