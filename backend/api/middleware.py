"""A name for every request: told in the answer, in our logs, and in the transitions it causes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.utils.decorators import sync_and_async_middleware

from backend.common.ids import new_id

HEADER = "X-Request-Id"
META = "jigsaw.request_id"


@sync_and_async_middleware
def request_id(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """The name is always ours: a client's own could be made to look like another request."""
    if iscoroutinefunction(get_response):

        async def name_async(request: HttpRequest) -> Any:
            request.META[META] = new_id("req")
            response = await get_response(request)
            response[HEADER] = request.META[META]
            return response

        return name_async

    def name(request: HttpRequest) -> Any:
        request.META[META] = new_id("req")
        response = get_response(request)
        response[HEADER] = request.META[META]
        return response

    return name
