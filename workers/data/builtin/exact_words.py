"""``exact-words``: sentences of an exact length."""

from __future__ import annotations

import random
from pathlib import Path

from workers.data.builtin.dataset import BuiltinDataset, Row, recommended, write_rows
from workers.spec import PythonGrader


def exact_words(folder: Path) -> BuiltinDataset:
    return BuiltinDataset(
        name="exact-words",
        title="Sentences of an exact length",
        description="Write one sentence about a topic with exactly as many words as asked.",
        path=write_rows(folder / "exact-words.jsonl", word_rows),
        grader=PythonGrader(type="python", name="exact_words", source=WORDS_GRADER, timeout_s=2.0),
        rl=recommended(learning_rate=1e-3, warmup_steps=5, max_tokens=24),
    )


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
