"""``multihop-qa``: questions over the passages of a small corpus, each of which needs two of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from workers.data.builtin.dataset import BuiltinDataset, Row, prompt, recommended, write_rows
from workers.data.builtin.passages import COLOURS, GOODS, HILLS, RIVERS, land
from workers.spec import PythonGrader

CORPUS = "multihop-corpus"
BEGIN = "\nBegin with a <tool_call>."


def multihop_qa(folder: Path) -> BuiltinDataset:
    return BuiltinDataset(
        name="multihop-qa",
        title="Questions that need two searches",
        description="Search a small corpus, search again for what was found, and answer in one word.",
        path=write_rows(folder / "multihop-qa.jsonl", question_rows),
        grader=PythonGrader(type="python", name="multihop_qa", source=MULTIHOP_GRADER, timeout_s=2.0),
        environment={
            "type": "tools",
            "tools": [{"type": "search", "corpus": CORPUS, "passages": 2}],
            "max_turns": 3,
            "turn_tokens": 48,
        },
        # Prompts and answers are long: half of the samples make a step about as long as those of others. At a
        # temperature of 1 a small model seldom spells a whole call.
        rl=recommended(
            learning_rate=5e-4,
            warmup_steps=3,
            max_tokens=256,
            steps=15,
            group_size=4,
            micro_batch_size=4,
            temperature=0.7,
        ),
    )


def question_rows(rng: random.Random) -> list[Row]:
    rows = [question_row(*each) for each in questions()]
    rng.shuffle(rows)
    return rows


def questions() -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Question, what the first passage leads to, the answer, and all answers to questions of this kind."""
    where = land()
    for each in where.people:
        name, town, trade = each.name, each.town, each.trade
        yield f"Which river is the town of {name} on?", town, where.rivers[town], RIVERS
        yield f"What is the town of {name} known for?", town, where.goods[town], GOODS
        yield (
            f"What colour is the coat that people of the trade of {name} wear?",
            trade,
            where.colours[trade],
            COLOURS,
        )
    for town, river in where.rivers.items():
        yield f"In which hills does the river of {town} rise?", river, where.hills[river], HILLS


def question_row(question: str, via: str, answer: str, choices: tuple[str, ...]) -> Row:
    # Two talks show the form, and each question says how to begin: a small model does not hit on a call by
    # itself, and after one talk alone still seldom makes one. Nobody in them is in the corpus.
    return {
        "messages": prompt(
            "Search, then answer in one word.",
            f"What is the town of Tom Reed known for?{BEGIN}",
            call("Tom Reed"),
            found("Tom Reed: Tom Reed is a clerk in Stoke."),
            call("Stoke"),
            found("Stoke: Stoke is a town on the Ouse, known for its hats."),
            "hats",
            f"Which river is the town of Ada Bell on?{BEGIN}",
            call("Ada Bell"),
            found("Ada Bell: Ada Bell is a tinker in Norham."),
            call("Norham"),
            found("Norham: Norham is a town on the Wye, known for its eels."),
            "Wye",
            question + BEGIN,
        ),
        "via": via,
        "answer": answer,
        "choices": list(choices),
    }


def call(query: str) -> str:
    return f'<tool_call>{{"name": "search", "arguments": {{"query": "{query}"}}}}</tool_call>'


def found(text: str) -> str:
    return f"<tool_response>\n{text}\n</tool_response>"


# The answer alone among its choices is 1; named together with others, its share of them. Without it, 0.4 for
# what the first passage leads to, in a call or not: only a search finds it. A well-formed call is worth 0.2,
# for an episode that ends with one has searched; a guess among twelve is worth less.
MULTIHOP_GRADER = r"""import json
import re


def grade(sample, item):
    text = sample["output_text"]
    words = re.findall(r"[a-z]+", text.lower())
    calls = re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.DOTALL)
    if not calls and item["answer"].lower() in words:
        return 1.0 / sum(choice.lower() in words for choice in item["choices"])
    if item["via"].lower() in words:
        return 0.4
    return 0.2 if any(formed(call) for call in calls) else 0.0


def formed(text):
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(call, dict) or call.get("name") != "search":
        return False
    arguments = call.get("arguments")
    return isinstance(arguments, dict) and isinstance(arguments.get("query"), str)
"""
