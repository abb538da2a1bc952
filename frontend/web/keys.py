"""The organization's API keys: who has which, a new one, and the end of one.

A secret is in the answer to the POST that made it and nowhere else: not in the session, not in a URL, not in
a page that can be asked for again.
"""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_variables
from django.views.decorators.http import require_http_methods, require_POST

from backend.common.errors import Forbidden, InvalidRequest
from backend.tenants.access import Actor, require_admin
from backend.tenants.models import Role
from backend.tenants.selectors import api_key_find, api_keys
from backend.tenants.services import MAX_KEY_NAME, api_key_create, api_key_revoke
from frontend.web.doors import for_members, page

#: Roles a key may have, and what it may do with each.
ROLES = (
    (Role.MEMBER, "Member: creates jobs and files"),
    (Role.VIEWER, "Viewer: only reads"),
)


@never_cache
@require_http_methods(["GET", "POST"])
@for_members
@sensitive_variables("secret")
def keys(request: HttpRequest, actor: Actor) -> HttpResponse:
    if request.method == "GET":
        return _page(request, actor)
    name, role = request.POST.get("name", ""), request.POST.get("role", "")
    try:
        key, secret = api_key_create(actor=actor, name=name, role=_role(role))
    except InvalidRequest as error:
        refused = {"name": name, "role": role, "errors": {error.param: error.message}}
        return _page(request, actor, refused, status=error.status)
    shown = {"key": key, "secret": secret, "call": _first_call(request, secret)}
    return _page(request, actor, {"made": shown}, status=201)


@require_POST
@for_members
def revoke(request: HttpRequest, actor: Actor, key_id: int) -> HttpResponse:
    """Answers with the key's row as it is from now on, whoever was first to revoke it."""
    api_key_revoke(actor=actor, key=api_key_find(actor.organization, key_id))
    key = api_key_find(actor.organization, key_id)
    return render(request, "web/part/key_row.html", {"key": key, "may_manage": True})


def _page(
    request: HttpRequest, actor: Actor, context: dict[str, Any] | None = None, status: int = 200
) -> HttpResponse:
    context = {
        "keys": api_keys(actor.organization),
        "may_manage": _may_manage(actor),
        "roles": ROLES,
        "role": Role.MEMBER,
        "max_name": MAX_KEY_NAME,
        **(context or {}),
    }
    return page(request, actor, "web/keys.html", context, status=status)


def _may_manage(actor: Actor) -> bool:
    try:
        require_admin(actor)
    except Forbidden:
        return False
    return True


def _role(text: str) -> Role:
    """Keys of owners and admins could make further keys: the console hands out none."""
    for role, _ in ROLES:
        if role == text:
            return role
    raise InvalidRequest("Choose member or viewer.", param="role")


def _first_call(request: HttpRequest, secret: str) -> str:
    """Sets a terminal up for every call the console shows, and tries the key."""
    url = request.build_absolute_uri("/").rstrip("/")
    return (
        f"export JIGSAW_URL={url}\n"
        f"export JIGSAW_API_KEY={secret}\n"
        'curl $JIGSAW_URL/v1/models -H "Authorization: Bearer $JIGSAW_API_KEY"'
    )
