"""Tools that the model calls: ``workers.spec.Tools``.

    <tool_call>{"name": "search", "arguments": {"query": "..."}}</tool_call>
    <tool_response>...</tool_response>

What is wrong with a call is its answer: a model learns the format from what it is told.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass

from workers.envs.environment import Beginning, Observation, bounded
from workers.envs.helpers import Helpers
from workers.graders.formula import FormulaError, evaluate
from workers.spec import Calculator, PythonTool, Search
from workers.spec import Tools as Settings

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
#: Calls of one turn that are answered.
CALLS_PER_TURN = 8
#: By the tool's type: the argument it takes, and what it does.
ARGUMENTS = {"calculator": "expression", "python": "code", "search": "query"}
WORDS = {
    "calculator": "computes an arithmetic expression",
    "python": "runs Python code and answers what it prints",
    "search": "finds passages of text",
}
#: What the code prints is the answer; an exception is printed as Python does.
PYTHON_SOURCE = """
def run(code):
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
"""


class ToolProblem(Exception):
    """What is answered to a call that failed."""


@dataclass(frozen=True)
class Call:
    name: str
    argument: str


def instructions(settings: Settings) -> str:
    """What the model is told of its tools."""
    lines = [
        f'- {tool.type}: {WORDS[tool.type]}; arguments {{"{ARGUMENTS[tool.type]}": text}}'
        for tool in settings.tools
    ]
    example = json.dumps(
        {"name": settings.tools[0].type, "arguments": {ARGUMENTS[settings.tools[0].type]: "..."}}
    )
    return (
        "You can call tools:\n" + "\n".join(lines) + "\nTo call one, write\n"
        f"<tool_call>{example}</tool_call>\nand end your turn. A turn without a call is your final answer."
    )


class ToolUse:
    def __init__(self, settings: Settings, beginning: Beginning) -> None:
        self._tools = {tool.type: tool for tool in settings.tools}
        self._timeout_s = settings.tool_timeout_s
        self._beginning = beginning
        self._runs = 0

    async def step(self, turn: str) -> Observation:
        """The answers to the turn's calls, one after the other; over when there is none."""
        texts = CALL.findall(turn)
        if not texts:
            return Observation(None)
        answers = [await self._answer(text) for text in texts[:CALLS_PER_TURN]]
        said = "\n".join(f"<tool_response>\n{answer}\n</tool_response>" for _, answer in answers)
        failed = sum(not worked for worked, _ in answers)
        return Observation(said, calls=len(answers), failed_calls=failed)

    async def _answer(self, text: str) -> tuple[bool, str]:
        """Whether the call worked, and its answer."""
        try:
            call = read_call(text, set(self._tools))
            async with asyncio.timeout(self._timeout_s):
                return True, bounded(await self._use(call))
        except TimeoutError:
            return False, f"error: the tool took more than {self._timeout_s:g} s"
        except ToolProblem as problem:
            return False, bounded(f"error: {problem}")

    async def _use(self, call: Call) -> str:
        tool, helpers = self._tools[call.name], self._beginning.helpers
        match tool:
            case Calculator():
                return calculated(call.argument)
            case PythonTool():
                self._runs += 1
                name = f"{self._beginning.name}-{self._runs}"
                return await _run(helpers, call.argument, tool.timeout_s, name)
            case Search():
                return await _search(helpers, tool, call.argument)


def read_call(text: str, known: set[str]) -> Call:
    """The call that the model wrote; raises ``ToolProblem``."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        raise ToolProblem("the call is not JSON") from None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ToolProblem('a call is an object with "name" and "arguments"')
    name, arguments = call["name"], call.get("arguments")
    if name not in known:
        raise ToolProblem(f"there is no tool {name[:50]!r}; there are: {', '.join(sorted(known))}")
    wanted = ARGUMENTS[name]
    argument = arguments.get(wanted) if isinstance(arguments, dict) else None
    if not isinstance(argument, str) or not argument.strip():
        raise ToolProblem(f'{name} needs "arguments" with a text "{wanted}"')
    return Call(name, argument)


def calculated(expression: str) -> str:
    try:
        value = evaluate(expression, {})
    except FormulaError as error:
        raise ToolProblem(str(error).replace("the formula", "the expression")) from None
    return f"{value:.12g}"


async def _run(helpers: Helpers, code: str, timeout_s: float, name: str) -> str:
    """Each run has a process of its own: what it finds must not depend on which one is warm."""
    result = await helpers.run(PYTHON_SOURCE, "run", [code], timeout_s, apart=f"python-{name}")
    if result.error is not None:
        raise ToolProblem("\n".join(filter(None, (result.output, result.error))))
    return result.output or "(nothing was printed)"


async def _search(helpers: Helpers, tool: Search, query: str) -> str:
    found = await helpers.search(tool.corpus, query, tool.passages)
    if not found:
        return "nothing was found"
    return "\n\n".join(f"{title}: {text}" if title else text for title, text in found)
