"""The arithmetic on hand-made numbers, and whole measurements of the tiny model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.workers import local
from workers.calibrate import derive
from workers.calibrate.bench import Bench
from workers.calibrate.measure import Measurement
from workers.calibrate.processes import CalibrationFailed, calibrate
from workers.calibrate.waiting import Piece
from workers.calibrate.work import FULL, SHORT, Case, Character, Work, batches, shares_measured, split
from workers.protocol import Calibration, DeviceRef

QUICK = replace(SHORT, largest_batch={"cpu": 8, "gpu": 8}, repetitions=1, window_s=0.05)


def device(threads: int = 1, kind: str = "cpu") -> DeviceRef:
    return local.device().model_copy(update={"threads": threads, "kind": kind})


# ---------------------------------------------------------------- arithmetic


def test_more_of_a_device_is_never_slower() -> None:
    assert derive.slowdowns([4.0, 3.0, 2.0]) == (2.0, 1.5, 1.0)
    assert derive.slowdowns([3.0, 3.2, 2.0]) == (1.6, 1.6, 1.0)
    assert derive.slowdowns([1.8, 1.9, 2.0]) == (1.0, 1.0, 1.0)


def test_company_never_helps() -> None:
    assert derive.beside(together=3.0, alone=2.0) == 1.5
    assert derive.beside(together=1.9, alone=2.0) == 1.0


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 2.0, 16: 4.0}, 4),  # doubles the rate up to 4, then nothing is gained
        ({1: 1.0, 2: 1.6, 4: 3.0, 8: 6.0}, 1),  # 2 / 1.6 is only a quarter more
        ({1: 1.0, 2: 1.4, 4: 2.8}, 2),  # 2 / 1.4 is more than a third
        ({1: 1.0, 2: 2.0, 4: 2.0, 8: 4.0}, 4),  # a step in the middle is not the end
        ({1: 1.0, 2: 1.0, 4: 1.0}, 4),  # never saturated: the largest that was measured
        ({1: 1.0}, 1),
    ],
)
def test_saturation(step_s: dict[int, float], expected: int) -> None:
    assert derive.saturation(step_s) == expected


def test_a_larger_batch_is_never_faster() -> None:
    assert derive.rising({4: 2.0, 1: 1.5, 2: 1.0}) == {1: 1.5, 2: 1.5, 4: 2.0}


def test_the_line_of_decode_steps() -> None:
    exact = {batch: 0.03 + 0.002 * batch for batch in (1, 8, 64)}
    assert derive.decode_line(exact) == pytest.approx((0.03, 0.002))
    assert derive.decode_line({1: 0.04, 2: 0.04, 4: 0.04}) == pytest.approx((0.04, 0.0))
    floor, row = derive.decode_line({1: 0.5, 2: 2.0, 4: 4.0})  # a line through these begins below 0
    assert floor == derive.LEAST_FLOOR_S
    assert row == pytest.approx(2 / 3)


def test_stand_ins_for_what_was_left_out() -> None:
    measured = {
        (Character.DECODE, Character.UPDATE): 1.1,
        (Character.UPDATE, Character.DECODE): 1.2,
        (Character.THIN, Character.UPDATE): 1.3,
    }
    found = derive.filled(measured)
    assert found[Character.TAIL, Character.LOGPROB] == 1.1
    assert found[Character.THIN, Character.PREFILL] == 1.3
    assert found[Character.LOGPROB, Character.THIN] == 1.2
    assert (Character.DECODE, Character.DECODE) not in found
    assert not [pair for pair in found if Character.SYNC in pair]
    rows = derive.alone({c: [2.0, 1.0] for c in SHORT.shared} | {Character.UPDATE: [3.0, 1.0]})
    assert rows.keys() == set(Character)
    assert rows[Character.PREFILL] == (3.0, 1.0)
    assert rows[Character.TAIL] == (2.0, 1.0)


@pytest.mark.parametrize(
    ("threads", "kind", "most", "shares", "halves"),
    [
        (1, "cpu", 8, (1.0,), None),
        (2, "cpu", 8, (0.5, 1.0), (0.5, 0.5)),
        (3, "cpu", 2, (1 / 3, 2 / 3, 1.0), (1 / 3, 2 / 3)),
        (64, "cpu", 2, (0.5, 1.0), (0.5, 0.5)),
        (64, "cpu", 4, (0.25, 0.5, 0.75, 1.0), (0.5, 0.5)),
        (1, "gpu", 8, (0.25, 0.5, 0.75, 1.0), (0.5, 0.5)),
    ],
)
def test_shares(
    threads: int, kind: str, most: int, shares: tuple[float, ...], halves: tuple[float, float] | None
) -> None:
    assert shares_measured(device(threads, kind), most) == pytest.approx(shares)
    assert split(device(threads, kind)) == halves


def test_efforts_measure_what_they_claim() -> None:
    assert batches(64) == (1, 2, 4, 8, 16, 32, 64)
    assert len(FULL.pairs) == 21
    for effort in (SHORT, FULL):
        pairs = dict.fromkeys([*effort.pairs, *[(b, a) for a, b in effort.pairs]], 1.5)
        assert len(derive.filled(pairs)) == 36, effort.name


# ---------------------------------------------------------------- measurements


class Local:
    """A bench in a thread of its own."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._bench = self._pool.submit(make)

    def ask(self, method: str, *args: object) -> Future[Any]:
        return self._pool.submit(lambda: getattr(self._bench.result(), method)(*args))


