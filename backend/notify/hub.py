"""The hub: one LISTEN connection per web process wakes every stream whose rows may have changed.

    PostgreSQL ── NOTIFY jigsaw_jobs {"org", "job"} ──► Hub._listen ──► Subscription.wait() ──► the stream

A subscription holds a set of dirty job ids, so any number of doorbells for one job wakes its stream once.
Nothing is lost while the connection is away: after every (re)connect everybody is woken with ``EVERYTHING``
and reads what is there. The connection is open only while somebody is subscribed. LISTEN needs a session
of its own: behind a transaction-pooling proxy, ``DATABASE_URL`` must name the server itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from types import TracebackType
from weakref import WeakKeyDictionary

import psycopg
from django.db import connections

from backend.notify.services import JOBS

log = logging.getLogger(__name__)

#: Above this many dirty jobs a subscriber is told ``EVERYTHING`` instead.
MAX_DIRTY = 500
FIRST_RETRY_S, LAST_RETRY_S = 0.2, 10.0
CONNECT_TIMEOUT_S = 5
#: The server is asked for a sign of life this often, so that a dead connection is noticed.
PING_S = 20.0


class Everything:
    """What changed is unknown: read everything."""


EVERYTHING = Everything()


class Subscription:
    """One stream's ear: for one job, or for all jobs of an organization."""

    def __init__(self, hub: Hub, *, org: int, job: int | None) -> None:
        self._hub, self._org, self._job = hub, org, job
        self._woken = asyncio.Event()
        self._dirty: set[int] = set()
        self._everything = False

    async def __aenter__(self) -> Subscription:
        self._hub._add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hub._remove(self)

    def ring(self, org: int, job: int) -> None:
        if org != self._org or self._job not in {None, job}:
            return
        self._dirty.add(job)
        if len(self._dirty) > MAX_DIRTY:
            self.ring_everything()
        self._woken.set()

    def ring_everything(self) -> None:
        self._dirty.clear()
        self._everything = True
        self._woken.set()

    async def wait(self, timeout_s: float) -> frozenset[int] | Everything:
        """The ids of the jobs that changed since the last call; empty when ``timeout_s`` passed quietly."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()
        self._woken.clear()
        dirty, everything = frozenset(self._dirty), self._everything
        self._dirty.clear()
        self._everything = False
        return EVERYTHING if everything else dirty


class Hub:
    """All subscriptions of one event loop, and the task that listens for them."""

    def __init__(self) -> None:
        self._subscriptions: set[Subscription] = set()
        self._task: asyncio.Task[None] | None = None

    def subscribe(self, *, org: int, job: int | None = None) -> Subscription:
        """``async with hub.subscribe(org=1, job=2) as bell: await bell.wait(15)``"""
        return Subscription(self, org=org, job=job)

    def _add(self, subscription: Subscription) -> None:
        self._subscriptions.add(subscription)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="notify-hub")

    def _remove(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)
        if not self._subscriptions and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            try:
                async with _connect() as connection:
                    retry_s = FIRST_RETRY_S
                    await self._listen(connection)
            except (psycopg.Error, OSError) as error:
                log.warning("live updates: connection lost, trying again in %.1f s: %s", retry_s, error)
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    async def _listen(self, connection: psycopg.AsyncConnection) -> None:
        await connection.execute(f"LISTEN {JOBS}")
        for subscription in tuple(self._subscriptions):
            subscription.ring_everything()
        while True:
            async for notify in connection.notifies(timeout=PING_S):
                self._deliver(notify.payload)
            await connection.execute("SELECT 1")

    def _deliver(self, payload: str) -> None:
        told = json.loads(payload)
        for subscription in tuple(self._subscriptions):
            subscription.ring(told["org"], told["job"])


@contextlib.asynccontextmanager
async def _connect() -> AsyncIterator[psycopg.AsyncConnection]:
    settings = connections["default"].settings_dict
    address = {
        "dbname": settings["NAME"],
        "user": settings["USER"] or None,
        "password": settings["PASSWORD"] or None,
        "host": settings["HOST"] or None,
        "port": settings["PORT"] or None,
        "connect_timeout": CONNECT_TIMEOUT_S,
        **settings["OPTIONS"],
        "application_name": "jigsaw-hub",
    }
    connection = await psycopg.AsyncConnection.connect(**address, autocommit=True)
    try:
        yield connection
    finally:
        await connection.close()


_hubs: WeakKeyDictionary[asyncio.AbstractEventLoop, Hub] = WeakKeyDictionary()


def hub() -> Hub:
    """The running event loop's hub, made on first use."""
    loop = asyncio.get_running_loop()
    if loop not in _hubs:
        _hubs[loop] = Hub()
    return _hubs[loop]
