"""What sub-stages have of a device over time, in seconds and thousandths of it."""

from __future__ import annotations

import pytest
from django.db.models import Max

from backend.pool.allotments import Terms, device_allot
from backend.pool.models import Allotment, Device
from backend.pool.services import placements_close, placements_open
from backend.pool.substages import substages_lose
from backend.tenants.models import Organization
from tests.backend.metering.conftest import at
from tests.backend.pool.conftest import crosses, had, leaves, over, start


def allot(device: Device, now: float, terms: dict[int, Terms] | None = None) -> None:
    device_allot(device_id=device.pk, terms=terms or {}, now=at(now))


def service(attempt) -> float:
    return Organization.objects.get(pk=attempt.job.organization_id).service


def test_a_batch_is_paid_by_rows_and_by_those_who_stay_when_one_leaves(device, ada, bob):
    mine = start(ada, device, "a", 1, slot="rollout", rows=4)
    theirs = start(bob, device, "b", 3, slot="rollout", rows=12)
    over(ada, "a", 1, 6)
    assert had(mine) == [(1, 3, 1000), (3, 6, 250)]
    assert had(theirs) == [(3, 6, 750), (6, None, 1000)]


def test_new_terms_hold_from_now_on_and_only_what_changes_is_written(device, ada, bob):
    rollout = start(ada, device, "a", 1, share=0.5, slot="rollout")
    update = start(bob, device, "b", 1, share=0.5, slot="train")
    allot(device, 2)
    allot(
        device,
        3,
        {rollout.pk: Terms(0.25, 0.4, "b has more to do"), update.pk: Terms(0.75, 0.8, "so it has")},
    )
    allot(device, 4, {rollout.pk: Terms(0.25, 0.4, "again")})
    assert had(rollout) == [(1, 3, 500), (3, None, 250)]
    assert had(update) == [(1, 3, 500), (3, None, 750)]
    newest = rollout.allotments.get(end=None)
    assert (newest.share, newest.speed, newest.reason) == (0.25, 0.4, "b has more to do")
    rollout.refresh_from_db()
    assert rollout.share == 0.25


def test_another_speed_alone_begins_a_new_allotment(device, ada):
    rollout = start(ada, device, "a", 1)
    allot(device, 2, {rollout.pk: Terms(1.0, 0.5, "the memory bus is busy")})
    assert had(rollout) == [(1, 2, 1000), (2, None, 1000)]
    assert list(rollout.allotments.order_by("start").values_list("speed", flat=True)) == [1.0, 0.5]


def test_a_change_at_the_same_instant_replaces_what_was_said_before(device, ada, bob):
    rollout = start(ada, device, "a", 1, share=1.0)
    allot(device, 2, {rollout.pk: Terms(0.25, 1.0, "first thought")})
    update = start(bob, device, "b", 2, share=0.5)
    allot(device, 2, {rollout.pk: Terms(0.5, 0.7, "second thought")})
    assert had(rollout) == [(1, 2, 1000), (2, None, 500)]
    assert had(update) == [(2, None, 500)]
    assert rollout.allotments.get(end=None).reason == "second thought"


def test_the_share_of_a_slot_is_one_for_all_in_it(device, ada, bob):
    mine = start(ada, device, "a", 1, slot="rollout", share=1.0)
    theirs = start(bob, device, "b", 2, slot="rollout", share=0.5)
    assert [had(mine)[-1], had(theirs)[-1]] == [(2, None, 250), (2, None, 250)]
    allot(device, 3, {theirs.pk: Terms(0.8, 1.0, "more")})
    mine.refresh_from_db()
    assert [had(mine)[-1], had(theirs)[-1], mine.share] == [(3, None, 400), (3, None, 400), 0.8]


def test_more_than_the_device_is_never_had_even_when_it_was_given_away(device, ada, bob):
    mine, theirs = start(ada, device, "a", 1), start(bob, device, "b", 2)
    assert [had(mine), had(theirs)] == [[(1, 2, 1000), (2, None, 500)], [(2, None, 500)]]


def test_terms_for_what_is_over_or_elsewhere_are_passed_over(device, ada):
    rollout = start(ada, device, "a", 1)
    over(ada, "a", 1, 2)
    allot(device, 3, {rollout.pk: Terms(0.5, 1.0, "too late"), 10**6: Terms(0.5, 1.0, "nobody")})
    assert had(rollout) == [(1, 2, 1000)]


def test_an_end_before_the_last_change_of_terms_takes_back_what_followed(device, ada, bob):
    rollout = start(ada, device, "a", 1, share=0.5, slot="x")
    start(bob, device, "b", 1, share=0.5)
    allot(device, 5, {rollout.pk: Terms(0.25, 1.0, "less")})
    allot(device, 6, {rollout.pk: Terms(0.4, 1.0, "more")})
    done = over(ada, "a", 2, 4, now=7)
    assert had(rollout) == [(1, 4, 500)]
    assert done.ended_at == at(4)


