from __future__ import annotations

from tests.backend.metering.conftest import ada, bob, device

__all__ = ["ada", "bob", "device"]
