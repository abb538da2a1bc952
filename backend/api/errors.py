"""One envelope for every error of the API: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
from typing import Any

from django.core.exceptions import PermissionDenied, SuspiciousOperation
from django.http import Http404
from rest_framework import exceptions
from rest_framework.response import Response
from rest_framework.views import set_rollback

from backend.common.errors import ServiceError

log = logging.getLogger(__name__)

INVALID = "invalid_request_error"

#: (type, code) by the class of REST framework's exceptions; the message is their own.
KINDS: dict[type[exceptions.APIException], tuple[str, str | None]] = {
    exceptions.NotAuthenticated: ("authentication_error", "missing_api_key"),
    exceptions.AuthenticationFailed: ("authentication_error", "invalid_api_key"),
    exceptions.PermissionDenied: ("permission_error", "insufficient_role"),
    exceptions.NotFound: (INVALID, "not_found"),
    exceptions.MethodNotAllowed: (INVALID, "method_not_allowed"),
    exceptions.UnsupportedMediaType: (INVALID, "unsupported_media_type"),
    exceptions.ParseError: (INVALID, "parse_error"),
    exceptions.Throttled: ("rate_limit_error", "rate_limit_exceeded"),
}


def envelope(
    message: str, *, type: str = INVALID, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def exception_handler(error: Exception, context: dict[str, Any]) -> Response:
    """Every exception of a view as a response; what nobody expected is logged and told as a 500."""
    set_rollback()
    if isinstance(error, ServiceError):
        body = envelope(error.message, type=error.type, param=error.param, code=error.code)
        return Response(body, status=error.status)
    if isinstance(error, Http404):
        error = exceptions.NotFound("There is no such resource.")
    elif isinstance(error, PermissionDenied):
        error = exceptions.PermissionDenied()
    elif isinstance(error, SuspiciousOperation):
        error = exceptions.ParseError(str(error) or None)
    if isinstance(error, exceptions.APIException):
        return _of_framework(error)
    request = context["request"]
    request_id = request.META.get("jigsaw.request_id", "")
    log.error("%s %s failed (request %s)", request.method, request.path, request_id, exc_info=error)
    message = f"An error of ours. The request's id is {request_id}."
    return Response(envelope(message, type="server_error", code="internal_error"), status=500)


def _of_framework(error: exceptions.APIException) -> Response:
    headers = {}
    if getattr(error, "auth_header", None):
        headers["WWW-Authenticate"] = error.auth_header
    if getattr(error, "wait", None):
        headers["Retry-After"] = str(int(error.wait))
    type, code = KINDS.get(error.__class__, (INVALID, None))
    param, message = _first(error.detail)
    return Response(
        envelope(message, type=type, param=param, code=code), status=error.status_code, headers=headers
    )


def _first(detail: Any, path: tuple[str, ...] = ()) -> tuple[str | None, str]:
    """The first message of a tree of them, with the dotted path that leads to it."""
    if isinstance(detail, dict):
        name, inner = next(iter(detail.items()))
        return _first(inner, path if name == "non_field_errors" else (*path, str(name)))
    if isinstance(detail, list):
        position = next(index for index, inner in enumerate(detail) if inner)
        inner = detail[position]
        return _first(inner, (*path, str(position)) if isinstance(inner, dict) else path)
    return ".".join(path) or None, str(detail)