def bench(folder: Path, threads: int = 1) -> Bench:
    made = Bench(device(threads), str(folder), largest_batch=8)
    made.load()
    return made


def check(values: Calibration) -> None:
    """What the planner demands of a table."""
    assert values.shares[-1] == 1.0
    assert list(values.shares) == sorted(values.shares)
    assert values.alone.keys() == {character.value for character in Character}
    for row in values.alone.values():
        assert len(row) == len(values.shares)
        assert row[-1] == 1.0
        assert list(row) == sorted(row, reverse=True)
    assert all(factor >= 1 for factor in values.beside.values())
    assert Calibration.model_validate_json(values.model_dump_json()) == values


def test_one_thread_is_measured_whole(tiny_folder: Path) -> None:
    said: list[str] = []
    one = Local(lambda: Bench(device(), str(tiny_folder), largest_batch=8))
    values = Measurement(device(), QUICK, one, None, said.append).run("a test")
    check(values)
    assert values.shares == (1.0,)
    assert values.beside == {}
    assert values.saturation_batch in batches(8)
    assert values.parameters > 500_000
    assert values.source in {f"a test, {dtype}, short measurement" for dtype in ("float32", "bfloat16")}
    assert len(said) == 2


class Watched(Bench):
    """Remembers when it was at work for a pair, and over which window it measured."""

    def __init__(self, folder: Path) -> None:
        super().__init__(device(2), str(folder), largest_batch=8)
        self.seen: dict[tuple[float, float], tuple[float, float]] = {}

    def repeat(self, case: Case, begins: float, ends: float) -> list[Piece] | None:
        started = time.time()
        found = super().repeat(case, begins, ends)
        if found is not None:
            self.seen[begins, ends] = started, time.time()
        return found


def test_two_threads_are_measured_in_halves_and_side_by_side(tiny_folder: Path) -> None:
    """Both of a pair compute over the whole of the same window: nobody is measured without company."""
    one, other = Watched(tiny_folder), Watched(tiny_folder)
    values = Measurement(device(2), QUICK, Local(lambda: one), Local(lambda: other), lambda text: None).run(
        "a test"
    )
    check(values)
    assert values.shares == (0.5, 1.0)
    assert len(values.beside) == 36
    common = one.seen.keys() & other.seen.keys()
    assert len(common) >= len(QUICK.pairs)
    for begins, ends in common:
        for started, ended in (one.seen[begins, ends], other.seen[begins, ends]):
            assert started <= begins
            assert ended >= ends


