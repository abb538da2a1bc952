"""What a source must be before it runs."""

import pytest

from workers.sandbox.pool import ENVIRONMENT, check_source


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def grade(sample, item):\n    return 1\nx = = 2\n", "line 3: invalid syntax"),
        ("def grade(sample, item)\n    return 1\n", "line 1: expected ':'"),
        ("x = 1\n", "line 1: the source must define a function grade(sample, item)"),
        ("\n\ndef grade(sample): return 1\n", "line 3: grade must take two arguments, sample and item"),
        ("def grade(a, b, c): return 1\n", "line 1: grade must take two arguments, sample and item"),
        ("def grade(a, b, *, c): return 1\n", "line 1: grade must take two arguments, sample and item"),
        ("async def grade(a, b): return 1\n", "line 1: grade must be a plain function, not async"),
        ("x = '\0'\n", "line 1: source code string cannot contain null bytes"),
        ("x = " + "(" * 300 + "\n", "line 1: too many nested parentheses"),
    ],
)
def test_check_source_names_the_line(source, message):
    with pytest.raises(ValueError) as refused:
        check_source(source)
    assert str(refused.value) == message


@pytest.mark.parametrize("source", ["x = '\ud800'\n", "-" * 100_000 + "1", "x" + ".a" * 100_000])
def test_check_source_survives_what_breaks_a_compiler(source):
    with pytest.raises(ValueError, match="line 1: the source"):
        check_source(source)


def test_check_source_runs_nothing(tmp_path):
    check_source(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef grade(sample, item, extra=None): return 1\n")
    check_source("def grade(*args): return 1\n")
    assert list(tmp_path.iterdir()) == []


ENV = "class Environment:\n    def __init__(self, item, seed): pass\n    def step(self, turn): pass\n"

NO_INIT = "line 1: the class Environment must define a method __init__(item, seed)"
NOT_ASYNC = "line 3: Environment.step must be a plain function, not async"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n", "line 1: the source must define a class Environment"),
        ("class Environment: pass\n", NO_INIT),
        (ENV.replace("step", "stop"), "line 1: the class Environment must define a method step(turn)"),
        (ENV.replace("turn", "turn, x"), "line 3: Environment.step must take one argument, turn"),
        (ENV.replace("def step", "async def step"), NOT_ASYNC),
    ],
)  # fmt: skip
def test_an_environment_that_does_not_fit_is_named_by_its_line(source, message):
    with pytest.raises(ValueError) as refused:
        check_source(source, ENVIRONMENT)
    assert str(refused.value) == message


def test_an_environment_that_fits_is_not_refused():
    check_source(ENV, ENVIRONMENT)
    check_source("import abc\nclass Environment(abc.ABC): pass\n", ENVIRONMENT)
