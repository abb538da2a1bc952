"""What residents refuse. Pipelines, which compute nothing, read these without loading torch."""

from __future__ import annotations


class RunClosed(Exception):
    """The run was closed while, or before, it computed here."""


class ModelLoad(Exception):
    """The weights could not be loaded."""
