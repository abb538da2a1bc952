"""``/v1/secrets``: named values of the organization's graders and environments. No answer holds a value."""

from __future__ import annotations

from typing import Any

from django.views.decorators.debug import sensitive_variables
from rest_framework.request import Request
from rest_framework.response import Response

from backend.api import shapes
from backend.api.base import ApiView, actor_of, listed
from backend.common.errors import InvalidRequest
from backend.tenants.access import require_write
from backend.tenants.secrets import secret_access, secret_delete, secret_put, secrets_all


class Secrets(ApiView):
    def get(self, request: Request) -> Response:
        return Response(listed(secrets_all(actor_of(request).organization), shapes.secret))

    @sensitive_variables()
    def post(self, request: Request) -> Response:
        """Keeps the value; one of the same name is replaced."""
        actor = actor_of(request)
        require_write(actor)
        body = _texts(request.data)
        return Response(shapes.secret(secret_put(actor=actor, name=body["name"], value=body["value"])))


class SecretOne(ApiView):
    def delete(self, request: Request, name: str) -> Response:
        actor = actor_of(request)
        secret_delete(actor=actor, secret=secret_access(actor, name, write=True))
        return Response({"id": name, "object": "secret", "deleted": True})


@sensitive_variables()
def _texts(body: Any) -> dict[str, str]:
    """Both fields as texts; a refusal never repeats what was sent."""
    if not isinstance(body, dict):
        raise InvalidRequest("The request must be a JSON object.")
    for name in ("name", "value"):
        if not isinstance(body.get(name), str):
            raise InvalidRequest(f"{name} must be a text.", param=name)
    if body.keys() > {"name", "value"}:
        raise InvalidRequest("A secret has a name and a value, and nothing else.")
    return {"name": body["name"], "value": body["value"]}
