"""Two small datasets with graders for a first job: a small model visibly learns each within minutes on a CPU.

Rows come from a seeded generator, so the bytes are the same everywhere. Both graders give partial credit: a
small model with few samples a step learns nothing from a reward it almost never gets. Both give 0 to an empty
completion, and to no constant completion much.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.spec import Grader, PythonGrader

Row = dict[str, Any]


@dataclass(frozen=True)
class BuiltinDataset:
    """``rl`` are the fields of ``RLConfig`` that differ from its defaults, as a tenant would write them."""

    name: str
    title: str
    description: str
    path: Path
    grader: Grader
    rl: dict[str, Any] = field(default_factory=dict)


def recommended(learning_rate: float, warmup_steps: int, max_tokens: int) -> dict[str, Any]:
    """20 steps of 4 x 8 samples. Warm-up and decay: late steps at a high constant rate can collapse."""
    return {
        "steps": 20,
        "micro_batch_size": 16,
        # Too small to hold anything back: with a penalty the divergence is measured and drawn.
        "loss": {"kl_beta": 0.001},
        "sampling": {"max_tokens": max_tokens},
        "optimizer": {"learning_rate": learning_rate, "schedule": "linear", "warmup_steps": warmup_steps},
    }


def write_builtin(folder: Path) -> list[BuiltinDataset]:
    """Write the files that are not there yet and describe all; several processes may do so at once."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        BuiltinDataset(
            name="exact-words",
            title="Sentences of an exact length",
            description="Write one sentence about a topic with exactly as many words as asked.",
            path=write_rows(folder / "exact-words.jsonl", word_rows),
            grader=PythonGrader(type="python", name="exact_words", source=WORDS_GRADER, timeout_s=2.0),
            rl=recommended(learning_rate=1e-3, warmup_steps=5, max_tokens=24),
        ),
        BuiltinDataset(
            name="small-sums",
            title="Sums in a fixed form",
            description="Add two small numbers and reply with nothing but 'Answer: <number>'.",
            path=write_rows(folder / "small-sums.jsonl", sum_rows),
            grader=PythonGrader(type="python", name="small_sums", source=SUMS_GRADER, timeout_s=2.0),
            rl=recommended(learning_rate=3e-4, warmup_steps=8, max_tokens=16),
        ),
    ]


def write_rows(path: Path, make: Callable[[random.Random], list[Row]]) -> Path:
    """The file, complete whenever it is there."""
    text = "".join(json.dumps(row) + "\n" for row in make(random.Random(0)))
    if not path.exists() or path.read_text() != text:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as part:
            part.write(text)
        Path(part.name).chmod(0o644)
        Path(part.name).replace(path)
    return path


# ---------------------------------------------------------------- exact-words

TOPICS = (
    *("rivers", "cats", "music", "rain", "trees", "bread", "the moon", "horses", "gardens", "winter"),
    *("the sea", "books", "birds", "coffee", "trains", "friends", "stars", "snow", "dogs", "schools"),
    *(
        "bridges",
        "flowers",
        "summer",
        "farmers",
        "mountains",
        "letters",
        "cities",
        "tea",
        "clouds",
        "markets",
    ),
)
WORD_COUNTS = range(5, 13)


def word_rows(rng: random.Random) -> list[Row]:
    rows = [word_row(topic, words) for topic in TOPICS for words in WORD_COUNTS]
    rng.shuffle(rows)
    return rows


def word_row(topic: str, words: int) -> Row:
    # A system message of our own keeps a chat template's longer default out of every prompt.
    return {
        "messages": [
            {"role": "system", "content": "Follow the instruction."},
            {"role": "user", "content": f"Write one sentence of exactly {words} words about {topic}."},
        ],
        "words": words,
        "topic": topic,
    }


# How close the length is, times: 0.4 for itself, 0.3 for one finished sentence, 0.15 for the topic, 0.15 for
# words that are not repeated. One word said over and over earns less than half.
WORDS_GRADER = r"""import re


def grade(sample, item):
    text = sample["output_text"].strip()
    words = re.findall(r"[a-z0-9'-]+", text.lower())
    if not words:
        return 0.0
    length = max(0.0, 1.0 - abs(len(words) - item["words"]) / item["words"])
    sentence = re.fullmatch(r"[A-Z][^.!?\n]*[.!?]", text) is not None
    topic = item["topic"].split()[-1].rstrip("s") in text.lower()
    variety = len(set(words)) / len(words)
    return length * (0.4 + 0.3 * sentence + 0.15 * topic + 0.15 * variety)
"""


# ---------------------------------------------------------------- small-sums

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
