"""Graders and environments to begin with: one of each type, as a tenant would write it."""

from __future__ import annotations

from typing import Any

TEXT, ANSWER = "{{sample.output_text}}", "{{item.answer}}"

GRADERS: dict[str, dict[str, Any]] = {
    "string_check": {"type": "string_check", "input": TEXT, "reference": ANSWER, "operation": "eq"},
    "text_similarity": {
        "type": "text_similarity",
        "input": TEXT,
        "reference": ANSWER,
        "evaluation_metric": "fuzzy_match",
    },
    "math": {"type": "math", "input": TEXT, "reference": ANSWER},
    "json_schema": {
        "type": "json_schema",
        "json_schema": {
            "type": "object",
            "required": ["answer"],
            "properties": {"answer": {"type": "number"}},
        },
    },
    "score_model": {
        "type": "score_model",
        "url": "https://api.example.com/v1",
        "model": "judge",
        "secret": "judge-key",
        "input": [
            {"role": "system", "content": "Rate the answer between 0 and 1. Reply with the number only."},
            {"role": "user", "content": f"Question: {{{{item.question}}}}\nAnswer: {TEXT}"},
        ],
    },
    "endpoint": {"type": "endpoint", "url": "https://grader.example.com/score", "secret": "grader-key"},
    "multi": {
        "type": "multi",
        "graders": {
            "exact": {"type": "string_check", "reference": ANSWER},
            "near": {"type": "text_similarity", "reference": ANSWER},
        },
        "calculate_output": "0.7 * exact + 0.3 * near",
    },
}
SOURCE = '''def grade(sample, item):
    """Return a number; higher is better. `item` is the row, `sample["output_text"]` the completion."""
    return 1.0 if item["answer"] in sample["output_text"] else 0.0
'''

ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "guessing_game": {"type": "guessing_game", "number_field": "number", "max_turns": 6},
    "grid_world": {"type": "grid_world", "map_field": "map", "max_turns": 6},
    "chat": {"type": "chat", "turns_field": "turns", "max_turns": 4},
    "tools": {
        "type": "tools",
        "tools": [
            {"type": "calculator"},
            {"type": "python"},
            {"type": "search", "corpus": "multihop-corpus"},
        ],
        "max_turns": 4,
        "turn_tokens": 48,
    },
    "reasoning_gym": {"type": "reasoning_gym", "puzzle_field": "puzzle", "max_turns": 1},
    "remote": {"type": "remote", "url": "https://world.example.com/turn", "secret": "world-key"},
}
WORLD_SOURCE = '''class Environment:
    """One episode. `item` is the row; what is drawn must come from `seed`."""

    def __init__(self, item, seed):
        self.answer = item["answer"]

    def step(self, turn):
        """The model's turn in, what it reads next out; `done` ends the episode."""
        if self.answer in turn:
            return {"observation": None, "reward": 1.0, "done": True}
        return "Try again."
'''
