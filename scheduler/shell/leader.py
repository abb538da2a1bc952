"""One leader: a PostgreSQL advisory lock held by the connection that also listens for the doorbell.

A standby waits in the database for the lock. Whoever loses the connection has lost the lock and must stop:
``Leadership.rings`` raises then.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
from django.db import connections

from backend.notify.services import SCHEDULER

LOCK_KEY = 0x4A494753


class Leadership:
    def __init__(self, connection: psycopg.AsyncConnection) -> None:
        self._connection = connection

    async def rings(self) -> AsyncIterator[str]:
        """Why the doorbell rang, for as long as the lock is held."""
        async for notification in self._connection.notifies():
            try:
                yield str(json.loads(notification.payload).get("why", ""))
            except ValueError:
                yield ""


@asynccontextmanager
async def leadership() -> AsyncIterator[Leadership]:
    """Wait until this process leads."""
    settings = connections["default"].settings_dict
    connection = await psycopg.AsyncConnection.connect(
        host=settings["HOST"],
        port=settings["PORT"] or None,
        dbname=settings["NAME"],
        user=settings["USER"],
        password=settings["PASSWORD"] or None,
        autocommit=True,
        keepalives_idle=10,
        **settings["OPTIONS"],
    )
    async with connection:
        await connection.execute("SELECT pg_advisory_lock(%s)", [LOCK_KEY])
        await connection.execute(f"LISTEN {SCHEDULER}")
        yield Leadership(connection)
