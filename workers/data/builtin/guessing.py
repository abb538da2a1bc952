"""``guessing``: a number from 1 to 20, guessed in several turns."""

from __future__ import annotations

import random
from pathlib import Path

from workers.data.builtin.dataset import BuiltinDataset, Row, prompt, recommended, write_rows

ASKED = "Guess my number. It is from 1 to 20."
NUMBERS = range(1, 21)
#: Rows of each number: the prompt is always the same.
TIMES = 6


def guessing(folder: Path) -> BuiltinDataset:
    return BuiltinDataset(
        name="guessing",
        title="Guess a number",
        description="Find a number from 1 to 20 in four guesses; each is answered by 'Higher.' or 'Lower.'.",
        path=write_rows(folder / "guessing.jsonl", guessing_rows),
        grader=None,
        environment={"type": "guessing_game", "max_turns": 4, "turn_tokens": 6},
        rl=recommended(learning_rate=5e-4, warmup_steps=5, max_tokens=72, algorithm="rloo"),
    )


def guessing_rows(rng: random.Random) -> list[Row]:
    rows = [guessing_row(number) for number in NUMBERS for _ in range(TIMES)]
    rng.shuffle(rows)
    return rows


def guessing_row(number: int) -> Row:
    # A game shows the form; without it, a small model seldom says a number.
    return {
        "messages": prompt(
            "Reply with one number.", ASKED, "10", "Lower.", "5", "Higher.", "7", f"Yes. {ASKED}"
        ),
        "number": number,
    }
