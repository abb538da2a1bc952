"""Calls of any function of a source: JSON in, JSON out, and what is none."""

import pytest

from workers.sandbox.replies import FailureKind


def one(pool, source, *arguments, function="f", **keywords):
    return pool.call(source, function, [arguments], 5.0, **keywords)[0]


@pytest.mark.parametrize(
    "value", [None, True, 3, 0.5, "ä\0€😀", [1, [2, {}]], {"a": {"b": None}}, "x" * 65_000]
)
def test_json_goes_there_and_back(pool, value):
    result = one(pool, "def f(x): return x\n", value)
    assert (result.value, result.error, result.kind) == (value, None, None)
    assert type(result.value) is type(value)


def test_calls_come_back_in_order_with_their_own_arguments(pool):
    results = pool.call("def f(x, y): return x - y\n", "f", [(n, 1) for n in range(20)], 5.0)
    assert [result.value for result in results] == list(range(-1, 19))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("float('nan')", "f returned nan (float), which is no JSON: ValueError"),
        ("[float('inf')]", "f returned [inf] (list), which is no JSON: ValueError"),
        ("{1, 2}", "f returned {1, 2} (set), which is no JSON: TypeError"),
        ("'\\ud800'", "f returned '\\ud800' (str), which is no JSON: UnicodeEncodeError"),
        ("'x' * 65_535", "f returned 65,537 bytes, more than 65,536"),
        ("'x' * 10_000_000", "f returned 10,000,002 bytes, more than 65,536"),
    ],
)
def test_what_is_no_json_or_too_long_is_a_typed_failure(pool, returned, message):
    result = one(pool, f"def f():\n    return {returned}\n")
    assert (result.value, result.kind, result.error) == (None, FailureKind.BAD_VALUE, message)


def test_a_list_within_itself_is_a_typed_failure_and_the_process_goes_on(pool):
    source = "def f(): x = []; x.append(x); return x\ndef g(): return 1\n"
    assert one(pool, source, owner="a").kind is FailureKind.BAD_VALUE
    assert one(pool, source, owner="a", function="g").value == 1


def test_functions_of_one_source_share_its_memory(pool):
    source = "seen = []\ndef put(x): seen.append(x)\ndef get(): return seen\n"
    one(pool, source, 1, function="put", owner="b")
    assert one(pool, source, function="get", owner="b").value == [1]
    assert one(pool, source, function="get", owner="c").value == []


def test_a_function_that_is_not_there_is_named(pool):
    result = one(pool, "x = 1\n")
    assert (result.kind, result.error) == (FailureKind.SOURCE, "the source defines no f")


def test_arguments_that_do_not_fit_are_an_exception(pool):
    result = one(pool, "def f(x): return x\n", 1, 2)
    assert result.kind is FailureKind.EXCEPTION
    assert "takes 1 positional argument but 2 were given" in result.error


FORGED = """
import json, os, struct
def f(x):
    data = x.encode()
    for fd in range(3, 20):
        try: os.write(fd, struct.pack('>I', len(data)) + data)
        except OSError: pass
    while True: pass
"""


@pytest.mark.parametrize(
    "reply", ['{"value": NaN}', '{"value": "\\ud800"}', '{"value": ' + "[" * 5000, "[]", "{}"]
)
def test_a_forged_reply_is_a_crash(pool, reply):
    result = one(pool, FORGED, reply)
    assert (result.value, result.kind) == (None, FailureKind.CRASHED)
