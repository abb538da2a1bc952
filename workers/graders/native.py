"""Graders of our own, on rendered texts: string check, text similarity, mathematics."""

from __future__ import annotations

from typing import Literal

from rapidfuzz import fuzz


def string_check(text: str, reference: str, operation: Literal["eq", "ne", "like", "ilike"]) -> float:
    """OpenAI's operations: equal, not equal, contains, contains regardless of case; 1.0 or 0.0."""
    if operation == "eq":
        return float(text == reference)
    if operation == "ne":
        return float(text != reference)
    if operation == "like":
        return float(reference in text)
    return float(reference.casefold() in text.casefold())


def fuzzy_match(text: str, reference: str) -> float:
    """1 - (insertions + deletions) / (both lengths), in [0, 1]: rapidfuzz's ``ratio``, scaled."""
    return fuzz.ratio(text, reference) / 100


# math-verify calls sympy, which an adversarial answer can keep busy for ever, and its own time limit is a
# signal that works in a main thread only. So it runs where Python graders run, under the pool's wall clock.
# A reference is an answer and nothing else: without marks of its own it is read as one piece of LaTeX.
MATH_SOURCE = r"""
import logging
from math_verify import parse, verify

logging.disable(logging.CRITICAL)  # it warns at each call that its own limit is off


def grade(sample, item):
    reference = item["reference"]
    marked = any(mark in reference for mark in ("$", "\\boxed", "\\(", "\\["))
    expected = parse(reference if marked else f"${reference}$", parsing_timeout=None)
    if not expected:
        raise ValueError(f"the reference {reference[:100]!r} holds no mathematical answer")
    answer = parse(sample["output_text"], parsing_timeout=None)
    return verify(expected, answer, timeout_seconds=None)
"""
MATH_TIMEOUT_S = 5.0
MATH_LOAD_TIMEOUT_S = 60.0
