"""Tools by the calls that a model may write, in the real sandbox and over a real index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers.envs.local import episode, play, settings
from workers.envs.environment import OBSERVATION_CHARS
from workers.graders.pool import GraderPool

TOOLS = [{"type": "calculator"}, {"type": "python", "timeout_s": 2}, {"type": "search", "corpus": "towns"}]
PASSAGES = [
    {"title": "Arvel", "text": "Arvel lies on the river Tam. Its mayor is Odo Finch."},
    {"title": "Bress", "text": "Bress is a town of bakers."},
    {"title": "", "text": "The river Tam rises in the hills of Corm."},
]


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    found = GraderPool()
    yield found
    found._sandbox.close()


@pytest.fixture
def corpora(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "towns.jsonl"
    path.write_text("\n".join(map(json.dumps, PASSAGES)) + "\n")
    return {"towns": str(path)}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def answer(text: str) -> str:
    return f"<tool_response>\n{text}\n</tool_response>"


def one(pool: GraderPool, corpora: dict[str, str], *turns: str, **fields: Any) -> list[Any]:
    asked = settings(type="tools", tools=TOOLS, max_turns=9, **fields)
    return play(episode(asked, {}, pool=pool, corpora=corpora), *turns)


def test_calls_are_answered_in_order(pool, corpora):
    turn = call("calculator", expression="6 * 7") + " and " + call("python", code="print(2 ** 10)")
    (found,) = one(pool, corpora, turn)
    assert found.text == f"{answer('42')}\n{answer('1024' + chr(10))}"
    assert (found.calls, found.failed_calls) == (2, 0)


def test_a_turn_without_a_call_is_the_answer(pool, corpora):
    (found,) = one(pool, corpora, "The answer is 42.")
    assert (found.text, found.calls) == (None, 0)


def test_the_end_of_a_call_may_be_missing(pool, corpora):
    (found,) = one(pool, corpora, call("calculator", expression="1 + 1").removesuffix("</tool_call>"))
    assert found.text == answer("2")


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ("<tool_call>{nonsense}</tool_call>", "the call is not JSON"),
        ("<tool_call>[1]</tool_call>", 'a call is an object with "name" and "arguments"'),
        (call("rocket", expression="1"), "there is no tool 'rocket'; there are: calculator, python, search"),
        (call("calculator"), 'calculator needs "arguments" with a text "expression"'),
        (call("calculator", expression=7), 'calculator needs "arguments" with a text "expression"'),
        (call("python", code="1 / 0"), "ZeroDivisionError"),
        (call("python", code="while True: pass"), "2"),
        (call("calculator", expression="__import__('os')"), "the expression"),
    ],
)
def test_what_is_wrong_with_a_call_is_its_answer(pool, corpora, turn, reason):
    (found,) = one(pool, corpora, turn)
    assert found.text.startswith("<tool_response>\nerror: ")
    assert reason in found.text
    assert (found.calls, found.failed_calls) == (1, 1)


def test_a_tool_that_prints_without_end_is_cut(pool, corpora):
    (found,) = one(pool, corpora, call("python", code="print('x' * 10_000_000)"))
    assert len(found.text) <= OBSERVATION_CHARS + 200


def test_search_finds_by_words(pool, corpora):
    first, second = one(
        pool, corpora, call("search", query="Who is the mayor of ARVEL?"), call("search", query="zebra")
    )
    assert first.text.startswith("<tool_response>\nArvel: Arvel lies on the river Tam.")
    assert "bakers" not in first.text.split("\n\n")[0]
    assert second.text == answer("nothing was found")


def test_code_of_one_episode_is_not_seen_by_another(pool, corpora):
    asked = settings(type="tools", tools=TOOLS, max_turns=9)
    leave = call("python", code="import math; math.left = 'behind'")
    look = call("python", code="import math; print(getattr(math, 'left', 'nothing'))")
    play(episode(asked, {}, pool=pool, stream=(0, 0, 0, 1)), leave)
    (found,) = play(episode(asked, {}, pool=pool, stream=(0, 0, 0, 2)), look)
    assert found.text == answer("nothing\n")
