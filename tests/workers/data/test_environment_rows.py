"""Rows of a game: the first that lack the number are named."""

from __future__ import annotations

import json

from workers.data.fits import check_environment_fields
from workers.spec import GuessingGame


def test_rows_without_a_whole_number_are_named(tmp_path):
    messages = [{"role": "user", "content": "guess"}]
    numbers = [{"number": 3}, {}, {"number": "3"}, {"number": True}, {"number": 2.5}, {"number": -1}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": messages, **row}) + "\n" for row in numbers))
    found = check_environment_fields(path, GuessingGame())
    assert [error.message for error in found] == [
        f"row {row}: number must be a whole number" for row in (2, 3, 4, 5)
    ]
