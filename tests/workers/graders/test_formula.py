from __future__ import annotations

import math

import pytest

from workers.graders.formula import FormulaError, evaluate, parse

SCORES = {"a": 0.5, "b": 2.0, "zero": 0.0, "big": 1e200}


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("a", 0.5),
        ("a + b * 3 - 1", 5.5),
        ("(a + b) / 2", 1.25),
        ("-a", -0.5),
        ("b ** 3", 8.0),
        ("b ^ 3 + 1", 9.0),
        ("-b ^ 2", -4.0),
        ("a > 0.4", 1.0),
        ("0 < a < 0.4", 0.0),
        ("a == 0.5 and b != 2", 0.0),
        ("not zero", 1.0),
        ("zero or b", 1.0),
        ("zero != 0 and a / zero > 1", 0.0),
        ("min(a, b, 0.25)", 0.25),
        ("max(a)", 0.5),
        ("abs(-b) + floor(2.7) + ceil(0.1)", 5.0),
        ("exp(0) + sqrt(4) + log(1)", 3.0),
        ("\n  a\n  + b  ", 2.5),
        ("1e3", 1000.0),
    ],
)
def test_values(formula: str, expected: float) -> None:
    found = evaluate(formula, SCORES)
    assert type(found) is float
    assert math.isclose(found, expected)


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        ("", "cannot be read"),
        ("a +", "cannot be read"),
        ("a = 1", "cannot be read"),
        ("a; b", "cannot be read"),
        ("c + a", "names 'c', which is none of its graders: a, b, big, zero"),
        ("min", "names 'min'"),
        ("a.real", "may not contain 'a.real'"),
        ("a.__class__.__base__", "may not contain"),
        ("__import__('os').system('true')", "may not contain"),
        ("eval(a)", "may not contain 'eval(a)'"),
        ("min(a, key=b)", "may not contain"),
        ("min(*a)", "may not contain"),
        ("(lambda: a)()", "may not contain"),
        ("[a for a in b]", "may not contain"),
        ("a if b else a", "may not contain"),
        ("'a' * 9", "may not contain"),
        ("a % 2", "may not contain"),
        ("a // 2", "may not contain"),
        ("1j", "may not contain '1j'"),
        ("True", "may not contain 'True'"),
        ("a is b", "may not contain"),
        ("(a := 1)", "may not contain"),
        ("abs(a, b)", "abs in the formula takes one argument, not 2"),
        ("max()", "max in the formula takes one argument or more, not 0"),
        ("9" * 500, "a number that is too large"),
        ("-" * 100 + "a", "nested more than 60 deep"),
        ("~" * 1900 + "a", "may not contain"),
        ("(" * 1000 + "a" + ")" * 1000, "cannot be read"),
    ],
)
def test_what_is_no_formula_is_refused_before_it_is_needed(formula: str, text: str) -> None:
    with pytest.raises(FormulaError, match=text.replace("(", r"\(").replace(")", r"\)").replace("*", r"\*")):
        parse(formula, SCORES.keys())


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        ("a / zero", "the formula divides by zero for a = 0.5, b = 2, zero = 0, big = 1e+200"),
        ("zero ** -1", "has no value"),
        ("(-b) ** 0.5", "has no value"),
        ("sqrt(-a)", "has no value"),
        ("log(zero)", "has no value"),
        ("exp(1000)", "or too large a one"),
        ("9 ** 9 ** 9 ** 9", "or too large a one"),
        ("big * big", "gives inf"),
        ("big * big - big * big", "gives nan"),
        ("floor(big * big)", "or too large a one"),
    ],
)
def test_scores_for_which_there_is_no_value_are_named(formula: str, text: str) -> None:
    with pytest.raises(FormulaError) as found:
        evaluate(formula, SCORES)
    assert text in str(found.value)
