"""Routes: the API under /v1, the health check, and the console."""

from __future__ import annotations

from django.urls import include, path

from backend.api.health import healthz

urlpatterns = [
    path("healthz", healthz, name="healthz"),
    path("v1/", include("backend.api.urls")),
    path("", include("frontend.web.urls")),
]
