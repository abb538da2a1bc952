"""The operators' page: who may see it, and that its figures are those one works out by hand."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from backend.jobs.attempts import step_record
from backend.jobs.models import Attempt
from backend.pool.models import Device, ServiceInterval
from frontend.web import cluster, cluster_rows
from frontend.web.cluster_rows import Window, window_before
from tests import factories
from tests.frontend import scene as scenes
from tests.frontend import stage
from tests.frontend.conftest import signed_in
from tests.frontend.scene import Scene, before, decision, substage

PAGE, LIVE = reverse("web:cluster"), reverse("web:cluster_live")


@pytest.fixture
def operator(db) -> Client:
    return signed_in(factories.user(is_staff=True))


@pytest.fixture
def scene(acme, northwind, tmp_path) -> Scene:
    return scenes.cluster([acme.organization, northwind.organization], tmp_path, timezone.now())


def minute(scene: Scene) -> Window:
    return window_before(scene.at, 1)


def test_operators_see_the_cluster_and_nobody_else_does(acme, northwind, stranger, operator, scene):
    for address in (PAGE, LIVE):
        assert operator.get(address).status_code == 200
        for client in (acme.client, acme.viewer, northwind.client, stranger):
            answer = client.get(address)
            assert answer.status_code == 404
            assert "node-a/cpu0" not in answer.content.decode()
        nobody = Client().get(address)
        assert nobody.status_code == 302
        assert nobody["Location"].startswith(reverse("web:sign_in"))
    assert PAGE not in acme.client.get(reverse("web:jobs")).content.decode()
    assert f'href="{PAGE}"' in operator.get(reverse("web:jobs")).content.decode()


def test_an_empty_cluster_says_so(operator):
    operator_of_none = operator.get(PAGE)
    assert operator_of_none.status_code == 404  # there is no organization at all to look at
    factories.organization()
    page = operator.get(PAGE).content.decode()
    assert "No devices" in page and "No decisions yet" in page


# ---------------------------------------------------------------- figures


def test_utilization_is_the_allotted_part_of_capacity(scene):
    substage(scene, 0, 0, "decode", [(50, 40, 1.0), (40, 20, 0.25)])
    substage(scene, 1, 0, "update", [(40, None, 0.5)])
    substage(scene, 1, 0, "decode", [(90, 45, 0.5)])
    window = minute(scene)
    allotted = cluster_rows.allotted_seconds(scene.devices, window)
    # 10 s of all, 20 s of a quarter; half of 40 s; half of the 15 s within the window.
    assert allotted == {scene.devices[0].pk: pytest.approx(10 + 5 + 20 + 7.5)}
    capacity = cluster_rows.capacity_seconds(scene.devices, window)
    assert capacity == {device.pk: 60.0 for device in scene.devices}
    assert cluster.percent(42.5, 60) == pytest.approx(70.83, abs=0.01)
    assert cluster.percent(0.0, 0.0) == 0.0


def test_a_device_has_no_capacity_while_it_is_out_of_service(scene):
    device = scene.devices[0]
    ServiceInterval.objects.filter(device=device).update(end=before(scene.at, 45))
    ServiceInterval.objects.create(device=device, start=before(scene.at, 10))
    assert cluster_rows.capacity_seconds([device], minute(scene)) == {device.pk: 25.0}


def test_columns_add_up_to_what_was_allotted(scene, acme, northwind):
    substage(scene, 0, 0, "decode", [(50, 40, 1.0), (40, 20, 0.25)])
    substage(scene, 0, 0, "decode", [(100, 55, 0.5)])
    substage(scene, 1, 1, "update", [(25, None, 0.5)])
    window = minute(scene)
    found = cluster_rows.columns(scene.devices, window, 4)
    told = {
        (column.device, column.tenant_name, (column.start - window.since).total_seconds()): column.part
        for column in found
    }
    first, second = (device.name for device in scene.devices)
    assert told == {
        # [60, 45) before now: half of 5 s and all of 5; [45, 30): all of 5, a quarter of 10; [30, 15): of 10.
        (first, "Acme", 0.0): pytest.approx(7.5 / 15),
        (first, "Acme", 15.0): pytest.approx(7.5 / 15),
        (first, "Acme", 30.0): pytest.approx(2.5 / 15),
        (second, "Northwind", 30.0): pytest.approx(5 / 15),
        (second, "Northwind", 45.0): pytest.approx(7.5 / 15),
    }
    assert {column.end - column.start for column in found} == {timedelta(seconds=15)}


def test_turns_are_those_of_the_window_and_the_newest(scene):
    substage(scene, 0, 0, "decode", [(90, 70, 1.0), (70, 50, 0.5)])
    substage(scene, 1, 1, "update", [(30, None, 1.0)], reason="the only free device")
    turns = cluster_rows.turns(scene.devices, minute(scene), 10)
    assert [(turn.device, turn.part, turn.tenant_name) for turn in turns] == [
        (scene.devices[0].name, 0.5, "Acme"),
        (scene.devices[1].name, 1.0, "Northwind"),
    ]
    assert turns[1].end is None and turns[1].reason == "the only free device"
    assert cluster_rows.turns(scene.devices, minute(scene), 1) == turns[1:]
    assert cluster_rows.turns_now(scene.devices, scene.at) == turns[1:]


def test_waits_end_with_the_next_grant_the_next_wait_or_the_attempt(scene):
    for seconds in (50, 45, 20):
        decision(scene, 0, "wait", seconds, "joins the batch of ftjob-1", 0)
    substage(scene, 0, 0, "decode", [(30, 25, 1.0)])
    decision(scene, 1, "wait", 40, "room soon", None)
    Attempt.objects.filter(pk=scene.attempts[1].pk).update(ended_at=before(scene.at, 35))
    later = scene.at + timedelta(seconds=9)
    Attempt.objects.filter(pk=scene.attempts[0].pk).update(wait_until=later)
    found = cluster_rows.waits(minute(scene), 10)
    spans = [
        (
            wait.tenant_name,
            (scene.at - wait.since).total_seconds(),
            wait.until and (scene.at - wait.until).total_seconds(),
            wait.at_most,
        )
        for wait in found
    ]
    assert spans == [
        ("Acme", 50.0, 45.0, None),
        ("Acme", 45.0, 30.0, None),
        ("Northwind", 40.0, 35.0, None),
        ("Acme", 20.0, None, later),
    ]


def test_a_wait_that_began_before_the_window_is_in_it_while_it_lasts(scene):
    decision(scene, 0, "wait", 100, "room soon", None)
    decision(scene, 1, "wait", 100, "room soon", None)
    substage(scene, 1, 0, "decode", [(80, 70, 1.0)])
    assert [wait.tenant_name for wait in cluster_rows.waits(minute(scene), 10)] == ["Acme"]


def test_moves_and_yields_are_counted_where_they_left(scene):
    substage(scene, 0, 0, "tail", [(50, 30, 1.0)], moves_to="n9")
    substage(scene, 0, 0, "tail", [(90, 80, 1.0)], moves_to="n9")
    decision(scene, 1, "yield", 20, "ftjob-1 decodes first", 1)
    decision(scene, 1, "yield", 90, "ftjob-1 decodes first", 1)
    first, second = (device.pk for device in scene.devices)
    assert cluster_rows.moved_away(scene.devices, minute(scene)) == {first: 1}
    assert cluster_rows.made_room(scene.devices, minute(scene)) == {second: 1}


def test_one_batch_is_what_one_resident_computes_for_several_jobs(scene):
    substage(scene, 0, 0, "decode", [(5, None, 0.3)], slot="a/rollout", share=0.6)
    substage(scene, 0, 0, "tail", [(5, None, 0.1)], slot="a/rollout", share=0.6)
    substage(scene, 1, 0, "decode", [(5, None, 0.2)], slot="a/rollout", share=0.6)
    substage(scene, 1, 0, "update", [(5, None, 0.4)], slot="a/train/2")
    assert cluster.batches(cluster_rows.turns_now(scene.devices, scene.at)) == [2]
    assert cluster.batches([]) == []


# ---------------------------------------------------------------- the page


def test_the_page_tells_what_computes_now_and_why(operator, scene):
    substage(scene, 0, 0, "decode", [(20, None, 0.25)], slot="a/rollout", share=0.5, reason="fuses <with> 2")
    substage(scene, 1, 0, "decode", [(20, None, 0.25)], slot="a/rollout", share=0.5)
    decision(scene, 1, "rehome", 5, "node-a/cpu0 drains", 1)
    decision(scene, None, "evict", 4, "room for another base", 1)
    Device.objects.filter(pk=scene.devices[1].pk).update(draining=True)
    answer = operator.get(PAGE)
    page = answer.content.decode()
    for said in (
        "2 jobs decode together",
        "lighthouse",
        "Northwind",
        "25 %",
        "draining",
        "fuses &lt;with&gt; 2",
    ):
        assert said in page
    for said in ("New home", "node-a/cpu0 drains", "Unloaded", "room for another base"):
        assert said in page
    idle, free = answer.context["cards"][1], answer.context["cards"][0].free
    assert (idle.computing, idle.condition, free) == ([], "draining", 50.0)
    assert answer.context["figure"]["figure"]["layout"]["yaxis"]["ticktext"][1].endswith("draining")


def test_a_lost_device_is_shown_as_lost(operator, scene):
    Device.objects.filter(pk=scene.devices[0].pk).update(state="lost", lost_at=scene.at, draining=True)
    assert [card.condition for card in operator.get(PAGE).context["cards"]] == ["lost", "in service"]


def test_the_parts_follow_the_span(operator, scene):
    substage(scene, 0, 0, "decode", [(100, 90, 1.0)])
    decision(scene, 0, "merge", 95, "the tail fits beside", 0)

    def drawn(**ask: str) -> tuple[int, int, int]:
        answer = operator.get(LIVE, ask).json()
        traces = {trace["name"]: trace for trace in answer["figure"]["data"]}
        return len(traces["Work"]["x"]), len(traces["Decisions"]["x"]), answer["every_ms"]

    assert drawn(minutes="1") == (0, 0, 2000)
    assert drawn(minutes="5") == drawn() == (1, 1, 2000)
    assert drawn(minutes="1440") == (1, 1, 60_000)
    assert all(drawn(minutes=nonsense) == drawn() for nonsense in ("x", "-1", "7", "9" * 30))
    assert set(operator.get(LIVE).json()["html"]) == {"cluster_now", "cluster_tenants", "cluster_decisions"}


def test_many_turns_become_columns(operator, scene, monkeypatch):
    monkeypatch.setattr(cluster, "MAX_TURNS", 3)
    for number in range(3):
        substage(scene, 0, 0, "decode", [(30 - number, 29 - number, 1.0)])
    assert operator.get(PAGE).context["column_s"] is None
    substage(scene, 0, 0, "decode", [(2, 1, 1.0)])
    answer = operator.get(PAGE)
    assert answer.context["column_s"] == 300 / cluster.COLUMNS
    assert "on average" in answer.context["figure"]["figure"]["data"][0]["customdata"][0]


def test_a_long_span_is_columns_however_few_turns_there_are(operator, scene):
    substage(scene, 0, 0, "decode", [(300, 120, 1.0)])
    figure = operator.get(LIVE, {"minutes": "360"}).json()["figure"]
    assert sum(figure["data"][0]["x"]) / len(figure["data"][0]["x"]) == pytest.approx(90_000, rel=0.01)
    assert "on average" in figure["data"][0]["customdata"][0]


def test_only_the_newest_decisions_are_listed(operator, scene):
    for number in range(cluster.DECISIONS + 5):
        decision(scene, 0, "place", 100 - number, f"reason {number};", 0)
    page = operator.get(PAGE).content.decode()
    assert page.count("reason ") == cluster.DECISIONS
    assert "reason 54;" in page and "reason 4;" not in page


# ---------------------------------------------------------------- the tenants' side


def test_a_job_tells_how_long_it_waited(acme, northwind, job):
    attempt = factories.attempt(job)
    address = reverse("web:job_header", args=[job.public_id])
    assert "<small>of its steps" not in acme.client.get(address).content.decode()
    for step, waiting in ((0, 0.5), (1, 0.1)):
        done = stage.step_done(step)
        metrics = {**done.metrics, "waiting": waiting, "seconds": 10.0}
        step_record(attempt=attempt, done=done.model_copy(update={"metrics": metrics}))
    page = acme.client.get(address).content.decode()
    assert "30 % <small>of its steps" in page and "computed on none" in page
    assert northwind.client.get(address).status_code == 404
    figures = acme.client.get(reverse("web:job_figures", args=[job.public_id])).json()["figures"]
    assert figures["waiting"]["data"][0]["y"] == [0.5, 0.1]
