"""The operators' timeline is plain data: compared with numbers worked out by hand, and checked by plotly."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import plotly.graph_objects as go
import pytest

from backend.jobs.models import Job
from backend.pool.models import Decision, Device
from backend.tenants.models import Organization
from frontend.web import cluster_figure as figures
from frontend.web.cluster_rows import MARKED, Column, Turn, Wait, Window
from frontend.web.figures import LANE_HEIGHT
from workers.protocol import SubStageKind

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
WINDOW = Window(START, START + timedelta(seconds=60))
LANES = {"a": "a", "b": "b<br>draining"}


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def turn(start: float, end: float | None, part: float = 1.0, **fields: Any) -> Turn:
    said = {
        "device": "a", "share": part, "reason": "free", "kind": "decode", "step": 3, "worker": 0,
        "sequences": 8, "slot": "a/rollout", "attempt": 1, "node": "s3.w0.decode.1", "moves_to": "",
        "job": "ftjob-1", "title": "sums", "tenant": 1, "tenant_name": "Acme",
    }  # fmt: skip
    return Turn(start=at(start), end=None if end is None else at(end), part=part, **{**said, **fields})


def wait(start: float, end: float | None, **fields: Any) -> Wait:
    said = {"reason": "joins a batch", "job": "ftjob-1", "title": "sums", "tenant": 1, "tenant_name": "Acme"}
    until = None if end is None else at(end)
    return Wait(since=at(start), until=until, at_most=at(90), **{**said, **fields})


def decision(kind: str, seconds: float, device: str | None = "a") -> Decision:
    job = Job(public_id="ftjob-1", name="<b>sums", organization=Organization(name="Acme & Co"))
    return Decision(
        at=at(seconds), kind=kind, job=job, device=Device(name=device) if device else None, reason="x < y"
    )


def drawn(work: Any = (), waits: Any = (), decisions: Any = ()) -> dict[str, dict[str, Any]]:
    colours = figures.tenant_colours({row.tenant for row in (*work, *waits)})
    figure = figures.cluster_figure(
        lanes=LANES, work=work, waits=waits, decisions=decisions, colours=colours, window=WINDOW
    )
    go.Figure(figure)
    assert figure["layout"]["yaxis"]["ticktext"] == ["a", "b<br>draining", "held back"]
    return {trace["name"]: trace for trace in figure["data"]}


def test_every_kind_on_devices_has_a_pattern_and_every_marked_decision_a_mark():
    assert set(figures.PATTERNS) == {kind.value for kind in SubStageKind if kind.needs_device}
    assert len(set(figures.PATTERNS.values())) == len(figures.PATTERNS)
    assert set(figures.MARKS) == set(MARKED)


def test_nothing_is_drawn_of_an_idle_cluster_but_its_lanes():
    assert all(trace["x"] == [] for trace in drawn().values())


def test_a_bar_is_as_high_as_its_part_and_begins_with_the_window():
    work = drawn([turn(-30, 20, 0.5), turn(10, None, 0.25, tenant=2, job="ftjob-2", device="b")])["Work"]
    assert work["y"] == [0, 1]
    assert work["base"] == ["2026-03-01 12:00:00.000", "2026-03-01 12:00:10.000"]
    assert work["x"] == [20_000.0, 50_000.0]
    assert work["width"] == pytest.approx([0.5 * LANE_HEIGHT, 0.25 * LANE_HEIGHT])


def test_a_share_that_changes_changes_the_height_and_moves_the_neighbour():
    rows = [turn(0, 10, 0.75), turn(10, 30, 0.25), turn(0, 30, 0.25, tenant=2, job="ftjob-2")]
    work = drawn(rows)["Work"]
    places = list(zip(work["x"], work["width"], work["offset"], strict=True))
    height = LANE_HEIGHT
    assert places == [
        (10_000.0, pytest.approx(0.75 * height), pytest.approx(-0.25 * height)),
        (10_000.0, pytest.approx(0.25 * height), pytest.approx(-0.5 * height)),
        (20_000.0, pytest.approx(0.25 * height), pytest.approx(0.25 * height)),
        (20_000.0, pytest.approx(0.25 * height), pytest.approx(0.0)),
    ]


def test_colours_tell_tenants_and_patterns_kinds():
    work = drawn([turn(0, 1), turn(1, 2, kind="update"), turn(2, 3, tenant=2)])["Work"]
    first, second, third = work["marker"]["color"]
    assert first == second != third
    assert work["marker"]["pattern"]["shape"] == ["", "/", ""]


def test_colours_stay_with_their_tenants_while_there_are_enough():
    size = len(figures.PALETTE)
    few = figures.tenant_colours([3, 5])
    assert figures.tenant_colours([3, 5, 6]) | few == figures.tenant_colours([3, 5, 6])
    crowded = figures.tenant_colours([1, 1 + size, 2])
    assert len(set(crowded.values())) == 3
    assert set(figures.tenant_colours(range(3 * size)).values()) == set(figures.PALETTE)


def test_a_hover_tells_who_what_how_much_and_why_as_text():
    row = turn(0, 2.5, 0.3, share=0.6, tenant_name="A&B <i>", reason="beside ftjob-2 <fast>")
    (told,) = drawn([row])["Work"]["customdata"]
    assert told == (
        "<b>A&amp;B &lt;i&gt;</b> · sums (ftjob-1)<br>Decode · step 3 · worker 0 · 8 sequences<br>"
        "30 % of a · 2.50 s<br>in a batch that has 60 %<br><i>beside ftjob-2 &lt;fast&gt;</i>"
    )
    assert "running" in figures.turn_told(turn(0, None))


def test_columns_are_drawn_by_tenant():
    columns = [
        Column("a", at(0), at(15), part, tenant, f"T{tenant}") for part, tenant in ((0.5, 1), (0.25, 2))
    ]
    work = drawn(columns)["Work"]
    assert work["width"] == pytest.approx([0.5 * LANE_HEIGHT, 0.25 * LANE_HEIGHT])
    assert work["customdata"][1] == "<b>T2</b><br>25.0 % of a on average"


def test_a_line_leads_to_where_sequences_went_on():
    rows = [
        turn(0, 10, node="n1", moves_to="n2"),
        turn(0, 5, device="b", node="n2"),
        turn(5, 20, device="b", node="n2"),
        turn(0, 20, device="b", node="n2", attempt=9),
    ]
    assert figures.moves(rows, WINDOW) == [(at(10), rows[0], rows[2])]
    line = drawn(rows)["Moves"]
    assert line["x"] == ["2026-03-01 12:00:10.000"] * 2 + [None]
    assert line["y"] == [0, 1, None]
    assert line["marker"]["symbol"][1] == "triangle-down"
    assert "from a on b" in line["customdata"][0]


def test_a_move_is_drawn_once_it_is_over_and_its_end_is_known():
    assert figures.moves([turn(0, None, node="n1", moves_to="n2"), turn(0, 5, node="n2")], WINDOW) == []
    assert figures.moves([turn(0, 5, node="n1", moves_to="n2")], WINDOW) == []


def test_waits_lie_beside_each_other_below_the_devices():
    bars = drawn(waits=[wait(-5, 20), wait(10, None, tenant=2, job="ftjob-2"), wait(30, 40)])["Held back"]
    # The second one sinks to the bottom whenever it waits alone.
    assert bars["x"] == [20_000.0, 10_000.0, 10_000.0, 10_000.0, 10_000.0, 20_000.0]
    assert bars["y"] == [2] * 6
    assert bars["width"] == pytest.approx([0.5 * LANE_HEIGHT] * 6)


def test_a_wait_tells_how_long_and_why():
    assert figures.wait_told(wait(0, 2)) == (
        "<b>Acme</b> · sums (ftjob-1)<br>held back 2.00 s<br><i>joins a batch</i>"
    )
    assert "held back until 12:01:30 UTC at most" in figures.wait_told(wait(0, None))


def test_as_many_wait_at_once_as_overlap():
    assert figures.most_at_once([]) == 1
    assert figures.most_at_once([(at(0), at(2)), (at(2), at(3))]) == 1
    assert figures.most_at_once([(at(0), at(5)), (at(1), at(3)), (at(2), at(4))]) == 3


def test_marks_stand_above_the_lane_of_their_device():
    marks = drawn(decisions=[decision("merge", 1), decision("wait", 2, None), decision("yield", 3, "gone")])
    assert marks["Decisions"]["y"] == pytest.approx([-0.45, 1.55, 1.55])
    assert marks["Decisions"]["marker"]["symbol"] == ["diamond", "circle-open", "triangle-down"]
    assert marks["Decisions"]["customdata"][0] == (
        "<b>Merged</b><br>Acme &amp; Co · &lt;b&gt;sums (ftjob-1)<br><i>x &lt; y</i>"
    )