@pytest.mark.parametrize(("begun", "ended"), [(-9, -5), (0, 0.5), (20, 30), (5, 3)])
def test_no_clock_of_a_worker_makes_an_allotment_negative(device, ada, begun, ended):
    rollout = start(ada, device, "a", 1)
    allot(device, 2, {rollout.pk: Terms(0.5, 1.0, "less")})
    done = over(ada, "a", begun, ended, now=4)
    assert at(1) <= done.started_at <= done.ended_at <= at(4)
    for row in rollout.allotments.all():
        assert at(1) <= row.start <= row.end <= max(done.ended_at, at(1))


def test_a_clock_behind_the_last_change_is_moved_up_to_it(device, ada, bob):
    first = start(ada, device, "a", 1)
    over(ada, "a", 1, 5)
    second = start(bob, device, "b", 4)
    assert [had(first), had(second), second.granted_at] == [[(1, 5, 1000)], [(5, None, 1000)], at(5)]
    allot(device, 3, {second.pk: Terms(0.5, 1.0, "an older plan")})
    assert had(second) == [(5, None, 500)]


def test_nothing_begins_before_the_last_reading_of_the_meter(device, ada):
    Device.objects.update(metered_until=at(9))
    assert had(start(ada, device, "a", 8)) == [(9, None, 1000)]


def test_what_crosses_goes_on_where_it_was_with_the_rows_it_has_left(device, ada, bob):
    tail = start(ada, device, "a", 1, slot="rollout", rows=4)
    start(bob, device, "b", 1, slot="rollout", rows=4)
    thin = crosses(ada, "a", 1, 3, "a2", rows=1, now=4)
    # It had a half until the report came, and a fifth of the rows from then on.
    assert [had(tail), had(thin)] == [[(1, 3, 500)], [(3, 4, 500), (4, None, 200)]]
    assert had(bob.substages.get()) == [(1, 4, 500), (4, None, 800)]


def test_what_was_allotted_after_a_crossing_is_the_successors(device, ada, bob):
    tail = start(ada, device, "a", 1, share=0.5)
    allot(device, 3, {tail.pk: Terms(0.75, 0.9, "more")})
    allot(device, 5, {tail.pk: Terms(1.0, 0.9, "all")})
    thin = crosses(ada, "a", 1, 4, "a2", now=6)
    assert [had(tail), had(thin)] == [[(1, 3, 500), (3, 4, 750)], [(4, 5, 750), (5, None, 1000)]]
    assert (thin.share, thin.granted_at) == (1.0, at(4))


def test_who_makes_room_leaves_the_device_to_others_at_once(device, ada, bob):
    update = start(ada, device, "a", 1)
    assert leaves(ada, "a", 3)
    rollout = start(bob, device, "b", 3)
    done = over(ada, "a", 1, 5)
    assert [had(update), had(rollout)] == [[(1, 3, 1000)], [(3, None, 1000)]]
    assert done.ended_at == at(5)


def test_a_lost_attempt_frees_its_part_of_the_device(device, ada, bob):
    mine, theirs = (start(who, device, "n", 1, slot="rollout") for who in (ada, bob))
    assert substages_lose(attempt=ada, now=at(4)) == 1
    assert [had(mine), had(theirs)] == [[(1, 4, 500)], [(1, 4, 500), (4, None, 1000)]]


def test_virtual_time_passes_for_what_was_had_until_the_report(device, ada, bob):
    start(ada, device, "a", 0, slot="rollout", rows=1)
    start(bob, device, "b", 0, slot="rollout", rows=3)
    over(ada, "a", 1, 5, now=6)
    # ada has weight 2: 6 s of a quarter are 0.75.
    assert [service(ada), service(bob)] == [0.75, 4.5]
    crosses(bob, "b", 0, 8, "b2", now=10)
    leaves(bob, "b2", 12)
    assert service(bob) == 4.5 + 6


def test_who_holds_whole_devices_is_charged_for_holding_them_only(device, ada):
    assert placements_open(attempt=ada, devices=[device], reason="its turn", now=at(0))
    start(ada, device, "a", 1)
    over(ada, "a", 1, 5)
    assert service(ada) == 0
    placements_close(attempt=ada, now=at(10))
    assert service(ada) == 5


def test_virtual_time_does_not_pass_while_the_device_is_out_of_service(device, bob):
    start(bob, device, "b", 0)
    device.service_intervals.update(end=at(2))
    device.service_intervals.create(start=at(8))
    over(bob, "b", 0, 10)
    assert service(bob) == 4


def test_a_batch_of_many_costs_few_queries(device, ada, django_assert_max_num_queries):
    for number in range(6):
        start(ada, device, f"a{number}", 0, slot="rollout")
    with django_assert_max_num_queries(14):
        allot(device, 2, {row.pk: Terms(0.5, 1.0, "half") for row in ada.substages.all()})
    assert Allotment.objects.aggregate(last=Max("start"))["last"] == at(2)