def test_it_computes_the_same_everywhere(tiny_folder: Path) -> None:
    first, second = bench(tiny_folder), bench(tiny_folder)
    for made in (first, second):
        cases = [Case(Work(Character.UPDATE, 2), 1.0), Case(Work(Character.DECODE, 4), 1.0)]
        made.alone(cases, replace(QUICK, repetitions=2), spare_s=0.0)
    tokens = [[row.tokens for row in made._engine.export("calibration")] for made in (first, second)]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 4
    gradients = [made._trainer.gradients("calibration") for made in (first, second)]
    assert any(bool(tensor.any()) for tensor in gradients[0].values())
    assert all(bool((gradients[0][name] == gradients[1][name]).all()) for name in gradients[0])


def test_a_decode_keeps_its_batch(tiny_folder: Path) -> None:
    """However long it is measured, the batch neither shrinks nor ends."""
    made = bench(tiny_folder)
    for _ in range(120):
        made.warm(Case(Work(Character.DECODE, 4), 1.0))
        assert made._engine.counts("calibration") == (4, 0)


def test_tokens_of_a_piece(tiny_folder: Path) -> None:
    made = bench(tiny_folder)
    assert made.tokens(Work(Character.PREFILL, 2)) == 2 * 48
    assert made.tokens(Work(Character.UPDATE, 8)) == 2 * 48 + 8 * 32


def test_who_comes_too_late_for_a_window_says_so(tiny_folder: Path) -> None:
    made = bench(tiny_folder)
    now = time.time()
    assert made.repeat(Case(Work(Character.THIN, 2), 1.0), now - 2, now - 1) is None


def test_what_does_not_end_within_the_window_is_at_least_that_slow(tiny_folder: Path) -> None:
    made = bench(tiny_folder)
    begins = time.time() + 0.1
    pieces = made.repeat(Case(Work(Character.UPDATE, 8), 1.0), begins, begins + 1e-2)
    assert pieces is not None
    assert [piece.seconds for piece in pieces] == pytest.approx([1e-2], abs=1e-6)


def test_it_gives_up_when_its_time_is_over(tiny_folder: Path) -> None:
    one = Local(lambda: Bench(device(), str(tiny_folder), largest_batch=8))
    with pytest.raises(TimeoutError):
        Measurement(device(), replace(QUICK, limit_s=0.0), one, None, lambda text: None).run("a test")


# ---------------------------------------------------------------- on Ray


@pytest.fixture(scope="module")
def node() -> Iterator[str]:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="warning")
    yield ray.get_runtime_context().get_node_id()
    ray.shutdown()


def measured(where: DeviceRef, folder: Path) -> Calibration:
    return calibrate(
        where, type_name="test", model="tiny", model_path=str(folder), effort=QUICK, say=lambda text: None
    )


@pytest.mark.slow
def test_processes_of_its_own(node: str, tiny_folder: Path) -> None:
    where = device(2).model_copy(update={"ray_node_id": node})
    values = measured(where, tiny_folder)
    check(values)
    assert values.source.startswith("test with 2 threads, tiny, local/cpu0, ")
    assert not ray.util.list_named_actors()


@pytest.mark.slow
def test_why_it_failed(node: str, tmp_path: Path) -> None:
    where = device().model_copy(update={"ray_node_id": node})
    with pytest.raises(
        CalibrationFailed, match=r"local/cpu0: ValueError: model folder .* has no config.json"
    ):
        measured(where, tmp_path)


@pytest.mark.slow
def test_a_node_that_is_gone(node: str, tiny_folder: Path) -> None:
    with pytest.raises(CalibrationFailed, match="local/cpu0: "):
        measured(device(), tiny_folder)
