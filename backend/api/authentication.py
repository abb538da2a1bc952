"""``Authorization: Bearer jsk-…``: the program that holds a key of an organization."""

from __future__ import annotations

from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from backend.tenants.access import Actor, api_key_actor
from backend.tenants.models import ApiKey


class ApiKeyAuthentication(BaseAuthentication):
    """``request.user`` becomes the ``Actor``, ``request.auth`` its key."""

    def authenticate(self, request: Request) -> tuple[Actor, ApiKey] | None:
        words = get_authorization_header(request).split()
        if not words:
            return None
        if len(words) != 2 or words[0].lower() != b"bearer":
            raise AuthenticationFailed("Send the key as 'Authorization: Bearer jsk-...'.")
        actor = api_key_actor(words[1].decode("latin-1"))
        if actor is None or actor.key is None:
            raise AuthenticationFailed("The API key is not known or was revoked.")
        return actor, actor.key

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="api"'
