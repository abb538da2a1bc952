"""Numbers from the environment: a bad one stops the start and says what was expected."""

from __future__ import annotations

import pytest
from django.core.exceptions import ImproperlyConfigured

from backend import env


def test_a_number_has_a_least_value(monkeypatch):
    assert env.at_least("JIGSAW_TEST_CAP", 2.0, least=1.0) == 2.0
    monkeypatch.setenv("JIGSAW_TEST_CAP", "1.25")
    assert env.at_least("JIGSAW_TEST_CAP", 2.0, least=1.0) == 1.25


@pytest.mark.parametrize("text", ["0.9", "nan", "much", ""])
def test_what_is_no_such_number_is_told(monkeypatch, text):
    monkeypatch.setenv("JIGSAW_TEST_CAP", text)
    with pytest.raises(ImproperlyConfigured, match=r"JIGSAW_TEST_CAP must be a number of at least 1"):
        env.at_least("JIGSAW_TEST_CAP", 2.0, least=1.0)
