"""``arithmetic``: one operation on small numbers, answered in a fixed form."""

from __future__ import annotations

import random
from pathlib import Path

from workers.data.builtin.dataset import BuiltinDataset, Row, prompt, recommended, write_rows
from workers.spec import PythonGrader

ROWS = 300


def arithmetic(folder: Path) -> BuiltinDataset:
    return BuiltinDataset(
        name="arithmetic",
        title="Arithmetic",
        description="Add, subtract or multiply, and reply with nothing but 'Answer: <number>'.",
        path=write_rows(folder / "arithmetic.jsonl", arithmetic_rows),
        grader=PythonGrader(type="python", name="arithmetic", source=ARITHMETIC_GRADER, timeout_s=2.0),
        rl=recommended(learning_rate=3e-4, warmup_steps=8, max_tokens=16),
    )


def arithmetic_rows(rng: random.Random) -> list[Row]:
    """Sums and differences up to 39, products up to 81; no answer below 1."""
    tasks = [
        *((f"{a} + {b}", a + b) for a in range(2, 31) for b in range(2, 10)),
        *((f"{a} - {b}", a - b) for a in range(10, 31) for b in range(2, 10)),
        *((f"{a} * {b}", a * b) for a in range(2, 10) for b in range(2, 10)),
    ]
    return [arithmetic_row(task, answer) for task, answer in rng.sample(tasks, ROWS)]


def arithmetic_row(task: str, answer: int) -> Row:
    # Examples show the form: told in words alone, a small model never hits on it, and what is never sampled
    # is never reinforced.
    return {
        "messages": prompt("Calculate.", "12 - 2", "Answer: 10", "3 * 2", "Answer: 6", task),
        "answer": answer,
    }


# The form alone is worth 0.2. In it, the right number is worth 0.8 more, and a wrong one up to half of that,
# the nearer the more. Words after the answer halve all of it; a number without the form is worth 0.2 at most.
ARITHMETIC_GRADER = r"""import re


def grade(sample, item):
    text = sample["output_text"].strip()
    numbers = re.findall(r"-?[0-9]{1,6}", text)
    if not numbers:
        return 0.0
    formed = re.match(r"Answer: -?[0-9]", text) is not None
    number = int(numbers[0] if formed else numbers[-1])
    away = abs(number - item["answer"]) / item["answer"]
    right = 1.0 if away == 0 else 0.5 * max(0.0, 1.0 - away)
    if not formed:
        return 0.2 * right
    alone = re.fullmatch(r"Answer: -?[0-9]+", text) is not None
    return (1.0 if alone else 0.5) * (0.2 + 0.8 * right)
"""
