"""What every view of the API shares: limits, one parser, one renderer, typed query parameters, lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from django.conf import settings
from rest_framework.exceptions import ParseError
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.parsers import JSONParser
from rest_framework.request import Request
from rest_framework.views import APIView

from backend.api.middleware import META
from backend.common.errors import InvalidRequest, TooLarge
from backend.tenants.access import Actor

#: What a multipart upload may have besides the file itself.
FORM_BYTES = 1 << 20

T = TypeVar("T")


class AlwaysJson(BaseContentNegotiation):
    """The API speaks JSON whatever ``Accept`` says; a download asks for octets and must not be refused."""

    def select_parser(self, request: Request, parsers: list[Any]) -> Any:
        kind = request.content_type.split(";")[0].strip().lower()
        return next((parser for parser in parsers if parser.media_type == kind), None)

    def select_renderer(
        self, request: Request, renderers: list[Any], format_suffix: str | None = None
    ) -> Any:
        return renderers[0], renderers[0].media_type


class Json(JSONParser):
    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> Any:
        try:
            return super().parse(stream, media_type=media_type, parser_context=parser_context)
        except RecursionError:
            raise ParseError("JSON parse error - nested too deeply") from None


class ApiView(APIView):
    content_negotiation_class = AlwaysJson
    parser_classes = [Json]
    max_body_bytes = settings.DATA_UPLOAD_MAX_MEMORY_SIZE

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        if int(request.META.get("CONTENT_LENGTH") or 0) > self.max_body_bytes:
            raise TooLarge(f"The request exceeds {self.max_body_bytes:,} bytes.")


def actor_of(request: Request) -> Actor:
    actor = request.user
    assert isinstance(actor, Actor)
    return actor


def stimulus_of(request: Request) -> str:
    """What transitions name as the cause."""
    return str(request.META[META])


def whole(request: Request, name: str, default: T) -> int | T:
    """A query parameter as a whole number of at most 18 digits, not negative."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InvalidRequest(f"{name} must be a whole number; got {text[:40]!r}", param=name)
    return int(text)


def one_of(request: Request, name: str, allowed: Iterable[str]) -> str | None:
    text = request.query_params.get(name)
    choices = list(allowed)
    if text is not None and text not in choices:
        raise InvalidRequest(f"{name} must be one of {', '.join(choices)}; got {text[:40]!r}", param=name)
    return text


def listed(
    items: Iterable[T], show: Callable[[T], Mapping[str, Any]], *, has_more: bool = False
) -> dict[str, Any]:
    """OpenAI's list object."""
    data = [show(item) for item in items]
    ids = [item["id"] for item in data if "id" in item]
    return {
        "object": "list",
        "data": data,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": has_more,
    }
