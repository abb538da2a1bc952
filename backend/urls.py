"""Routes: the API under /v1, and the console. ``/healthz`` is a middleware: see ``api.health``."""

from __future__ import annotations

from django.urls import include, path

urlpatterns = [
    path("v1/", include("backend.api.urls")),
    path("", include("frontend.web.urls")),
]
