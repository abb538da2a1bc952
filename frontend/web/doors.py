"""Who looks at a page: the signed-in person, as a member of the session's organization."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.contrib.auth.views import redirect_to_login
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse

from backend.common.errors import Forbidden, NotFound
from backend.tenants.access import Actor, user_actor
from backend.tenants.selectors import organizations_of

SESSION_ORGANIZATION = "organization"

View = Callable[..., HttpResponse]


def session_actor(request: HttpRequest) -> Actor:
    """The person in the organization the session has chosen, or in the first of theirs.

    ``NotFound`` when they belong to none (any more).
    """
    chosen = request.session.get(SESSION_ORGANIZATION)
    if chosen:
        try:
            return user_actor(user=request.user, slug=chosen)
        except NotFound:
            pass
    first = organizations_of(request.user).first()
    if first is None:
        raise NotFound("You are not a member of any organization. Ask an owner of yours to add you.")
    request.session[SESSION_ORGANIZATION] = first.slug
    return user_actor(user=request.user, slug=first.slug)


def for_members(view: View) -> View:
    """Call ``view(request, actor, ...)``; without a session the way leads to the sign-in page.

    What is not the organization's and what does not exist get the same page.
    """

    @wraps(view)
    def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if not request.user.is_authenticated:
            return _to_sign_in(request)
        try:
            return view(request, session_actor(request), *args, **kwargs)
        except NotFound as error:
            return render(
                request, "web/refusal.html", {"title": "Not found", "said": error.message}, status=404
            )
        except Forbidden as error:
            return render(
                request, "web/refusal.html", {"title": "Not allowed", "said": error.message}, status=403
            )

    return guarded


def for_operators(view: View) -> View:
    """As ``for_members``; for everybody but operators there is no such page."""

    @wraps(view)
    def guarded(request: HttpRequest, actor: Actor, *args: Any, **kwargs: Any) -> HttpResponse:
        if not request.user.is_staff:
            raise NotFound("There is no such page.")
        return view(request, actor, *args, **kwargs)

    return for_members(guarded)


def _to_sign_in(request: HttpRequest) -> HttpResponse:
    """A fragment must not be filled with the sign-in page: htmx is told to leave for it."""
    if request.headers.get("HX-Request"):
        return HttpResponse(status=204, headers={"HX-Redirect": reverse("web:sign_in")})
    return redirect_to_login(request.get_full_path())


def page(
    request: HttpRequest, actor: Actor, template: str, context: dict[str, Any], status: int = 200
) -> HttpResponse:
    """A whole page: the template with what the frame around it shows."""
    frame = {"actor": actor, "organizations": list(organizations_of(request.user)[:100])}
    return render(request, template, {**frame, **context}, status=status)
