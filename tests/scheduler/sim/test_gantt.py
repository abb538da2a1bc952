"""The picture: a figure as plain data, checked by hand and given to plotly; and the page."""

from __future__ import annotations

import sys
from dataclasses import replace

import plotly.graph_objects as go
import pytest

from scheduler.core.state import POLICIES, Kind
from scheduler.sim.__main__ import main
from scheduler.sim.engine import simulate
from scheduler.sim.gantt import FILLED, LOOKS, figure, tinted
from scheduler.sim.result import Interval
from scheduler.sim.trace import EXAMPLE, read

SCENARIO = read(EXAMPLE)
RESULT = simulate(SCENARIO, POLICIES["exclusive"], seed=0)


def with_timeline(*intervals: Interval):
    return replace(RESULT, timeline=intervals)


def test_bars_by_hand():
    """Tenant 1 has 0.6 of d01 from 2 to 5 and tenant 2 the rest: stacked in the second lane."""
    result = with_timeline(
        Interval("d01", 2.0, 5.0, 1, "reasoning", 1, Kind.DECODE, 0.6, 128),
        Interval("d01", 2.0, 5.0, 2, "search", 2, Kind.UPDATE, 0.4, 1),
    )
    one, other = figure(SCENARIO, [result])["data"]
    assert (one["name"], one["legendgroup"], other["name"]) == ("decode", "tenant 1", "update")
    assert (one["base"], one["x"]) == ([2.0], [3.0])
    assert one["y"] == pytest.approx([1 + (1 - FILLED) / 2 + 0.3 * FILLED])
    assert one["width"] == pytest.approx([0.6 * FILLED])
    assert other["y"] == pytest.approx([1 + (1 - FILLED) / 2 + 0.8 * FILLED])
    assert one["hovertext"] == [
        "reasoning (tenant 1)<br>step 0, decode, 128 sequences<br>60% of d01<br>2.0 to 5.0 s"
    ]
    assert one["marker"]["color"] != other["marker"]["color"]


def test_the_hover_counts_steps():
    job = RESULT.jobs[0]
    second = job.admitted + job.step_seconds[0]
    result = with_timeline(
        Interval("d00", second, second + 1, 1, job.id, job.tenant, Kind.DECODE, 1.0, 8),
        Interval("d00", second - 1, second, 1, job.id, job.tenant, Kind.DECODE, 1.0, 8),
    )
    (trace,) = figure(SCENARIO, [result])["data"]
    assert ["step 0" in text for text in trace["hovertext"]] == [True, False]
    assert ["step 1" in text for text in trace["hovertext"]] == [False, True]


def test_policies_share_the_time_axis_and_the_first_is_on_top():
    planned = simulate(SCENARIO, POLICIES["lookahead"], seed=0)
    drawn = figure(SCENARIO, [RESULT, planned])
    layout = drawn["layout"]
    assert layout["yaxis"]["domain"][0] > layout["yaxis2"]["domain"][1]
    assert [key for key in layout if key.startswith("xaxis")] == ["xaxis"]
    assert "exclusive" in layout["annotations"][0]["text"]
    assert "lookahead" in layout["annotations"][1]["text"]
    assert {trace["yaxis"] for trace in drawn["data"]} == {"y", "y2"}
    assert all(trace["showlegend"] == (trace["yaxis"] == "y") for trace in drawn["data"])
    last = layout["xaxis"]["range"][1]
    for trace in drawn["data"]:
        assert all(
            base + length <= last + 0.01 for base, length in zip(trace["base"], trace["x"], strict=True)
        )
        lanes = zip(trace["y"], trace["width"], strict=True)
        assert all(int(y - width / 2) == int(y + width / 2) for y, width in lanes)


def test_plotly_accepts_the_figure():
    drawn = figure(SCENARIO, [RESULT])
    assert len(go.Figure(drawn).data) == len(drawn["data"]) > 5


def test_every_kind_that_needs_a_device_has_its_own_look():
    assert set(LOOKS) == {kind for kind in Kind if kind not in (Kind.TOOL, Kind.GRADE)}
    assert len(set(LOOKS.values())) == len(LOOKS)


def test_white_is_mixed_in():
    assert tinted("#0064c8", 0.0) == "#0064c8"
    assert tinted("#0064c8", 0.5) == "#80b2e4"  # 127.5, 177.5 and 227.5, to even
    assert tinted("#0064c8", 1.0) == "#ffffff"


def test_the_page_needs_no_network(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["gantt", "--out", str(page)]) == 0
    content = page.read_text(encoding="utf-8")
    assert len(content) > 1_000_000  # plotly.js is in it
    assert 'src="http' not in content
    assert content.index("exclusive") < content.index("lookahead")
    assert "exclusive above lookahead" in capsys.readouterr().out


def test_without_plotly_the_program_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly.io", None)
    assert main(["gantt", "--out", str(tmp_path / "page.html")]) == 2
    assert capsys.readouterr().err == "error: this picture needs plotly: pip install plotly\n"
