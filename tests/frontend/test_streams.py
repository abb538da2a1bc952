"""Streams: replay, news, the end, who may listen, and that a waiting stream holds no database connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections
from django.test import AsyncClient, Client
from django.urls import reverse

from backend.jobs.events import event_add
from backend.jobs.models import Event, Job
from backend.jobs.states import JobStatus, Reason
from backend.jobs.transitions import job_status_change
from backend.notify.services import JOBS, ring
from backend.tenants.models import Membership
from frontend.web import streams
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@dataclass(frozen=True)
class Frame:
    event: str
    data: Any
    id: int | None


def run(test: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await test

    asyncio.run(limited())


def listener(client: Client) -> AsyncClient:
    """The same session in an asynchronous client."""
    other = AsyncClient()
    other.cookies = client.cookies
    return other


async def listen(client: Client, address: str, **headers: str) -> AsyncIterator[Frame]:
    response = await listener(client).get(address, headers=headers)
    assert response.status_code == 200
    assert response["Content-Type"] == "text/event-stream"
    async with aclosing(aiter(response)) as chunks:
        async for chunk in chunks:
            frame = parse(chunk.decode())
            if frame is not None:
                yield frame


def parse(text: str) -> Frame | None:
    """None for what carries no event: the greeting and heartbeats."""
    fields = dict(line.split(": ", 1) for line in text.strip().split("\n") if not line.startswith(":"))
    if "event" not in fields:
        return None
    return Frame(fields["event"], json.loads(fields["data"]), int(fields["id"]) if "id" in fields else None)


async def take(frames: AsyncIterator[Frame], number: int) -> list[Frame]:
    """The next ``number`` events; ``touch`` says only that the job's row may have changed."""
    taken: list[Frame] = []
    while len(taken) < number:
        frame = await anext(frames)
        if frame.event != "touch":
            taken.append(frame)
    return taken


@sync_to_async
def say(job: Job, *messages: str) -> None:
    for message in messages:
        event_add(job=job, type=Event.Type.MESSAGE, message=message)
    connections.close_all()


@sync_to_async
def in_database(work: Any) -> Any:
    try:
        return work()
    finally:
        connections.close_all()


async def until(holds: Callable[[], bool]) -> None:
    """Let the event loop run; a closed stream's generators are finished by it. Limited by ``run``."""
    while not holds():
        await asyncio.sleep(0.01)


def stream_of(job: Job) -> str:
    return reverse("web:job_stream", args=[job.public_id])


LIST = "/jobs/stream"


def texts(frames: list[Frame]) -> list[str]:
    return [frame.data["text"] for frame in frames]


# ---------------------------------------------------------------- replay and news


def test_everything_is_replayed_and_then_followed(acme, job):
    async def story() -> None:
        await say(job, "one", "two")
        async with aclosing(listen(acme.client, stream_of(job))) as frames:
            replayed = await take(frames, 2)
            assert texts(replayed) == ["one", "two"]
            assert [(frame.id, frame.event) for frame in replayed] == [(1, "message"), (2, "message")]
            await say(job, "three")
            assert texts(await take(frames, 1)) == ["three"]

    run(story())


def test_after_a_reconnect_nothing_is_missed_and_nothing_comes_twice(acme, job):
    async def story() -> None:
        await say(job, "one", "two")
        async with aclosing(listen(acme.client, stream_of(job))) as frames:
            last = (await take(frames, 2))[-1]
        await say(job, "while away", "also")
        async with aclosing(listen(acme.client, stream_of(job), **{"Last-Event-ID": str(last.id)})) as frames:
            assert texts(await take(frames, 2)) == ["while away", "also"]
            await say(job, "back")
            news = await take(frames, 1)
            assert (texts(news), news[0].id) == (["back"], 5)

    run(story())


def test_the_header_of_a_reconnect_is_newer_than_the_address(acme, job):
    async def story() -> None:
        await say(job, "one", "two", "three")
        address = f"{stream_of(job)}?after=1"
        async with aclosing(listen(acme.client, address)) as frames:
            assert texts(await take(frames, 2)) == ["two", "three"]
        async with aclosing(listen(acme.client, address, **{"Last-Event-ID": "2"})) as frames:
            assert texts(await take(frames, 1)) == ["three"]
        async with aclosing(listen(acme.client, f"{stream_of(job)}?after=nonsense")) as frames:
            assert texts(await take(frames, 1)) == ["one"]

    run(story())


def test_a_long_replay_comes_in_order_and_whole(acme, job, monkeypatch):
    monkeypatch.setattr(streams, "PAGE", 3)

    async def story() -> None:
        await say(job, *(f"event {number}" for number in range(10)))
        async with aclosing(listen(acme.client, stream_of(job))) as frames:
            assert [frame.id for frame in await take(frames, 10)] == list(range(1, 11))

    run(story())


