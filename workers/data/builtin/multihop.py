"""``multihop-qa``: questions over the passages of a small corpus, each of which needs two of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workers.data.builtin.dataset import BuiltinDataset, Row, prompt, recommended, write_rows
from workers.data.builtin.passages import COLOURS, GOODS, HILLS, RIVERS, TOWNS, TRADES, land
from workers.spec import PythonGrader

CORPUS = "multihop-corpus"
NAMES = (*TOWNS, *RIVERS, *TRADES)
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
    rows = [question_row(each) for each in questions()]
    rng.shuffle(rows)
    return rows


@dataclass(frozen=True)
class Question:
    """``first`` are the names in the first passage, ``via`` the one of them that the second is about;
    ``choices`` are all answers to questions of this kind.
    """

    text: str
    first: tuple[str, ...]
    via: str
    answer: str
    choices: tuple[str, ...]


def questions() -> Iterator[Question]:
    where = land()
    for each in where.people:
        name, town, trade = each.name, each.town, each.trade
        first = (town, trade)
        yield Question(f"Which river is the town of {name} on?", first, town, where.rivers[town], RIVERS)
        yield Question(f"What is the town of {name} known for?", first, town, where.goods[town], GOODS)
        asked = f"What colour is the coat that people of the trade of {name} wear?"
        yield Question(asked, first, trade, where.colours[trade], COLOURS)
    for town, river in where.rivers.items():
        asked = f"In which hills does the river of {town} rise?"
        yield Question(asked, (river,), river, where.hills[river], HILLS)


def question_row(question: Question) -> Row:
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
            question.text + BEGIN,
        ),
        "first": list(question.first),
        "via": question.via,
        "answer": question.answer,
        "choices": list(question.choices),
    }


def call(query: str) -> str:
    return f'<tool_call>{{"name": "search", "arguments": {{"query": "{query}"}}}}</tool_call>'


def found(text: str) -> str:
    return f"<tool_response>\n{text}\n</tool_response>"


# The answer alone among its choices is 1; named together with others, its share of them. Without it, 0.4 for
# what the first passage leads to, in a call or not, and 0.25 for anything else of that passage; less when it
# stands among many names. A well-formed call is worth 0.2, for an episode that ends with one has searched.
# Any name of the land is worth 0.1: only a search finds it.
MULTIHOP_GRADER = (
    r"""import json
import re


def grade(sample, item):
    text = sample["output_text"]
    words = set(re.findall(r"[a-z]+", text.lower()))
    calls = re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.DOTALL)
    if not calls and item["answer"].lower() in words:
        return 1.0 / len(words & lower(item["choices"]))
    names = words & lower(NAMES)
    crowd = max(1, len(names) - 1)
    called = 0.2 if any(formed(call) for call in calls) else 0.0
    if item["via"].lower() in words:
        return max(called, 0.4 / crowd)
    if words & lower(item["first"]):
        return max(called, 0.25 / crowd)
    return max(called, 0.1 if names else 0.0)


def lower(names):
    return {name.lower() for name in names}


def formed(text):
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(call, dict) or call.get("name") != "search":
        return False
    arguments = call.get("arguments")
    return isinstance(arguments, dict) and isinstance(arguments.get("query"), str)


NAMES = """
    + f"{NAMES!r}\n"
)
