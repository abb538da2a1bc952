"""The console's pages, fragments and streams."""

from __future__ import annotations

from django.urls import URLPattern

app_name = "web"

urlpatterns: list[URLPattern] = []
