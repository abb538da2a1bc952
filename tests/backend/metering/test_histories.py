"""The promises of the ledger over generated histories of fused and co-run sub-stages, by the real services.

At each turn one of three tenants starts, crosses, leaves or ends something on one of two devices, or shares
change there, or a meter is read. Workers report late and by clocks of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fractions import Fraction

import pytest
from django.db import transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.jobs.models import Attempt, Job
from backend.metering.division import Occupant, peak_ppm, to_us
from backend.metering.models import UsageRecord
from backend.metering.selectors import accounting
from backend.metering.services import attempt_credit, device_meter
from backend.pool.allotments import Terms, device_allot
from backend.pool.models import Allotment, Device
from backend.pool.parts import WHOLE
from backend.pool.states import SubStageStatus
from backend.pool.substages import (
    substage_cross,
    substage_finish,
    substage_grant,
    substage_leave,
    substage_offer,
    substages_lose,
)
from tests.backend.metering.conftest import BEGIN, make_attempt, make_device
from workers.protocol import Crossed, Finished, Offer, SubStageKind


@dataclass(frozen=True)
class Turn:
    """``after`` and ``late`` in milliseconds: since the turn before, and from an end to its report."""

    what: str
    who: int
    device: int
    after: int
    late: int
    share: float
    rows: int
    fuses: bool


WHAT = ("start", "start", "share", "cross", "leave", "finish", "lose", "read")
turns = st.lists(
    st.builds(
        Turn,
        what=st.sampled_from(WHAT),
        who=st.integers(0, 2),
        device=st.integers(0, 1),
        after=st.integers(0, 3_000),
        late=st.integers(-500, 2_000),
        share=st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 1.0]),
        rows=st.integers(0, 9),
        fuses=st.booleans(),
    ),
    min_size=4,
    max_size=24,
)
examples = settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@dataclass
class Stage:
    """Plays turns. Whoever has something running is found by its place in ``attempts``."""

    attempts: list[Attempt]
    devices: list[Device]
    reads: bool = True
    now: datetime = BEGIN
    nodes: dict[int, tuple[str, int, datetime]] = field(default_factory=dict)
    number: int = 0

    def play(self, history: list[Turn]) -> None:
        for turn in history:
            self.now += timedelta(milliseconds=turn.after)
            getattr(self, turn.what)(turn)
        self.now += timedelta(seconds=5)
        for who, (_, device, _) in list(self.nodes.items()):
            self.finish(Turn("finish", who, device, 0, 7, 1.0, 1, False))
        for device in self.devices:
            device_meter(device_id=device.pk, until=self.now)
            assert accounting().difference_micro_usd == 0

    def start(self, turn: Turn) -> None:
        if turn.who in self.nodes:
            return
        attempt, node = self.attempts[turn.who], self.name()
        substage_offer(attempt=attempt, offer=offer(node, turn.rows), now=self.now)
        assert substage_grant(
            attempt_id=attempt.pk,
            node=node,
            device=self.devices[turn.device],
            share=turn.share,
            slot="rollout" if turn.fuses else f"train {turn.who}",
            speed=0.9,
            reason="it was its turn",
            action_id=node,
            now=self.now,
        )
        self.nodes[turn.who] = (node, turn.device, self.now)

    def share(self, turn: Turn) -> None:
        """All of the tenant's slot has another share; or, of nobody's, the device is divided anew."""
        device, terms = self.devices[turn.device], {}
        if turn.who in self.nodes:
            node, place, _ = self.nodes[turn.who]
            device = self.devices[place]
            pk = self.attempts[turn.who].substages.get(node=node).pk
            terms = {pk: Terms(turn.share, 0.5, "shares change")}
        device_allot(device_id=device.pk, terms=terms, now=self.now)

    def cross(self, turn: Turn) -> None:
        if turn.who not in self.nodes:
            return
        _, device, _ = self.nodes[turn.who]
        crossed = Crossed(finished=self.finished(turn), offer=offer(new := self.name(), turn.rows))
        assert substage_cross(attempt=self.attempts[turn.who], crossed=crossed, now=self.now)
        self.nodes[turn.who] = (new, device, self.now)

    def leave(self, turn: Turn) -> None:
        if turn.who in self.nodes:
            node, _, _ = self.nodes[turn.who]
            substage_leave(attempt_id=self.attempts[turn.who].pk, node=node, moves_to="", now=self.now)

    def finish(self, turn: Turn) -> None:
        if turn.who in self.nodes:
            finished = self.finished(turn)
            assert substage_finish(attempt=self.attempts[turn.who], finished=finished, now=self.now)
            del self.nodes[turn.who]

    def lose(self, turn: Turn) -> None:
        substages_lose(attempt=self.attempts[turn.who], now=self.now)
        self.nodes.pop(turn.who, None)

    def read(self, turn: Turn) -> None:
        if self.reads:
            device_meter(device_id=self.devices[turn.device].pk, until=self.now)
            assert accounting().difference_micro_usd == 0

    def finished(self, turn: Turn) -> Finished:
        node, _, since = self.nodes[turn.who]
        ended = self.now - timedelta(milliseconds=turn.late)
        begun = since + timedelta(milliseconds=turn.late)
        return Finished(node=node, started_at=begun.timestamp(), ended_at=ended.timestamp(), tokens=1)

    def name(self) -> str:
        self.number += 1
        return f"n{self.number}"


def offer(node: str, rows: int) -> Offer:
    return Offer(node=node, step=0, worker=0, kind=SubStageKind.TAIL, sequences=rows)


@pytest.fixture
def attempts(db, tmp_path) -> list[Attempt]:
    return [make_attempt(name, tmp_path) for name in ("ada", "bob", "cay")]


@pytest.fixture
def devices(db) -> list[Device]:
    # Prices at which no second is a whole number of micro-dollars.
    return [make_device("n/cpu0", price=1_234_567), make_device("n/cpu1", price=50_003)]


def bills(attempts: list[Attempt]) -> list[int]:
    return [Job.objects.get(pk=attempt.job_id).cost_micro_usd for attempt in attempts]


def exact(attempt: Attempt) -> Fraction:
    """Dollars an hour x part x hours over all that was allotted while it computed, in micro-dollars."""
    return sum(
        (
            Fraction(device.price_micro_usd_hour * part * us, 1_000_000 * 3_600_000_000)
            for device, part, us in billable(attempt)
        ),
        Fraction(0),
    )


def billable(attempt: Attempt) -> Iterator[tuple[Device, int, int]]:
    done = Allotment.objects.filter(substage__attempt=attempt, substage__status=SubStageStatus.DONE)
    for row in done.select_related("substage", "device"):
        start = max(to_us(row.start), to_us(row.substage.started_at))
        end = min(to_us(row.end), to_us(row.substage.ended_at))
        yield row.device, row.part_ppm, max(0, end - start)


def peak(device: Device) -> int:
    """The most that was had of the device at any instant, billed or not."""
    rows = Allotment.objects.filter(device=device, part_ppm__gt=0)
    return peak_ppm(Occupant(row.pk, to_us(row.start), to_us(row.end), row.part_ppm, 0) for row in rows)


@examples
@given(history=turns)
def test_the_books_add_up_nobody_pays_for_more_than_its_part_and_lost_work_is_given_back(
    attempts, devices, caplog, history
):
    with transaction.atomic():
        Stage(attempts, devices).play(history)
        assert bills(attempts) == [math.floor(exact(attempt)) for attempt in attempts]
        assert all(peak(device) <= WHOLE for device in devices)
        assert caplog.text == ""
        attempt_credit(attempt=attempts[0], since_step=0)
        job = Job.objects.get(pk=attempts[0].job_id)
        assert [job.cost_micro_usd, job.cost_fraction] == [0, 0]
        assert accounting().difference_micro_usd == 0
        transaction.set_rollback(True)


@examples
@given(history=turns)
def test_bills_are_the_same_however_the_meters_are_read(attempts, devices, history):
    found = []
    for reads in (True, False):
        with transaction.atomic():
            Stage(attempts, devices, reads=reads).play(history)
            found.append(bills(attempts))
            transaction.set_rollback(True)
    assert found[0] == found[1]


@examples
@given(history=turns)
def test_a_bill_for_the_same_share_and_time_is_the_same_with_and_without_neighbours(
    attempts, devices, history
):
    # Ada computes alone on at most half a device; the others fuse on the other half, or are not there.
    tame = [
        Turn(t.what, t.who, t.device, t.after, t.late, min(t.share, 0.5), t.rows, fuses=t.who > 0)
        for t in history
    ]
    alone = [t if t.who == 0 else Turn("read", 0, t.device, t.after, 0, 0.5, 1, False) for t in tame]
    found = []
    for played in (tame, alone):
        with transaction.atomic():
            Stage(attempts, devices).play(played)
            found.append(bills(attempts)[0])
            transaction.set_rollback(True)
    assert found[0] == found[1]


def test_a_sub_stage_whose_shares_change_often_has_one_row_a_reading(attempts, devices):
    stage = Stage(attempts, devices)
    stage.start(Turn("start", 0, 0, 0, 0, 1.0, 4, False))
    for number in range(12):
        stage.now += timedelta(seconds=1)
        stage.share(Turn("share", 0, 0, 0, 0, (0.5, 0.25, 0.25)[number % 3], 4, False))
    stage.now += timedelta(seconds=1)
    stage.finish(Turn("finish", 0, 0, 0, 0, 1.0, 4, False))
    device_meter(device_id=devices[0].pk, until=stage.now)
    # 1 s whole, then 4 of each: 0.5, 0.25, 0.25.
    usage, idle = UsageRecord.objects.get(entry="usage"), UsageRecord.objects.get(entry="idle")
    assert (usage.device_microseconds, idle.device_microseconds) == (5_000_000, 8_000_000)
    assert usage.micro_usd == 1_234_567 * 5 // 3600


def test_one_batch_shares_one_bill_by_rows_and_each_pays_less_than_alone(attempts, devices):
    stage = Stage(attempts, devices)
    for who, rows in enumerate((4, 4, 2)):
        stage.start(Turn("start", who, 0, 0, 0, 1.0, rows, True))
    stage.now += timedelta(seconds=36)
    for who in range(3):
        stage.finish(Turn("finish", who, 0, 0, 0, 1.0, 1, True))
    device_meter(device_id=devices[0].pk, until=stage.now)
    # 36 s are a hundredth of an hour: 12,345.67 in all.
    assert bills(attempts) == [4938, 4938, 2469]
