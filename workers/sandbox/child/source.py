"""A tenant's source: compile it, run its top level, call its functions; all that goes wrong is a reply."""

from __future__ import annotations

import ast
import contextlib
import json
import linecache
import math
import numbers
import sys
import types
from collections.abc import Sequence

GRADE = "grade"  # the function whose value is a score, a finite number
FILENAME = "<source>"
VALUE_BYTES = 64 << 10
ERROR_CHARS = 2_000


def check(source: str, wanted: Sequence[str]) -> dict:
    try:
        tree = ast.parse(source, FILENAME)
        compile(source, FILENAME, "exec", dont_inherit=True)
    except SyntaxError as error:
        return {"error": f"line {error.lineno or 1}: {error.msg}"}
    except (ValueError, RecursionError, MemoryError) as error:
        return {"error": f"line 1: the source cannot be compiled: {type(error).__name__}: {error}"}
    problems = (check_signature(tree, signature) for signature in wanted)
    return next((problem for problem in problems if problem), {})


def check_signature(tree: ast.Module, signature: str) -> dict:
    """Whether the source defines ``f(x, y)``, a function, or ``C.f(x)``, a method, at its top level."""
    path, _, names = signature.rstrip(")").partition("(")
    owner, _, name = path.rpartition(".")
    body, inherits = tree.body, False
    if owner:
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner]
        if not classes:
            return {"error": f"line 1: the source must define a class {owner}"}
        body, inherits = classes[-1].body, bool(classes[-1].bases)
    functions = [
        node
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    if functions:
        return check_parameters(functions[-1], path, names.split(", "), bound=bool(owner))
    if inherits:
        return {}
    what = f"class {owner} must define a method" if owner else "source must define a function"
    return {"error": f"line 1: the {what} {name}({names})"}


def check_parameters(
    function: ast.FunctionDef | ast.AsyncFunctionDef, path: str, names: list[str], bound: bool
) -> dict:
    if isinstance(function, ast.AsyncFunctionDef):
        return {"error": f"line {function.lineno}: {path} must be a plain function, not async"}
    args = function.args
    count = len(names) + bound
    positional = len(args.posonlyargs) + len(args.args)
    required = positional - len(args.defaults)
    needs_keyword = any(default is None for default in args.kw_defaults)
    if required > count or (positional < count and args.vararg is None) or needs_keyword:
        number = {1: "one argument", 2: "two arguments"}.get(len(names), f"{len(names)} arguments")
        return {"error": f"line {function.lineno}: {path} must take {number}, {' and '.join(names)}"}
    return {}


def load(source: str, wanted: Sequence[str]) -> tuple[types.ModuleType | None, dict]:
    """Run the source's top level in a module of its own; the module, and the reply."""
    problem = check(source, wanted)
    if problem:
        return None, problem
    module = types.ModuleType("source")
    sys.modules["source"] = module  # dataclasses and pickle look a class's module up by name
    linecache.cache[FILENAME] = (len(source), None, source.splitlines(keepends=True), FILENAME)
    try:
        exec(compile(source, FILENAME, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 its purpose
    except BaseException as error:
        return None, {"error": describe(error)}
    return module, {}


def call(module: types.ModuleType, name: str, arguments: Sequence[object]) -> dict:
    function = module.__dict__.get(name)
    if function is None:
        return {"error": f"the source defines no {name}", "kind": "source"}
    try:
        value = function(*arguments)
    except MemoryError as error:
        return {"error": describe(error), "kind": "memory"}
    except BaseException as error:
        return {"error": describe(error), "kind": "exception"}
    return as_score(value) if name == GRADE else as_json(name, value)


def as_json(name: str, value: object) -> dict:
    """The value as the parent will read it, or what is wrong with it."""
    try:
        data = json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except BaseException as error:
        problem = f"{name} returned {shown(value)}, which is no JSON: {type(error).__name__}"
        return {"error": problem, "kind": "bad_value"}
    if len(data) > VALUE_BYTES:
        problem = f"{name} returned {len(data):,} bytes, more than {VALUE_BYTES:,}"
        return {"error": problem, "kind": "bad_value"}
    return {"value": json.loads(data)}


def as_score(score: object) -> dict:
    """A finite real number, or what is wrong with it; True and False count as 1 and 0."""
    if not isinstance(score, numbers.Real):
        return {"error": f"grade returned {shown(score)}, not a number", "kind": "bad_score"}
    try:
        value = float(score)
    except BaseException as error:
        return {
            "error": f"grade returned a number that is no float: {type(error).__name__}",
            "kind": "bad_score",
        }
    if not math.isfinite(value):
        return {"error": f"grade returned {value}, not a finite number", "kind": "bad_score"}
    return {"value": value}


def shown(value: object) -> str:
    try:
        text = repr(value)
    except BaseException:
        text = "a value without a repr"
    return f"{text[:100]} ({type(value).__name__})" if value is not None else "None"


def describe(error: BaseException) -> str:
    """``line 3, in grade: ZeroDivisionError: division by zero``; the tenant's deepest line."""
    line, name = None, ""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == FILENAME:
            line, name = trace.tb_lineno, trace.tb_frame.f_code.co_name
        trace = trace.tb_next
    try:
        text = str(error)
    except BaseException:
        text = ""
    where = f"line {line}, in {name}: " if line is not None else ""
    return f"{where}{type(error).__name__}{': ' if text else ''}{text}"[:ERROR_CHARS]


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):  # a tenant may have closed or replaced it; the value stands
            stream.flush()
