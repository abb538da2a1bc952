"""The hub against a real server: who is woken, how often, and that a lost connection wakes everybody."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections

from backend.notify.hub import EVERYTHING, MAX_DIRTY, Hub, Subscription
from backend.notify.services import JOBS, ring

pytestmark = pytest.mark.django_db(transaction=True)

SOON_S = 10
QUIET_S = 0.3


def run(test: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await test

    asyncio.run(limited())


@sync_to_async
def knock(**payload: int) -> None:
    ring(JOBS, **payload)
    connections.close_all()


@sync_to_async
def hub_backends(kill: bool = False) -> int:
    """Server processes of the hub's connections; killed first if asked."""
    with connection.cursor() as cursor:
        act = "pg_terminate_backend(pid)" if kill else "pid"
        cursor.execute(
            f"SELECT {act} FROM pg_stat_activity WHERE application_name = 'jigsaw-hub' "
            "AND datname = current_database()"
        )
        rows = cursor.fetchall()
    connections.close_all()
    return len(rows)


async def listening(bell: Subscription) -> None:
    """The first ring says that the connection stands."""
    assert await bell.wait(SOON_S) is EVERYTHING


def test_a_job_wakes_who_listens_to_it_and_to_its_organization():
    async def story() -> None:
        hub = Hub()
        async with (
            hub.subscribe(org=1, job=10) as job,
            hub.subscribe(org=1) as organization,
            hub.subscribe(org=1, job=11) as other_job,
            hub.subscribe(org=2) as other_organization,
        ):
            for bell in (job, organization, other_job, other_organization):
                await listening(bell)
            await knock(org=1, job=10)
            assert await job.wait(SOON_S) == {10}
            assert await organization.wait(SOON_S) == {10}
            assert await other_job.wait(QUIET_S) == frozenset()
            assert await other_organization.wait(QUIET_S) == frozenset()

    run(story())


def test_many_rings_are_one_waking():
    async def story() -> None:
        bell = Subscription(Hub(), org=1, job=None)
        for job in (1, 2, 2, 3, 1):
            bell.ring(1, job)
        assert await bell.wait(SOON_S) == {1, 2, 3}
        assert await bell.wait(QUIET_S) == frozenset()

    run(story())


def test_a_subscriber_that_does_not_listen_holds_a_bounded_number_of_ids():
    bell = Subscription(Hub(), org=1, job=None)
    for job in range(MAX_DIRTY + 1):
        bell.ring(1, job)
    assert asyncio.run(bell.wait(SOON_S)) is EVERYTHING


def test_a_lost_connection_comes_back_and_wakes_everybody():
    async def story() -> None:
        async with Hub().subscribe(org=1, job=1) as bell:
            await listening(bell)
            assert await hub_backends(kill=True) == 1
            assert await bell.wait(SOON_S) is EVERYTHING
            await knock(org=1, job=1)
            assert await bell.wait(SOON_S) == {1}

    run(story())


def test_one_connection_for_all_and_none_for_nobody():
    async def story() -> None:
        hub = Hub()
        async with hub.subscribe(org=1) as first, hub.subscribe(org=2) as second:
            await listening(first)
            await listening(second)
            assert await hub_backends() == 1
        for _ in range(100):
            if await hub_backends() == 0:
                return
        raise AssertionError("the hub keeps its connection although nobody listens")

    run(story())
