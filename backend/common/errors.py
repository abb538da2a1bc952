"""What a service may say no with. The API turns these into its envelope, the console into a message.

``param`` is the dotted path of the field at fault, ``code`` a stable word a program can branch on.
"""

from __future__ import annotations


class ServiceError(Exception):
    """A request that cannot be granted; the text is written for the customer."""

    status = 400
    type = "invalid_request_error"
    default_code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code


class InvalidRequest(ServiceError):
    """The request itself is wrong: a field, a file, a state that does not allow it."""


class Forbidden(ServiceError):
    """The actor's role in its own organization is too low."""

    status = 403
    type = "permission_error"
    default_code = "insufficient_role"


class NotFound(ServiceError):
    """There is no such thing, or it is another tenant's: the two are told apart by nobody."""

    status = 404
    default_code = "not_found"


class Conflict(ServiceError):
    """Something else stands in the way, for now."""

    status = 409
    default_code = "conflict"


class LimitReached(ServiceError):
    """The organization has as much of it as it may have."""

    status = 429
    type = "rate_limit_error"
    default_code = "limit_reached"


class Unavailable(ServiceError):
    """Nothing is wrong with the request: a part of the service is busy or away."""

    status = 503
    type = "server_error"
    default_code = "unavailable"


class TooLarge(ServiceError):
    """More bytes than are taken."""

    status = 413
    default_code = "too_large"
