"""``/healthz``: whether this process can do its work, for load balancers and supervisors.

A middleware, before those that look at the host and at the scheme: a probe asks an address, not a name, and
speaks plain HTTP whatever the customers speak.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.db import DatabaseError, connection
from django.http import HttpRequest, HttpResponseNotAllowed, JsonResponse
from django.utils.decorators import sync_and_async_middleware

PATH = "/healthz"


@sync_and_async_middleware
def healthz(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """Answers ``PATH``; everything else goes on."""
    if iscoroutinefunction(get_response):

        async def later(request: HttpRequest) -> Any:
            if request.path_info == PATH:
                return await sync_to_async(_health)(request)
            return await get_response(request)

        return later

    def now(request: HttpRequest) -> Any:
        return _health(request) if request.path_info == PATH else get_response(request)

    return now


def _health(request: HttpRequest) -> JsonResponse | HttpResponseNotAllowed:
    if request.method not in {"GET", "HEAD"}:
        return HttpResponseNotAllowed(["GET", "HEAD"])
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except DatabaseError:
        return JsonResponse({"status": "unavailable", "database": "unreachable"}, status=503)
    return JsonResponse({"status": "ok", "database": "ok"})
