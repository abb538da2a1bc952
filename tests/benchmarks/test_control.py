"""What a report and a decision ask of the database is bounded: in statements, not in time."""

from __future__ import annotations

import pytest

from tests.benchmarks.control import by_hand

#: The most of any one call, with four jobs on two devices.
MOST = {
    "offer": 3,
    "offer, no device": 3,
    "crossed": 14,
    "finished": 10,
    "finished, no device": 6,
    "step_done": 24,
    "tick": 24,
}


@pytest.mark.django_db(transaction=True)
def test_reports_and_decisions_ask_little_of_the_database(tmp_path):
    found = by_hand(tmp_path, steps=3)
    assert {name: found[name]["most_queries"] for name in MOST} == {
        name: min(found[name]["most_queries"], most) for name, most in MOST.items()
    }
    assert found.keys() == MOST.keys()