def test_a_change_without_an_event_is_told_as_a_touch(acme, job):
    async def story() -> None:
        await say(job, "one")
        async with aclosing(listen(acme.client, stream_of(job))) as frames:
            assert (await anext(frames)).event == "message"
            await in_database(lambda: ring(JOBS, org=job.organization_id, job=job.pk))
            touched = await anext(frames)
            assert (touched.event, touched.id) == ("touch", None)

    run(story())


def test_the_stream_ends_with_the_job(acme, job):
    def cancel() -> None:
        job_status_change(
            job=job, new=JobStatus.CANCELLED, reason=Reason.CANCELLED_BY_MEMBER, actor=f"user:{acme.user.pk}"
        )

    async def story() -> None:
        await say(job, "one")
        frames = listen(acme.client, stream_of(job))
        assert texts(await take(frames, 1)) == ["one"]
        await in_database(cancel)
        rest = [frame async for frame in frames if frame.event != "touch"]
        assert [frame.event for frame in rest] == ["status", "end"]
        again = [frame.event async for frame in listen(acme.client, stream_of(job))]
        assert again == ["message", "status", "end"]

    run(story())


def test_a_quiet_stream_shows_that_it_lives(acme, job, monkeypatch):
    monkeypatch.setattr(streams, "HEARTBEAT_S", 0.05)

    async def story() -> None:
        response = await listener(acme.client).get(stream_of(job))
        async with aclosing(aiter(response)) as chunks:
            async for chunk in chunks:
                if chunk.decode() == streams.HEARTBEAT:
                    return

    run(story())


# ---------------------------------------------------------------- the list


def test_the_list_hears_of_its_own_jobs_only(acme, northwind, job, tmp_path):
    theirs = factories.job(northwind.organization, tmp_path)

    async def story() -> None:
        async with aclosing(listen(acme.client, LIST)) as frames:
            assert (await anext(frames)).data == {"ids": None}  # the page may be older than the stream
            assert (await anext(frames)).data == {"ids": None}  # the hub listens from here on
            await say(theirs, "not for acme")
            await say(job, "for acme")
            assert (await anext(frames)).data == {"ids": [job.public_id]}

    run(story())


# ---------------------------------------------------------------- who may listen


def test_streams_are_for_members(acme, northwind, stranger, job):
    async def status(client: Client, address: str) -> int:
        return (await listener(client).get(address)).status_code

    async def story() -> None:
        assert await status(northwind.client, stream_of(job)) == 404
        assert await status(stranger, stream_of(job)) == 404
        assert await status(stranger, LIST) == 404
        assert await status(Client(), stream_of(job)) == 401
        assert await status(Client(), LIST) == 401
        assert await status(acme.client, reverse("web:job_stream", args=["ftjob-missing"])) == 404

    run(story())


@pytest.mark.parametrize("which", ["job", "list"])
def test_a_removed_member_hears_nothing_more(acme, job, which):
    async def story() -> None:
        await say(job, "one")
        frames = listen(acme.client, stream_of(job) if which == "job" else LIST)
        assert (await anext(frames)).event in {"message", "jobs"}
        await in_database(lambda: Membership.objects.filter(user=acme.user).delete())
        await say(job, "secret")
        rest = [frame async for frame in frames]
        assert [frame for frame in rest if frame.event != "touch"] == []

    run(story())


def test_a_session_holds_a_bounded_number_of_streams(acme, job, monkeypatch):
    monkeypatch.setattr(streams, "MAX_STREAMS_PER_SESSION", 2)

    async def story() -> None:
        await say(job, "one")
        held = [listen(acme.client, stream_of(job)) for _ in range(2)]
        for frames in held:
            await anext(frames)
        assert (await listener(acme.client).get(stream_of(job))).status_code == 429
        assert (await listener(acme.viewer).get(LIST)).status_code == 200
        await held[0].aclose()
        await until(lambda: streams._open.total() == 1)
        async with aclosing(listen(acme.client, stream_of(job))) as frames:
            assert (await anext(frames)).event == "message"
        await held[1].aclose()
        await until(lambda: not streams._open)

    run(story())


# ---------------------------------------------------------------- connections


def backends() -> int:
    """Connections to this database, but for the asking one and the hub's."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid() AND application_name <> 'jigsaw-hub'"
        )
        return cursor.fetchone()[0]


def test_waiting_streams_hold_no_database_connection(acme, job):
    async def story() -> None:
        await say(job, "one")
        before = await in_database(backends)
        held = [listen(acme.client, stream_of(job)) for _ in range(8)]
        held += [listen(acme.client, LIST) for _ in range(4)]
        for frames in held:
            await anext(frames)
        # Each has sent what there was; a read that is still going on ends by itself.
        for _ in range(50):
            now = await in_database(backends)
            if now <= before:
                break
        assert now <= before
        for frames in held:
            await frames.aclose()

    run(story())
