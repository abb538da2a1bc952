"""Server-sent events: rows after ``Last-Event-ID``, then whatever the hub's bell announces.

    subscribe ─► read rows above the last one sent ─► send ─┐
                    ▲                                       │ until nothing is left
                    └────────── bell, or 15 s ◄─────────────┘

The subscription comes before the first read, so a row committed in between rings. Between reads a stream
holds no database connection. Every read passes the tenants' door again: a member who is removed hears nothing
more.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.views.decorators.http import require_GET

from backend.common.errors import NotFound
from backend.jobs.access import job_access
from backend.jobs.models import Event
from backend.jobs.selectors import job_events_page
from backend.notify.hub import EVERYTHING, Everything, hub
from backend.tenants.access import user_actor
from backend.tenants.models import User
from frontend.web import rows
from frontend.web.doors import session_actor
from frontend.web.words import event_text, is_over

HEARTBEAT_S = 15.0
#: Doorbells closer together than this are one read.
GAP_S = 0.2
PAGE = 100
MAX_STREAMS_PER_SESSION = 20
GREETING = "retry: 2000\n\n"
HEARTBEAT = ": still here\n\n"

#: Streams of this process by session.
_open: Counter[str] = Counter()


@dataclass(frozen=True)
class Listener:
    """Who listens: enough to pass the door again before each read."""

    session: str
    user: User
    slug: str
    org: int


@require_GET
async def job_stream(request: HttpRequest, job_id: str) -> HttpResponseBase:
    """A job's events above ``Last-Event-ID`` (or ``?after=``), then as they come; ``end`` when it is over."""
    listener = await sync_to_async(_admit)(request, job_id)
    if isinstance(listener, HttpResponse):
        return listener
    return EventStream(_job_events(listener, job_id, _last_seen(request)))


@require_GET
async def jobs_stream(request: HttpRequest) -> HttpResponseBase:
    """The ids of the organization's jobs that changed; ``null`` when any may have."""
    listener = await sync_to_async(_admit)(request, None)
    if isinstance(listener, HttpResponse):
        return listener
    return EventStream(_changed_jobs(listener))


def _admit(request: HttpRequest, job_id: str | None) -> Listener | HttpResponse:
    try:
        if not request.user.is_authenticated:
            return HttpResponse("Sign in first.", status=401, content_type="text/plain")
        actor = session_actor(request)
        if job_id is not None:
            job_access(actor, job_id)
        session = request.session.session_key or ""
        if _open[session] >= MAX_STREAMS_PER_SESSION:
            return HttpResponse("Too many open pages.", status=429, content_type="text/plain")
        user = User.objects.get(pk=request.user.pk)
        return Listener(session, user, actor.organization.slug, actor.organization.pk)
    except NotFound as error:
        return HttpResponse(error.message, status=404, content_type="text/plain")
    finally:
        connections.close_all()


def _last_seen(request: HttpRequest) -> int:
    """A browser that reconnects sends the header, and it is newer than the address it first asked for."""
    said = request.headers.get("Last-Event-ID") or request.GET.get("after", "")
    return int(said) if said.isascii() and said.isdigit() and len(said) < 19 else 0


class EventStream(StreamingHttpResponse):
    """Ends its frames when the browser goes, also while a frame is on its way to it."""

    def __init__(self, frames: AsyncGenerator[str]) -> None:
        headers = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
        super().__init__(frames, content_type="text/event-stream", headers=headers)
        self._frames = frames

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        async with aclosing(self._frames) as frames:
            async for frame in frames:
                yield self.make_bytes(frame)


async def _job_events(listener: Listener, job_id: str, seen: int) -> AsyncGenerator[str]:
    with _counted(listener):
        job_pk = await sync_to_async(_job_pk)(listener, job_id)
        if job_pk is None:
            return
        yield GREETING
        async with hub().subscribe(org=listener.org, job=job_pk) as bell:
            rung = False
            while True:
                news = await sync_to_async(_read_job)(listener, job_id, seen)
                if news is None:
                    return
                for event in news.events:
                    yield _event_frame(event)
                    seen = event.seq
                if news.more:
                    continue
                if news.over:
                    yield _frame("end", {})
                    return
                if rung and not news.events:
                    yield _frame("touch", {})
                rung = bool(await bell.wait(HEARTBEAT_S))
                if rung:
                    await asyncio.sleep(GAP_S)
                else:
                    yield HEARTBEAT


async def _changed_jobs(listener: Listener) -> AsyncGenerator[str]:
    with _counted(listener):
        yield GREETING
        async with hub().subscribe(org=listener.org) as bell:
            # What changed between the page and this stream is nobody's doorbell.
            changed: frozenset[int] | Everything = EVERYTHING
            while True:
                everything = changed is EVERYTHING
                ids = await sync_to_async(_public_ids)(listener, () if everything else changed)
                if ids is None:
                    return
                yield _frame("jobs", {"ids": None if everything else ids}) if changed else HEARTBEAT
                await asyncio.sleep(GAP_S)
                changed = await bell.wait(HEARTBEAT_S)


@contextmanager
def _counted(listener: Listener) -> Any:
    _open[listener.session] += 1
    try:
        yield
    finally:
        _open[listener.session] -= 1
        if not _open[listener.session]:
            del _open[listener.session]


@dataclass(frozen=True)
class News:
    events: list[Event]
    more: bool
    over: bool


def _job_pk(listener: Listener, job_id: str) -> int | None:
    with _released():
        try:
            return job_access(user_actor(user=listener.user, slug=listener.slug), job_id).pk
        except NotFound:
            return None


def _read_job(listener: Listener, job_id: str, seen: int) -> News | None:
    """None when the listener may not listen any more.

    The job is read before its events: when it is over, the event that says so is among them.
    """
    with _released():
        try:
            job = job_access(user_actor(user=listener.user, slug=listener.slug), job_id)
        except NotFound:
            return None
        found = job_events_page(job, after=seen, limit=PAGE)
        return News(found.items, found.has_more, is_over(job))


def _public_ids(listener: Listener, pks: Any) -> list[str] | None:
    with _released():
        try:
            actor = user_actor(user=listener.user, slug=listener.slug)
        except NotFound:
            return None
        return rows.changed_ids(actor.organization, pks) if pks else []


@contextmanager
def _released() -> Any:
    try:
        yield
    finally:
        connections.close_all()


def _event_frame(event: Event) -> str:
    said = {
        "seq": event.seq,
        "at": event.at.isoformat(timespec="milliseconds"),
        "type": event.type,
        "level": event.level,
        "text": event_text(event),
        "data": event.data,
    }
    return f"id: {event.seq}\n{_frame(event.type, said)}"


def _frame(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
