from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def polite_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """Residents give way to other processes for good; the tests' process must not, once per resident."""
    monkeypatch.setattr("os.nice", lambda by: 0)
