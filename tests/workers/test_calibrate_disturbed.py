"""A measurement beside another program: that it is noticed, and that it changes little.

The disturbed thread and a program that never rests are bound to the same processor, so that each gets about
half of it; what else the machine does comes on top.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.workers import local
from workers.calibrate import derive, waiting
from workers.calibrate.bench import Bench
from workers.calibrate.derive import CALM, calmest, typical
from workers.calibrate.measure import Measurement
from workers.calibrate.waiting import Piece, waited
from workers.calibrate.work import SHORT, Case, Character, Work

QUICK = replace(
    SHORT, largest_batch={"cpu": 8, "gpu": 8}, repetitions=3, case_s=9.0, attempts=1, window_s=0.05
)
#: Long enough to lose the processor several times.
LONG = Case(Work(Character.UPDATE, 96), 1.0)
#: What a value may differ from one that was measured without company: caches are shared all the same.
TOLERANCE = 1.5

needs_counts = pytest.mark.skipif(waiting.counts() is None, reason="this system does not count waiting")

MS = 1_000_000


# ---------------------------------------------------------------- arithmetic


def test_only_threads_that_compute_are_waited_for() -> None:
    before = {"1": (100 * MS, 50 * MS)}
    after = {"1": (170 * MS, 80 * MS), "2": (1 * MS, 40 * MS)}
    assert waited(before, after, 0.1) == pytest.approx(0.03)


def test_threads_of_one_operation_hold_each_other_up() -> None:
    after = {"1": (30 * MS, 50 * MS), "2": (20 * MS, 20 * MS)}
    assert waited({}, after, 0.1) == pytest.approx(0.06)


def test_nothing_takes_less_than_its_busiest_thread_ran() -> None:
    after = {"1": (50 * MS, 50 * MS), "2": (30 * MS, 40 * MS)}
    assert waited({}, after, 0.1) == pytest.approx(0.05)
    assert waited({}, {"1": (0, 500 * MS)}, 0.1) == pytest.approx(0.1)


def test_where_nobody_counts_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(waiting, "TASKS", tmp_path)
    assert waiting.counts() is None
    assert waited(None, None, 1.0) is None
    unknown = Piece(2.0, None)
    assert (unknown.disturbed, unknown.undisturbed) == (0.0, 2.0)
    assert derive.disturbed([Piece(1.0, 0.5), unknown]) is None


def test_what_waited_least_is_taken_without_its_waiting() -> None:
    calm, waits, worse = Piece(2.0, 0.0), Piece(3.0, 0.6), Piece(3.0, 1.5)
    assert calmest([worse, calm, waits]) == [calm]
    assert calmest([worse, waits]) == [waits]
    assert calmest([worse, waits, worse]) == [waits, worse]
    assert typical([waits]) == pytest.approx(2.4)
    assert derive.disturbed([calm, waits]) == pytest.approx(0.12)


# ---------------------------------------------------------------- measurements


@contextmanager
def busy(processor: int) -> Iterator[None]:
    """A program that never rests, and this thread, on one processor."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {processor})
    code = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as program:
        try:
            assert program.stdout is not None
            program.stdout.readline()
            yield
        finally:
            program.kill()
            os.sched_setaffinity(0, before)


class Here:
    """A bench in this thread."""

    def __init__(self, made: Bench) -> None:
        self._bench = made

    def ask(self, method: str, *args: object) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(getattr(self._bench, method)(*args))
        return answer


def in_a_thread(work: Callable[[], None]) -> None:
    """Threads that torch makes for the work are bound as it is, and shall not stay with others' work."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def bench(folder: Path) -> Bench:
    made = Bench(local.device(), str(folder), largest_batch=8)
    made.load()
    return made


def processor() -> int:
    return min(os.sched_getaffinity(0))


@needs_counts
def test_a_busy_program_is_noticed_and_changes_little(tiny_folder: Path) -> None:
    def compare() -> None:
        made = bench(tiny_folder)
        (quiet,) = made.alone([LONG], QUICK, spare_s=0.0)
        with busy(processor()):
            (disturbed,) = made.alone([LONG], QUICK, spare_s=0.0)
        assert all(piece.disturbed > 0.2 for piece in disturbed)
        ratio = typical(calmest(disturbed)) / typical(calmest(quiet))
        assert 1 / TOLERANCE < ratio < TOLERANCE

    in_a_thread(compare)


@needs_counts
def test_a_measurement_says_how_disturbed_it_was(tiny_folder: Path) -> None:
    def compare() -> None:
        made = bench(tiny_folder)
        effort = replace(QUICK, samples=96)
        with busy(processor()):
            values = Measurement(local.device(), effort, Here(made), None, lambda text: None).run("a test")
        assert values.disturbed is not None
        assert values.disturbed > 0.1

    in_a_thread(compare)


class Scripted(Bench):
    """A bench whose pieces are told in advance."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = iter(pieces)
        super().__init__(local.device(), "", largest_batch=1)

    def _timed(self, case: Case) -> Piece:
        return next(self._pieces)


CALM_PIECE, LOUD_PIECE = Piece(1.0, CALM), Piece(1.0, 0.5)


@pytest.mark.parametrize(
    ("told", "spare_s", "counts"),
    [
        ([CALM_PIECE] * 3, 60.0, (3, 3)),
        ([CALM_PIECE, LOUD_PIECE, CALM_PIECE, CALM_PIECE], 60.0, (4, 3)),
        ([LOUD_PIECE] * 12, 60.0, (12, 0)),  # in vain, and no longer than the effort allows
        ([LOUD_PIECE] * 3, 0.0, (3, 0)),
    ],
)
def test_what_was_disturbed_is_measured_again(
    told: list[Piece], spare_s: float, counts: tuple[int, int]
) -> None:
    effort = replace(QUICK, attempts=4)
    (found,) = Scripted([LOUD_PIECE, *told]).alone([LONG], effort, spare_s)
    assert (len(found), sum(piece.disturbed <= CALM for piece in found)) == counts


class Windows:
    """A process of a pair: its work alone is told, and the pieces of each window."""

    def __init__(self, windows: Sequence[list[Piece]]) -> None:
        self._windows = iter(windows)
        self.computed = 0

    def ask(self, method: str, *args: object) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(self._answer(method))
        return answer

    def _answer(self, method: str) -> object:
        match method:
            case "repeat":
                self.computed += 1
                return next(self._windows)
            case "clock":
                return 0.0
        return None


def together(one: Windows, other: Windows) -> list[float]:
    effort = replace(QUICK, attempts=3)
    pair = Measurement(local.device(), effort, one, other, lambda text: None)
    case = Case(Work(Character.UPDATE, 2), 0.5)
    return pair._together([case, case], [1.0, 1.0])


def test_a_window_counts_when_neither_waited() -> None:
    """One that waited left its partner alone: that window tells nothing of company."""
    one = Windows([[Piece(1.0, 0.0)], [Piece(1.4, 0.0)]])
    other = Windows([[Piece(1.0, 0.6)], [Piece(1.5, 0.0)]])
    assert together(one, other) == [1.4, 1.5]
    assert one.computed == 2


def test_without_a_calm_window_the_calmest_counts() -> None:
    one = Windows([[Piece(3.0, 1.5)], [Piece(2.0, 0.5)], [Piece(4.0, 3.0)]])
    other = Windows([[Piece(3.0, 1.5)], [Piece(2.0, 0.2)], [Piece(4.0, 3.0)]])
    assert together(one, other) == pytest.approx([1.5, 1.8])
    assert one.computed == 3
