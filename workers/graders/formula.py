"""Formulas over scores: ``min(format, 1) * accuracy - 0.1 * (length > 500)``.

A formula is parsed by Python's grammar, and walked; it is never run as code. It knows numbers, names,
``+ - * / **`` (``^`` is ``**``), comparisons, ``and or not``, brackets, and FUNCTIONS. True is 1, false is 0.
All values are floats, so no formula can take long.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping

from workers.graders.grades import as_float

#: Deeper ones are refused: walking them would exhaust the stack.
MAX_DEPTH = 60
BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,  # unlike **, never complex
}
UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: lambda value: float(not value),
}
COMPARE: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
#: Each with the most arguments it takes; all take one or more.
FUNCTIONS: dict[str, tuple[Callable[..., float], float]] = {
    "min": (lambda *values: min(values), math.inf),
    "max": (lambda *values: max(values), math.inf),
    "abs": (abs, 1),
    "floor": (math.floor, 1),
    "ceil": (math.ceil, 1),
    "exp": (math.exp, 1),
    "sqrt": (math.sqrt, 1),
    "log": (math.log, 1),
}


class FormulaError(ValueError):
    """A formula that cannot be read, or has no value; says where and why."""


def parse(formula: str, names: Collection[str]) -> ast.expr:
    """The formula as a tree of what it may contain. Raises FormulaError."""
    text = " ".join(formula.replace("^", "**").split())
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else "it is nested too deeply"
        raise FormulaError(f"the formula cannot be read: {reason}") from None
    check(tree, text, names, 0)
    return tree


def check(node: ast.expr, text: str, names: Collection[str], depth: int) -> None:
    """Refuse what ``value`` does not know. Raises FormulaError."""
    if depth > MAX_DEPTH:
        raise FormulaError(f"the formula is nested more than {MAX_DEPTH} deep")
    match node:
        case ast.Constant(value=number) if isinstance(number, int | float) and not isinstance(number, bool):
            if math.isinf(as_float(number)):
                raise FormulaError("the formula holds a number that is too large")
        case ast.Name(id=name):
            if name not in names:
                known = ", ".join(sorted(names))
                raise FormulaError(f"the formula names {name!r}, which is none of its graders: {known}")
        case ast.BinOp(op=op) if type(op) in BINARY:
            pass
        case ast.UnaryOp(op=op) if type(op) in UNARY:
            pass
        case ast.BoolOp():
            pass
        case ast.Compare(ops=ops) if all(type(op) in COMPARE for op in ops):
            pass
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            if not 1 <= len(arguments) <= FUNCTIONS[name][1]:
                takes = "one argument" if FUNCTIONS[name][1] == 1 else "one argument or more"
                raise FormulaError(f"{name} in the formula takes {takes}, not {len(arguments)}")
        case _:
            part = ast.get_source_segment(text, node) or text
            raise FormulaError(f"the formula may not contain {part[:60]!r}")
    for child in parts(node):
        check(child, text, names, depth + 1)


def parts(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.Call):
        return node.args
    return [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]


def evaluate(formula: str, scores: Mapping[str, float]) -> float:
    """The formula's value, a finite number. Raises FormulaError."""
    tree = parse(formula, scores.keys())
    try:
        found = value(tree, scores)
    except ZeroDivisionError:
        raise FormulaError(f"the formula divides by zero for {shown(scores)}") from None
    except (ValueError, OverflowError):
        raise FormulaError(f"the formula has no value, or too large a one, for {shown(scores)}") from None
    if not math.isfinite(found):
        raise FormulaError(f"the formula gives {found} for {shown(scores)}")
    return found


def value(node: ast.expr, scores: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=number):
            return float(number)  # type: ignore[arg-type]  # checked
        case ast.Name(id=name):
            return scores[name]
        case ast.BinOp(left=left, op=op, right=right):
            return BINARY[type(op)](value(left, scores), value(right, scores))
        case ast.UnaryOp(op=op, operand=operand):
            return UNARY[type(op)](value(operand, scores))
        case ast.BoolOp(op=ast.And(), values=values):
            return float(all(value(each, scores) for each in values))
        case ast.BoolOp(values=values):
            return float(any(value(each, scores) for each in values))
        case ast.Compare(left=left, ops=ops, comparators=others):
            numbers = [value(each, scores) for each in (left, *others)]
            pairs = zip(ops, numbers, numbers[1:], strict=False)
            return float(all(COMPARE[type(op)](one, other) for op, one, other in pairs))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return float(FUNCTIONS[name][0](*(value(each, scores) for each in arguments)))
    raise AssertionError(node)


def shown(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{name} = {score:g}" for name, score in scores.items())
