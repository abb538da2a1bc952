"""A pool of sandbox processes that many callers may use at once.

    call(A, 32 times) ─┐                     ┌► process of owner A, loaded and warm
    call(B, 32 times) ─┴► turns, shared out ─┼► process of owner B
                                             └► blank: interpreter up, nothing loaded yet

``size`` calls run at a time. Owners with calls to make share them evenly, so calls that take until their
limit slow their own owner down and leave the others their part; with more owners than ``size`` they take
turns. ``cancel`` ends an owner's batches in mid-call, and those still to come.

A process serves one (owner, source) for life: between batches it waits warm for its key; it is killed when
others need the room, after ``MAX_CALLS`` calls, and after a failure of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from workers.sandbox.child.source import GRADE
from workers.sandbox.probe import Found, isolation
from workers.sandbox.process import SandboxProcess
from workers.sandbox.replies import CallResult, FailureKind, ReplyMissing
from workers.sandbox.scratch import sweep

log = logging.getLogger(__name__)

MAX_CALLS = 500
#: Warm processes that wait, for each that runs: owners take turns at every call.
IDLE = 4

Key = tuple[str, str]  # owner, source
#: What a source must define, for ``check_source``.
GRADER = ("grade(sample, item)",)
ENVIRONMENT = ("Environment.__init__(item, seed)", "Environment.step(turn)")


class Batch:
    """The calls of one ``call``, and what is known of them so far."""

    def __init__(
        self,
        key: Key,
        owner: str,
        function: str,
        calls: Sequence[Sequence[Any]],
        timeout_s: float,
        load_timeout_s: float,
        paths: tuple[str, ...],
    ):
        self.key, self.owner, self.function, self.paths = key, owner, function, paths
        self.timeout_s, self.load_timeout_s = timeout_s, load_timeout_s
        self.pending = deque(enumerate(calls))
        self.results: list[Future[CallResult]] = [Future() for _ in calls]
        self.running = 0
        self.turn = 0  # when it last had one
        # The source cannot be loaded, or the batch was cancelled: every further call fails alike.
        self.broken: CallResult | None = None


class SandboxPool:
    """Runs functions of untrusted sources; ``close`` leaves no process."""

    def __init__(self, size: int, scratch_root: Path | None = None):
        if size < 1:
            raise ValueError("a sandbox pool needs at least one process")
        self.size = size
        self._scratch_root = scratch_root
        self._lock = threading.Lock()
        self._closed = False
        self._cancelled: set[str] = set()
        self._batch_numbers = itertools.count()
        self._idle: list[tuple[Key, SandboxProcess]] = []  # the longest unused first
        self._leased: dict[SandboxProcess, Batch] = {}
        self._batches: list[Batch] = []
        self._turns = itertools.count(1)
        self.isolation: Found = isolation()
        sweep(scratch_root)
        self._blank = self._start() if self.isolation.kind else None
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="sandbox")

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def grade(
        self,
        source: str,
        calls: Sequence[tuple[dict, dict]],
        timeout_s: float,
        *,
        owner: str | None = None,
        shared: str | None = None,
        load_timeout_s: float | None = None,
        paths: tuple[str, ...] = (),
    ) -> list[CallResult]:
        """``grade(sample, item)`` of the source for each of ``calls``, see ``call``; finite numbers."""
        return self.call(
            source,
            GRADE,
            calls,
            timeout_s,
            owner=owner,
            shared=shared,
            load_timeout_s=load_timeout_s,
            paths=paths,
        )

    def call(
        self,
        source: str,
        function: str,
        calls: Sequence[Sequence[Any]],
        timeout_s: float,
        *,
        owner: str | None = None,
        shared: str | None = None,
        load_timeout_s: float | None = None,
        paths: tuple[str, ...] = (),
    ) -> list[CallResult]:
        """``function`` of the source, called with each of ``calls``, its arguments, all of them JSON.

        One result for each, in order; a value is JSON of at most 64 KB. ``timeout_s`` is the wall clock of a
        single call, from where it begins to run.

        ``owner`` names whose code it is (a run, a tenant): its processes stay warm for the same owner's next
        batch, and what one call leaves in memory or in files the next may see. Without one they end with the
        batch. Sources of our own keep nothing of a tenant's: ``shared`` names processes that all owners use.
        Running the source's top level may take ``load_timeout_s`` (left out: ``timeout_s``). ``paths`` are
        further import folders, for sources of our own, see ``view.packages``.

        Where no isolation works every call fails, see ``probe``.
        """
        if self.isolation.kind is None:
            return [CallResult(None, self.isolation.text, FailureKind.SANDBOX) for _ in calls]
        name = owner or f"batch {next(self._batch_numbers)}"
        key = (shared or name, source)
        batch = Batch(key, name, function, calls, timeout_s, load_timeout_s or timeout_s, paths)
        with self._lock:
            self._batches.append(batch)
            if name in self._cancelled:  # a call that was still on its way here
                cancel(batch)
        try:
            self._fill()
            return [result.result() for result in batch.results]
        finally:
            with self._lock:
                batch.pending.clear()
                self._batches.remove(batch)
            self._fill()
            if owner is None and shared is None:
                self._evict([process for at, process in self._idle_now() if at == key])

    def cancel(self, owner: str) -> None:
        """End the owner's batches, now and for good, and its processes; others notice nothing."""
        with self._lock:
            self._cancelled.add(owner)
            for batch in self._batches:
                if batch.owner == owner:
                    cancel(batch)
            for process, batch in self._leased.items():
                if batch.owner == owner:
                    process.interrupt()
            idle = [process for key, process in self._idle if key[0] == owner]
        self._evict(idle)

    def close(self) -> None:
        """Kill every process, busy ones too; their callers get a failure."""
        with self._lock:
            self._closed = True
            for process in self._leased:
                process.interrupt()
        self._threads.shutdown(wait=True)
        self._evict([process for _, process in self._idle_now()])
        if self._blank is not None:
            self._blank.kill()

    # ------------------------------------------------------------ turns, in the pool's threads

    def _fill(self) -> None:
        """Start as many calls as there is room for."""
        with self._lock:
            while not self._closed and (batch := self._next()) is not None:
                try:
                    self._threads.submit(self._turn, batch, *batch.pending[0])
                except RuntimeError:  # the interpreter is ending, and starts no thread any more
                    self._closed = True
                    break
                batch.pending.popleft()
                batch.running += 1
                batch.turn = next(self._turns)
            if self._closed:
                for batch in self._batches:
                    drain(batch, closed())

    def _next(self) -> Batch | None:
        """Whose turn it is: of the owners below their share, the batch that has waited longest."""
        running = Counter[str]()
        for batch in self._batches:
            running[batch.owner] += batch.running
        wanted = {batch.owner for batch in self._batches if batch.pending or batch.running}
        if running.total() >= self.size or not wanted:
            return None
        share = -(-self.size // len(wanted))
        waiting = [batch for batch in self._batches if batch.pending and running[batch.owner] < share]
        return min(waiting, key=lambda batch: batch.turn, default=None)

    def _turn(self, batch: Batch, index: int, arguments: Sequence[Any]) -> None:
        try:
            result = self._run(batch, arguments)
        except Exception as error:  # e.g. no process could be started: the caller must still get an answer
            result = CallResult(None, f"{type(error).__name__}: {error}", FailureKind.SANDBOX)
        with self._lock:
            batch.running -= 1
        self._fill()
        batch.results[index].set_result(result)

    def _run(self, batch: Batch, arguments: Sequence[Any]) -> CallResult:
        if batch.broken is not None:
            return batch.broken
        process = self._lease(batch)
        if process is None:
            return batch.broken or closed()
        try:
            if not process.loaded:
                wanted = GRADER if batch.function == GRADE else ()
                failure = process.load(batch.key[1], batch.load_timeout_s, wanted)
                if failure is not None:
                    if batch.broken is None and failure.kind is not FailureKind.SANDBOX:
                        batch.broken = failure
                    return batch.broken or failure
            result = process.call(batch.function, arguments, batch.timeout_s)
            return result if result.error is None else batch.broken or result
        finally:
            self._release(batch.key, process)

    # ------------------------------------------------------------ processes

    def _lease(self, batch: Batch) -> SandboxProcess | None:
        """A warm process of the batch's key, else the blank one, else a new one; None once the pool is closed
        or the batch cancelled.
        """
        with self._lock:
            if self._closed or batch.broken is not None:
                return None
            warm = [entry for entry in self._idle if entry[0] == batch.key]
            if warm:
                self._idle.remove(warm[-1])
                process = warm[-1][1]
            elif batch.paths:
                process = self._start(batch.paths)  # what it may read is settled at its start
            else:
                process = self._blank or self._start()
                self._blank = None
            self._leased[process] = batch
            if self._blank is None:
                with contextlib.suppress(OSError):  # the next one who needs it is told
                    self._blank = self._start()
        return process

    def _start(self, paths: tuple[str, ...] = ()) -> SandboxProcess:
        if self.isolation.kind is None:
            raise OSError(self.isolation.text)
        return SandboxProcess(self.isolation.kind, self._scratch_root, paths)

    def _release(self, key: Key, process: SandboxProcess) -> None:
        with self._lock:
            self._leased.pop(process, None)
            if process.alive and process.loaded and process.calls < MAX_CALLS:
                self._idle.append((key, process))
                surplus = [entry[1] for entry in self._idle[: -IDLE * self.size]]
            else:
                surplus = [process]
        self._evict(surplus)

    def _idle_now(self) -> list[tuple[Key, SandboxProcess]]:
        with self._lock:
            return list(self._idle)

    def _evict(self, processes: list[SandboxProcess]) -> None:
        with self._lock:
            self._idle = [entry for entry in self._idle if entry[1] not in processes]
        for process in processes:
            process.kill()


def cancel(batch: Batch) -> None:
    batch.broken = CallResult(None, "the grading was cancelled", FailureKind.SANDBOX)
    drain(batch, batch.broken)


def drain(batch: Batch, result: CallResult) -> None:
    """Answer the calls that have not begun."""
    while batch.pending:
        batch.results[batch.pending.popleft()[0]].set_result(result)


def closed() -> CallResult:
    return CallResult(None, "the sandbox pool was closed", FailureKind.SANDBOX)


def check_source(source: str, wanted: Sequence[str] = GRADER) -> None:
    """Refuse a source that does not compile or does not define what is ``wanted``, without running it.

    ``wanted`` are signatures: ``f(x, y)`` of a function, ``C.f(x)`` of a method without its self.
    Raises ValueError that names the line. The compiler runs in a sandbox process too: hostile sources can
    exhaust it.
    """
    found = isolation()
    if found.kind is None:
        raise ValueError(found.text)
    process = SandboxProcess(found.kind)
    try:
        problem = process.check(source, wanted)
    except ReplyMissing as missing:
        raise ValueError(f"line 1: the source cannot be checked: {missing}") from None
    finally:
        process.kill()
    if problem is not None:
        raise ValueError(problem)
