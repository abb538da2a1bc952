"""One child process that runs a tenant's code, as its parent sees it.

A child that timed out, died or answered nonsense is killed with its whole process group and is of no further
use; ``alive`` says so. Not thread-safe, ``interrupt`` apart: whoever leases the process owns it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workers.sandbox.isolation import ENVIRONMENT, Isolation, command, confinement
from workers.sandbox.replies import CallResult, FailureKind, ReplyMissing, parse_reply, read_error, read_reply
from workers.sandbox.scratch import Scratch

START_TIMEOUT_S = 60.0
CHECK_TIMEOUT_S = 10.0
OUTPUT_BYTES = 16 << 10
READ_BYTES = 64 << 10
SIGNALED = 128  # a status above is of one that a signal killed


class SandboxProcess:
    """A fresh interpreter in its own session, confined, waiting for a source.

    ``paths`` are further folders to import from, for sources of our own.
    """

    def __init__(self, isolation: Isolation, scratch_root: Path | None = None, paths: tuple[str, ...] = ()):
        self.calls = 0
        self.loaded = False
        self._isolation = isolation
        self._greeted = False
        self._killed = False
        self._interrupted = False
        self._kill_lock = threading.Lock()
        self._output = bytearray()
        self._scratch = Scratch(scratch_root) if isolation is Isolation.LANDLOCK else None
        theirs, self._lifeline = os.pipe()
        try:
            self._child = subprocess.Popen(
                command(isolation, paths),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=self._scratch.path if self._scratch else "/",
                env=ENVIRONMENT,
                pass_fds=[theirs],
                start_new_session=True,
            )
        except BaseException:
            self._let_go()
            raise
        finally:
            os.close(theirs)
        self.pid = self._child.pid
        for stream in (self._child.stdin, self._child.stdout, self._child.stderr):
            os.set_blocking(stream.fileno(), False)
        # It goes on by itself from here, while no one waits. Whether it ended already is for greet to say.
        self._unsent = memoryview(framed(confinement(isolation, paths, theirs)))
        with contextlib.suppress(OSError):
            self._unsent = self._unsent[os.write(self._child.stdin.fileno(), self._unsent) :]

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

    def load(self, source: str, timeout_s: float, wanted: Sequence[str] = ()) -> CallResult | None:
        """Run the source's top level; None, or the failure that every call would meet."""
        start = time.monotonic()
        request = {"op": "load", "source": source, "wanted": wanted, "timeout_s": timeout_s}
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
            hello = self._exchange(self._unsent, time.monotonic() + START_TIMEOUT_S, "timed out")
        except ReplyMissing as missing:
            said = self._take_output().strip()
            message = f"the sandboxed process did not start: {missing}{': ' if said else ''}{said[-500:]}"
            raise ReplyMissing(FailureKind.SANDBOX, message) from None
        if "refused" in hello:
            self.kill()
            raise ReplyMissing(FailureKind.SANDBOX, f"the sandbox does not hold: {hello['refused']}")
        self._greeted = True

    def interrupt(self) -> None:
        """Make the call in progress fail now; from any thread. The owner's ``kill`` must still follow."""
        with self._kill_lock:
            if not self._killed:
                self._interrupted = True
                os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the process and everything in its group, and its scratch folder. Twice is once."""
        with self._kill_lock:
            if self._killed:
                return
            self._killed = True
            # Only the wait below reaps the leader, so until then its pid names this group and no other.
            os.killpg(self.pid, signal.SIGKILL)
            self._child.wait(timeout=START_TIMEOUT_S)
        for stream in (self._child.stdin, self._child.stdout, self._child.stderr):
            stream.close()
        self._let_go()

    def _let_go(self) -> None:
        os.close(self._lifeline)
        if self._scratch is not None:
            self._scratch.remove()

    def _request(self, message: dict, timeout_s: float) -> dict:
        """Raises ReplyMissing, after killing the child."""
        self.greet()
        request = memoryview(framed(message))
        return self._exchange(request, time.monotonic() + timeout_s, f"timed out after {timeout_s:g} s")

    def _exchange(self, request: memoryview, deadline: float, timeout_message: str) -> dict:
        """Send ``request`` and read one reply, draining what the child prints meanwhile."""
        try:
            return self._talk(request, deadline, timeout_message)
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
        return epitaph(self._isolation, ended)


def framed(message: dict) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack(">I", len(body)) + body


def epitaph(isolation: Isolation, ended: os.waitid_result) -> str:
    status, exited = ended.si_status, ended.si_code == os.CLD_EXITED
    if exited and isolation is Isolation.BUBBLEWRAP and status > SIGNALED:  # its way to say so
        status, exited = status - SIGNALED, False
    if exited:
        return f"the sandboxed process exited with status {status}"
    if status == signal.SIGXCPU:
        return "the sandboxed process used up its CPU time"
    known = status in set(signal.Signals)
    return f"the sandboxed process was killed by {signal.Signals(status).name if known else status}"
