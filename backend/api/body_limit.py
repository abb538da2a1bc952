"""How much of a request is taken in, and from whom, decided before Django stores any of it.

Django's ASGI handler puts the whole body on disk before a view, and with it authentication, is asked. So
this wrapper counts the bytes as they come, whatever the headers say, and lets a body above ``SMALL`` in only
at the doors for files, and only for a key or a session that may write: a stranger fills no disk.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from importlib import import_module
from typing import Any

from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib.auth import SESSION_KEY
from django.db import DatabaseError, connections

from backend.api.base import FORM_BYTES
from backend.api.errors import INVALID, envelope
from backend.common.errors import Forbidden
from backend.tenants.access import api_key_actor, require_write

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
#: (status, body of the answer)
Refusal = tuple[int, dict[str, Any]]

SMALL = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
LARGE = settings.MAX_UPLOAD_BYTES + FORM_BYTES
#: The API's and the console's.
FILE_DOORS = frozenset({"/v1/files", "/files"})

STRANGER: Refusal = (
    401,
    envelope(
        f"A body of more than {SMALL:,} bytes needs a valid API key or a session.",
        type="authentication_error",
        code="invalid_api_key",
    ),
)
UNAVAILABLE: Refusal = (
    503,
    envelope("The database cannot be reached.", type="server_error", code="unavailable"),
)


class BodyLimit:
    """An ASGI application around another."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        declared = headers.get(b"content-length", b"")
        refusal = await _refusal(scope["path"], headers, int(declared) if declared.isdigit() else 0)
        if refusal is not None:
            await _answer(send, refusal)
            return
        counted = _Counted(scope["path"], headers, receive)
        await self._application(scope, counted.receive, send)
        if counted.refusal is not None:
            await _answer(send, counted.refusal)


class _Counted:
    """A body as it comes. Past what is allowed the application is told that the client has left, at which it
    forgets the request without an answer; ``refusal`` then holds the answer to give.
    """

    def __init__(self, path: str, headers: dict[bytes, bytes], receive: Receive) -> None:
        self._path, self._headers, self._receive = path, headers, receive
        self._bytes = 0
        self._limit = SMALL
        self.refusal: Refusal | None = None

    async def receive(self) -> Message:
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        if self._bytes > self._limit:
            self.refusal = await _refusal(self._path, self._headers, self._bytes)
            if self.refusal is not None:
                return {"type": "http.disconnect"}
            self._limit = LARGE
        return message


async def _refusal(path: str, headers: dict[bytes, bytes], size: int) -> Refusal | None:
    """Why a body of that size is not taken; None when it is."""
    limit = LARGE if path in FILE_DOORS else SMALL
    if size > limit:
        return 413, envelope(f"The request exceeds {limit:,} bytes.", type=INVALID, code="too_large")
    return await sync_to_async(_refused_sender)(headers) if size > SMALL else None


def _refused_sender(headers: dict[bytes, bytes]) -> Refusal | None:
    """Why the sender may upload nothing; None for a key that may write and for who is signed in."""
    try:
        words = headers.get(b"authorization", b"").split()
        if len(words) == 2 and words[0].lower() == b"bearer":
            actor = api_key_actor(words[1].decode("latin-1"))
            if actor is None:
                return STRANGER
            require_write(actor)
            return None
        return None if _signed_in(headers.get(b"cookie", b"").decode("latin-1")) else STRANGER
    except Forbidden as error:
        return error.status, envelope(error.message, type=error.type, code=error.code)
    except DatabaseError:
        log.exception("who sends a long body cannot be looked up")
        return UNAVAILABLE
    finally:
        # Outside of Django's handling of a request nobody else gives it back.
        connections.close_all()


def _signed_in(cookies: str) -> bool:
    try:
        session = SimpleCookie(cookies).get(settings.SESSION_COOKIE_NAME)
    except CookieError:
        return False
    if session is None:
        return False
    store = import_module(settings.SESSION_ENGINE).SessionStore(session.value)
    return SESSION_KEY in store


async def _answer(send: Send, refusal: Refusal) -> None:
    status, content = refusal
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="api"'))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
