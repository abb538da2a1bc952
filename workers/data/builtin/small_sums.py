"""``small-sums``: additions, answered in a fixed form."""

from __future__ import annotations

import random
from pathlib import Path

from workers.data.builtin.dataset import BuiltinDataset, Row, recommended, write_rows
from workers.spec import PythonGrader


def small_sums(folder: Path) -> BuiltinDataset:
    return BuiltinDataset(
        name="small-sums",
        title="Sums in a fixed form",
        description="Add two small numbers and reply with nothing but 'Answer: <number>'.",
        path=write_rows(folder / "small-sums.jsonl", sum_rows),
        grader=PythonGrader(type="python", name="small_sums", source=SUMS_GRADER, timeout_s=2.0),
        rl=recommended(learning_rate=3e-4, warmup_steps=8, max_tokens=16),
    )


FIRST, SECOND = range(2, 20), range(2, 10)


def sum_rows(rng: random.Random) -> list[Row]:
    rows = [sum_row(a, b) for a in FIRST for b in SECOND]
    rng.shuffle(rows)
    return rows


def sum_row(a: int, b: int) -> Row:
    # One example shows the form: told in words alone, a small model never hits on it, and what is never
    # sampled is never reinforced.
    return {
        "messages": [
            {"role": "system", "content": "Add the numbers."},
            {"role": "user", "content": "2 + 2"},
            {"role": "assistant", "content": "Answer: 4"},
            {"role": "user", "content": f"{a} + {b}"},
        ],
        "answer": a + b,
    }


# The right number in the right form is 1. The form alone is 0.3, a near miss in it a little more; words after
# the answer halve it; a number without the form is worth at most 0.2. A constant answer stays near 0.5.
SUMS_GRADER = r"""import re


def grade(sample, item):
    text = sample["output_text"].strip()
    numbers = re.findall(r"[0-9]{1,6}", text)
    if not numbers:
        return 0.0
    number = int(numbers[0] if text.startswith("Answer: ") else numbers[-1])
    closeness = max(0.0, 1.0 - abs(number - item["answer"]) / item["answer"])
    right = 1.0 if number == item["answer"] else 0.3 * closeness
    if re.fullmatch(r"Answer: [0-9]+", text):
        return 0.3 + 0.7 * right
    if text.startswith("Answer: "):
        return 0.15 + 0.35 * right
    return 0.2 * right
"""
