"""One child process that runs a tenant's code, as its parent sees it.

A child that timed out, died or answered nonsense is killed with its whole process group and is of no further
use; ``alive`` says so. Not thread-safe, ``interrupt`` apart: whoever leases the process owns it.

The child is a user without rights: the parent's own, or, when that is root, one of the child's own. It reads
what every user of the machine may read, writes in its scratch folder and where every user may write, and
starts no process. What could not be had is logged once; a child that stays root may start processes, and one
that leaves the group outlives it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from workers.sandbox.runner import GRADE, VALUE_BYTES

log = logging.getLogger(__name__)

RUNNER = Path(__file__).with_name("runner.py")
SCRATCH_PREFIX = "grader-"
START_TIMEOUT_S = 60.0
CHECK_TIMEOUT_S = 10.0
ADDRESS_SPACE_BYTES = 1 << 30
FILE_SIZE_BYTES = 16 << 20
OUTPUT_BYTES = 16 << 10
#: A reply is a value of at most runner.VALUE_BYTES, or an error, and the names around it.
REPLY_BYTES = VALUE_BYTES + 4096
ERROR_CHARS = 2_000
READ_BYTES = 64 << 10


class FailureKind(StrEnum):
    """Why a call has no value."""

    SOURCE = "source"  # the source does not compile, or its top level failed
    EXCEPTION = "exception"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    CRASHED = "crashed"  # the process ended or broke the protocol
    BAD_SCORE = "bad_score"  # not a finite number
    BAD_VALUE = "bad_value"  # no JSON, or too long
    SANDBOX = "sandbox"  # our fault, not the grader's: no process could be started, or the pool was closed


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


class SandboxProcess:
    """A fresh interpreter in its own session and scratch folder, with limits, waiting for a grader."""

    def __init__(self, scratch_root: Path | None = None):
        self.scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=scratch_root))
        self.calls = 0
        self.loaded = False
        self._greeted = False
        self._killed = False
        self._interrupted = False
        self._kill_lock = threading.Lock()
        self._output = bytearray()
        try:
            self._child = subprocess.Popen(
                command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=self.scratch,
                env={"PYTHONHASHSEED": "0"},  # sets iterate in the same order in every child
                start_new_session=True,
            )
        except BaseException:
            shutil.rmtree(self.scratch, ignore_errors=True)
            raise
        self.pid = self._child.pid
        for stream in (self._child.stdin, self._child.stdout, self._child.stderr):
            os.set_blocking(stream.fileno(), False)

    @property
    def alive(self) -> bool:
        return not self._killed and not self._interrupted and self._exited() is None

    def check(self, source: str, wanted: Sequence[str]) -> str | None:
        """What keeps ``source`` from compiling and defining what is ``wanted``, naming the line; None when
        nothing does. See ``pool.check_source``.
        """
        return self._request({"op": "check", "source": source, "wanted": wanted}, CHECK_TIMEOUT_S).get(
            "error"
        )

    def load(
        self, source: str, timeout_s: float, wanted: Sequence[str] = (), paths: Sequence[str] = ()
    ) -> CallResult | None:
        """Run the source's top level; None, or the failure that every call would meet.

        ``paths`` are further import folders, for sources of our own.
        """
        start = time.monotonic()
        request = {"op": "load", "source": source, "wanted": wanted, "timeout_s": timeout_s, "paths": paths}
        try:
            error = self._request(request, timeout_s).get("error")
        except ReplyMissing as missing:
            return CallResult(None, f"loading the source: {missing}", missing.kind, time.monotonic() - start)
        if error is None:
            self.loaded = True
            return None
        self.kill()
        return CallResult(
            None,
            read_error({"error": error}),
            FailureKind.SOURCE,
            time.monotonic() - start,
            self._take_output(),
        )

    def call(self, function: str, arguments: Sequence[Any], timeout_s: float) -> CallResult:
        """One call of a function of the loaded source; ``grade`` must return a finite number."""
        self.calls += 1
        start = time.monotonic()
        request = {"op": "call", "function": function, "arguments": arguments, "timeout_s": timeout_s}
        try:
            reply = self._request(request, timeout_s)
        except ReplyMissing as missing:
            return CallResult(None, str(missing), missing.kind, time.monotonic() - start, self._take_output())
        result = read_reply(function, reply, time.monotonic() - start, self._take_output())
        if result.kind is FailureKind.MEMORY:  # what filled the memory may still hold it
            self.kill()
        return result

    def greet(self) -> None:
        """Wait until the interpreter has started, which is not the tenant's time. Raises ReplyMissing."""
        if self._greeted:
            return
        try:
            hello = self._exchange(b"", time.monotonic() + START_TIMEOUT_S, "timed out")
        except ReplyMissing as missing:
            message = f"the sandbox's interpreter did not start: {missing}"
            raise ReplyMissing(FailureKind.SANDBOX, message) from None
        if hello.get("missing"):
            _warn(hello["missing"])
        self._greeted = True

    def interrupt(self) -> None:
        """Make the call in progress fail now; from any thread. The owner's ``kill`` must still follow."""
        with self._kill_lock:
            if not self._killed:
                self._interrupted = True
                os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the process and everything in its group, and remove its scratch folder. Twice is once."""
        with self._kill_lock:
            if self._killed:
                return
            self._killed = True
            # Only the wait below reaps the leader, so until then its pid names this group and no other.
            os.killpg(self.pid, signal.SIGKILL)
            self._child.wait(timeout=START_TIMEOUT_S)
        for stream in (self._child.stdin, self._child.stdout, self._child.stderr):
            stream.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _request(self, message: dict, timeout_s: float) -> dict:
        """Raises ReplyMissing, after killing the child."""
        self.greet()
        body = json.dumps(message).encode()
        return self._exchange(
            struct.pack(">I", len(body)) + body,
            time.monotonic() + timeout_s,
            f"timed out after {timeout_s:g} s",
        )

    def _exchange(self, request: bytes, deadline: float, timeout_message: str) -> dict:
        """Send ``request`` and read one reply, draining what the child prints meanwhile."""
        try:
            return self._talk(memoryview(request), deadline, timeout_message)
        except ReplyMissing:
            self._read_output()
            self.kill()
            raise

    def _talk(self, unsent: memoryview, deadline: float, timeout_message: str) -> dict:
        stdin, stdout, stderr = self._child.stdin, self._child.stdout, self._child.stderr
        reply = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            selector.register(stderr, selectors.EVENT_READ)
            if unsent:
                selector.register(stdin, selectors.EVENT_WRITE)
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ReplyMissing(FailureKind.TIMEOUT, timeout_message)
                for key, _ in selector.select(left):
                    if key.fileobj is stdin:
                        unsent = self._write(unsent)
                        if not unsent:
                            selector.unregister(stdin)
                    elif key.fileobj is stderr:
                        if not self._read_output():
                            selector.unregister(stderr)
                    else:
                        part = stdout.read(READ_BYTES)
                        if part == b"":
                            raise ReplyMissing(FailureKind.CRASHED, self._epitaph())
                        reply += part or b""
                if (message := parse_reply(reply)) is not None:
                    return message

    def _write(self, unsent: memoryview) -> memoryview:
        try:
            return unsent[os.write(self._child.stdin.fileno(), unsent) :]
        except BlockingIOError:
            return unsent
        except BrokenPipeError:
            raise ReplyMissing(FailureKind.CRASHED, self._epitaph()) from None

    def _read_output(self) -> bool:
        """Keep the first OUTPUT_BYTES of what was printed, drop the rest; False at the end of the stream."""
        part = self._child.stderr.read(READ_BYTES)
        if part:
            self._output += part[: max(0, OUTPUT_BYTES - len(self._output))]
        return part != b""

    def _take_output(self) -> str:
        if not self._child.stderr.closed:
            self._read_output()
        text = self._output.decode("utf-8", "replace")
        self._output.clear()
        return text

    def _exited(self) -> os.waitid_result | None:
        """How the leader ended, if it did, leaving it unreaped."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def _epitaph(self) -> str:
        """Why the reply pipe closed; the exit follows the closing within moments, or not at all."""
        deadline = time.monotonic() + 1.0
        while (ended := self._exited()) is None and time.monotonic() < deadline:
            time.sleep(0.002)
        if ended is None:
            return "the sandboxed process closed its reply pipe"
        if ended.si_code == os.CLD_EXITED:
            return f"the sandboxed process exited with status {ended.si_status}"
        if ended.si_status == signal.SIGXCPU:
            return "the sandboxed process used up its CPU time"
        return f"the sandboxed process was killed by {signal.Signals(ended.si_status).name}"


def command() -> list[str]:
    """The child's command line; a wrapper that enters namespaces goes in front of it."""
    flags = [
        "-P",
        "-s",
        "-S",
        "-B",
        "-X",
        "utf8",
    ]  # no script folder, no user or site packages, no .pyc files
    # What is installed, and not the project: the child may open a way for itself to these folders.
    folders = os.pathsep.join(path for path in sys.path if path.endswith("-packages"))
    return [sys.executable, *flags, str(RUNNER), str(ADDRESS_SPACE_BYTES), str(FILE_SIZE_BYTES), folders]


@cache
def _warn(missing: str) -> None:
    log.warning("the sandbox is not whole: %s", missing)


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
