"""A calibration: what is measured in which order, on one device, by one or two processes.

    one     ── load ── decode steps by batch ── each character at each share ──┐
    other   ── load ───────────────────────────────────────────────────────────┴─ pairs, at the same time

A pair is measured while both compute: each is warmed up, then both repeat their piece between the same two
instants, each on its half of the device, and only what ended by then counts.

What had to wait for processors, because other programs used them, is measured again for a while. Values come
from the repetitions that waited least, without the time that those waited.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

from workers.calibrate import derive
from workers.calibrate.waiting import Piece
from workers.calibrate.work import (
    PREFILL_PROMPTS,
    TAIL_BATCH,
    THIN_BATCH,
    Case,
    Character,
    Effort,
    Work,
    batches,
    shares_measured,
    split,
    units,
)
from workers.protocol import Calibration, DeviceRef, Rates

#: Parts of the time limit at which nothing of that is measured again, so that something is left for the rest.
STEPS_UNTIL, ALONE_UNTIL, PAIRS_UNTIL = 1 / 8, 1 / 4, 3 / 8
#: So long before a window both processes get their orders; a busy machine takes longer to hand them over.
LEADS_S = (0.1, 0.5, 2.5)
#: So many pieces of the longer work, as it is alone, a window holds: slowed down by less, one at least fits.
PIECES = 2.5


class Process(Protocol):
    """A ``workers.calibrate.bench.Bench`` somewhere."""

    def ask(self, method: str, *args: object) -> Future[Any]: ...


@dataclass
class Measurement:
    """Raises ``TimeoutError`` when all of it takes longer than the effort allows."""

    device: DeviceRef
    effort: Effort
    one: Process
    other: Process | None
    say: Callable[[str], None]
    _deadline: float = field(init=False)
    _used: list[Piece] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.effort.limit_s

    def run(self, source: str) -> Calibration:
        """``source`` says where and when; what was measured is added to it."""
        parameters, dtype = self._all(*(p.ask("load") for p in (self.one, self.other) if p is not None))[0]
        steps = self._decode_steps()
        saturation = derive.saturation(steps)
        self.say(f"decode saturates at a batch of {saturation}")
        works = self._works(saturation)
        shares = shares_measured(self.device, self.effort.most_shares)
        alone = self._alone(works, shares)
        whole = {name: row[1.0] for name, row in alone.items()}
        self.say("alone: " + ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in whole.items()))
        shared = {
            name: [row[share] for share in shares] for name, row in alone.items() if len(row) == len(shares)
        }
        beside = self._beside(works, alone)
        return Calibration(
            shares=shares,
            alone={name.value: row for name, row in derive.alone(shared).items()},
            beside={"|".join(pair): factor for pair, factor in beside.items()},
            saturation_batch=saturation,
            rates=self._rates(works, whole, steps),
            parameters=parameters,
            disturbed=derive.disturbed(self._used),
            source=f"{source}, {dtype}, {self.effort.name} measurement",
        )

    # ------------------------------------------------------------ what is measured

    def _decode_steps(self) -> dict[int, float]:
        """Seconds of a step of the whole device by batch."""
        sizes = batches(self.effort.largest_batch[self.device.kind])
        cases = [Case(Work(Character.DECODE, size), share=1.0) for size in sizes]
        return derive.rising(dict(zip(sizes, self._seconds(cases, STEPS_UNTIL), strict=True)))

    def _works(self, saturation: int) -> dict[Character, Work]:
        sizes = {
            Character.PREFILL: PREFILL_PROMPTS,
            Character.DECODE: saturation,
            Character.TAIL: TAIL_BATCH,
            Character.THIN: THIN_BATCH,
            Character.LOGPROB: self.effort.samples,
            Character.UPDATE: self.effort.samples,
            Character.SYNC: 1,
        }
        return {name: Work(name, size) for name, size in sizes.items()}

    def _alone(
        self, works: Mapping[Character, Work], shares: Sequence[float]
    ) -> dict[Character, dict[float, float]]:
        """Seconds of each character by its shares."""
        cases = [
            Case(work, share)
            for name, work in works.items()
            for share in shares
            if share == 1 or name in self.effort.shared
        ]
        found: dict[Character, dict[float, float]] = {name: {} for name in works}
        for case, seconds in zip(cases, self._seconds(cases, ALONE_UNTIL), strict=True):
            found[case.work.character][case.share] = seconds
        return found

    def _rates(
        self, works: Mapping[Character, Work], whole: Mapping[Character, float], steps: dict[int, float]
    ) -> Rates:
        def a_token(name: Character) -> float:
            return whole[name] / self._all(self.one.ask("tokens", works[name]))[0]

        floor, row = derive.decode_line(steps)
        return Rates(
            prefill_s=a_token(Character.PREFILL),
            decode_floor_s=floor,
            decode_row_s=row,
            logprob_s=a_token(Character.LOGPROB),
            update_s=a_token(Character.UPDATE),
            sync_s=whole[Character.SYNC],
        )

    def _beside(
        self, works: Mapping[Character, Work], alone: Mapping[Character, dict[float, float]]
    ) -> dict[derive.Pair, float]:
        halves = split(self.device)
        if self.other is None or halves is None:
            return {}
        found: dict[derive.Pair, float] = {}
        for a, b in self.effort.pairs:
            cases = Case(works[a], halves[0]), Case(works[b], halves[1])
            apart = [alone[case.work.character][case.share] for case in cases]
            together = self._together(cases, apart)
            found[a, b] = derive.beside(together[0], apart[0])
            found[b, a] = max(derive.beside(together[1], apart[1]), found[a, b] if a == b else 1.0)
            self.say(f"{a} beside {b}: {found[a, b]:.2f}; {b} beside {a}: {found[b, a]:.2f}")
        return derive.filled(found)

    def _together(self, cases: Sequence[Case], apart: Sequence[float]) -> list[float]:
        """Seconds of each while the other computes, from the window in which neither waited much.

        Pieces of different windows do not mix: one that ran well while its partner waited had no company.
        """
        assert self.other is not None
        both = list(zip((self.one, self.other), cases, strict=True))
        self._all(*(process.ask("warm", case) for process, case in both))
        longest = max(seconds * units(case.work) for seconds, case in zip(apart, cases, strict=True))
        window = max(self.effort.window_s, PIECES * longest)
        calmest = self._window(both, window)
        for _ in range(self.effort.attempts - 1):
            if _waited(calmest) <= derive.CALM or self._spare_s(PAIRS_UNTIL) == 0:
                break
            calmest = min(calmest, self._window(both, window), key=_waited)
        self._used += chain.from_iterable(calmest)
        return [derive.typical(pieces) for pieces in calmest]

    def _window(self, both: Sequence[tuple[Process, Case]], window: float) -> list[list[Piece]]:
        for lead in LEADS_S:
            begins = self._all(self.one.ask("clock"))[0] + lead
            seen = self._all(
                *(process.ask("repeat", case, begins, begins + window) for process, case in both)
            )
            if None not in seen:
                return seen
        raise TimeoutError

    def _seconds(self, cases: Sequence[Case], until: float) -> list[float]:
        """Of each case with nobody else on the device."""
        (found,) = self._all(self.one.ask("alone", cases, self.effort, self._spare_s(until)))
        calmest = [derive.calmest(row) for row in found]
        self._used += chain.from_iterable(calmest)
        return [derive.typical(pieces) for pieces in calmest]

    def _spare_s(self, until: float) -> float:
        """Seconds to that part of the time limit."""
        return max(0.0, self._deadline - time.monotonic() - (1 - until) * self.effort.limit_s)

    def _all(self, *answers: Future[Any]) -> list[Any]:
        return [answer.result(timeout=max(0.0, self._deadline - time.monotonic())) for answer in answers]


def _waited(window: Sequence[Sequence[Piece]]) -> float:
    """Share of the window that the process of the two waited which waited more; 0 where it is not known."""
    return max(derive.disturbed(pieces) or 0.0 for pieces in window)
