"""``constraints``: texts that hold to several instructions, after IFEval (https://arxiv.org/abs/2311.07911)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from workers.data.builtin.dataset import BuiltinDataset, Row, prompt, recommended, write_rows
from workers.data.builtin.exact_words import TOPICS
from workers.spec import PythonGrader

ROWS = 240
#: Words that may be asked for.
WORDS = ("river", "light", "house", "winter", "music", "bread", "window", "friend", "road", "garden")
LAST_WORDS = ("home", "again", "today", "forever", "tonight", "together")
FORBIDDEN = ("the", "and", "is", "of")
#: Kind -> what is asked; ``{}`` is the constraint's value.
PHRASES = {
    "required": "Use the word '{}'.",
    "ends": "End with the word '{}'.",
    "sentences": "Write exactly {} sentences.",
    "least": "Use at least {} words.",
    "most": "Use at most {} words.",
    "forbidden": "Do not use the word '{}'.",
    "lower": "Use lower case only.",
}


def constraints(folder: Path) -> BuiltinDataset:
    return BuiltinDataset(
        name="constraints",
        title="Instructions to hold to",
        description="Write about a topic and hold to three instructions; the reward is the share that hold.",
        path=write_rows(folder / "constraints.jsonl", constraint_rows),
        grader=PythonGrader(type="python", name="constraints", source=CONSTRAINTS_GRADER, timeout_s=2.0),
        # DAPO trains without a penalty to the starting weights.
        rl=recommended(learning_rate=1e-3, warmup_steps=5, max_tokens=40, algorithm="dapo", loss={}),
    )


def constraint_rows(rng: random.Random) -> list[Row]:
    return [constraint_row(rng.choice(TOPICS), chosen(rng)) for _ in range(ROWS)]


def constraint_row(topic: str, asked: list[dict[str, Any]]) -> Row:
    phrases = [PHRASES[each["kind"]].format(each["value"]) for each in asked]
    return {
        "messages": prompt("Follow every instruction.", " ".join([f"Write about {topic}.", *phrases])),
        "constraints": asked,
    }


def chosen(rng: random.Random) -> list[dict[str, Any]]:
    """Two that something must be done for, and one that a short text breaks seldom.

    All can hold at once: no word is both asked for and forbidden, and the counts leave room for each other.
    """
    doing = {
        "required": rng.choice(WORDS),
        "ends": rng.choice(LAST_WORDS),
        "sentences": rng.choice((2, 3)),
        "least": rng.choice((8, 10)),
    }
    avoiding = {"most": rng.choice((14, 18)), "forbidden": rng.choice(FORBIDDEN), "lower": True}
    kinds = [*rng.sample(list(doing), 2), rng.choice(list(avoiding))]
    return [{"kind": kind, "value": {**doing, **avoiding}[kind]} for kind in kinds]


# The share of constraints that hold; a text without a word holds to none.
CONSTRAINTS_GRADER = r"""import re


def grade(sample, item):
    text = sample["output_text"].strip()
    words = re.findall(r"[a-z0-9'-]+", text.lower())
    if not words:
        return 0.0
    held = [holds(each["kind"], each["value"], text, words) for each in item["constraints"]]
    return sum(held) / len(held)


def holds(kind, value, text, words):
    if kind == "required":
        return value in words
    if kind == "forbidden":
        return value not in words
    if kind == "ends":
        return words[-1] == value
    if kind == "least":
        return len(words) >= value
    if kind == "most":
        return len(words) <= value
    if kind == "lower":
        return text == text.lower()
    if kind == "sentences":
        ends = re.findall(r"[a-z0-9'\")][.!?]+(?=\s|$)", text.lower())
        return len(ends) == value and re.search(r"[.!?]['\")]*$", text) is not None
    raise ValueError(kind)
"""
