"""Figures are plain data: compared with numbers worked out by hand, and given to plotly to check."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import plotly.graph_objects as go
import pytest

from frontend.web import figures
from workers.protocol import METRICS, SubStageKind

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def bar(
    start: float, seconds: float, *, device: str | None = "a", share: float | None = 1.0, mine: bool = True
):
    return {
        "device": device,
        "kind": "decode",
        "started_at": START + timedelta(seconds=start),
        "ended_at": START + timedelta(seconds=start + seconds),
        "share": share,
        "mine": mine,
        "step": 3 if mine else None,
        "worker": 0 if mine else None,
        "tokens": 120 if mine else None,
    }


def row(step: int, **values: float):
    return {"step": step, "values": values}


def test_every_chart_explains_itself_by_a_metric():
    assert {chart.key for chart in figures.CHARTS} <= set(METRICS) | {figures.COST}
    assert {"reward", "loss", "kl", "entropy", "completion_length", "tokens_per_s", "cost"} <= set(
        figures.BY_KEY
    )
    assert all(chart.explanation for chart in figures.CHARTS)


def test_every_kind_of_sub_stage_has_a_colour_of_its_own():
    kinds = {kind.value for kind in SubStageKind}
    assert set(figures.KIND_COLOURS) == set(figures.KIND_WORDS) == kinds
    assert len({*figures.KIND_COLOURS.values(), figures.NEIGHBOUR_COLOUR}) == len(kinds) + 1


@pytest.mark.parametrize("chart", figures.CHARTS, ids=lambda chart: chart.key)
@pytest.mark.parametrize(
    "rows", [[], [row(0, reward=0.5)], [row(0, reward=0.5, loss=1.0), row(1, reward=0.75)]]
)
def test_plotly_accepts_every_metric_figure(chart, rows):
    go.Figure(figures.metric_figure(rows, chart))


def test_a_metric_is_drawn_by_step_and_left_open_where_it_is_missing():
    figure = figures.metric_figure([row(4, kl=0.25), row(5), row(6, kl=0.5)], figures.BY_KEY["kl"])
    (line,) = figure["data"]
    assert line["x"] == [4, 5, 6]
    assert line["y"] == [0.25, None, 0.5]


def test_the_reward_has_a_band_of_one_standard_deviation():
    figure = figures.metric_figure([row(0, reward=0.5, reward_std=0.25)], figures.BY_KEY["reward"])
    low, high, mean = (trace["y"] for trace in figure["data"])
    assert (low, high, mean) == ([0.25], [0.75], [0.5])


def test_a_tail_has_the_same_traces_as_the_whole():
    rows = [row(step, reward=step / 8, reward_std=0.125) for step in range(6)]
    for chart in figures.CHARTS:
        whole = figures.metric_points(rows, chart)
        head, tail = figures.metric_points(rows[:4], chart), figures.metric_points(rows[4:], chart)
        assert [a + b for a, b in zip(head["y"], tail["y"], strict=True)] == whole["y"]
        assert [trace["x"] for trace in figures.metric_figure(rows, chart)["data"]] == whole["x"]


def test_cost_adds_up_in_whole_micro_dollars():
    rows = figures.cumulative_cost([(0, 100_000), (1, 200_000), (2, -50_000)])
    assert [entry["values"]["cost"] for entry in rows] == [0.1, 0.3, 0.25]


def test_thinning_keeps_both_ends():
    rows = [row(step) for step in range(1_001)]
    thinned = [entry["step"] for entry in figures.thin(rows, 5)]
    assert thinned == [0, 250, 500, 750, 1000]
    assert figures.thin(rows[:5], 5) == rows[:5]


def test_plotly_accepts_a_timeline_with_lanes_neighbours_and_work_without_a_device():
    rows = [bar(0, 2), bar(2, 1, mine=False), bar(1, 1, device=None, share=None), bar(0, 1, device="b")]
    figure = figures.timeline_figure(rows)
    go.Figure(figure)
    assert figure["layout"]["yaxis"]["ticktext"] == ["a", "b", "host"]
    go.Figure(figures.timeline_figure([]))


def test_a_bar_begins_and_ends_when_the_sub_stage_did():
    (trace,) = figures.timeline_figure([bar(90.25, 1.5)])["data"]
    assert trace["base"] == ["2026-03-01 12:01:30.250"]
    assert trace["x"] == [1500.0]


def test_a_neighbour_tells_nothing_of_itself():
    mine, theirs = figures.timeline_figure([bar(0, 1), bar(1, 1, mine=False)])["data"]
    assert mine["customdata"][0] == [1.0, 100.0, 3, 0, 120]
    assert theirs["customdata"][0] == [1.0, 100.0, None, None, None]
    assert "step" not in theirs["hovertemplate"] and "tokens" not in theirs["hovertemplate"]
    assert theirs["name"] == "Other jobs"


def test_a_bar_is_as_thick_as_its_share_and_lies_at_the_bottom_of_its_lane():
    mine, theirs = figures.timeline_figure([bar(0, 10, share=0.25), bar(2, 3, share=0.5, mine=False)])["data"]
    height = figures.LANE_HEIGHT
    assert mine["width"] == [0.25 * height] and theirs["width"] == [0.5 * height]
    # The axis counts downwards: a lane reaches from -half to half.
    assert mine["offset"][0] + mine["width"][0] == pytest.approx(height / 2)
    assert theirs["offset"][0] + theirs["width"][0] == pytest.approx(mine["offset"][0])


def test_a_share_that_changes_on_the_way_is_drawn_as_it_was():
    changed = bar(0, 10, share=0.25)
    turns = ((0, 4, 1.0), (4, 10, 0.25))
    changed["shares"] = [
        {"from": START + timedelta(seconds=a), "to": START + timedelta(seconds=b), "share": share}
        for a, b, share in turns
    ]
    (trace,) = figures.timeline_figure([changed])["data"]
    assert trace["x"] == [4000.0, 6000.0]
    assert trace["width"] == [figures.LANE_HEIGHT, 0.25 * figures.LANE_HEIGHT]
    assert [told[:2] for told in trace["customdata"]] == [[4.0, 100.0], [6.0, 25.0]]


def test_a_window_counts_back_from_the_newest_end():
    rows = [bar(0, 10), bar(50, 10), bar(100, 20)]
    assert figures.within(rows, 60) == rows[1:]
    assert figures.within(rows, None) == rows
    assert figures.within([], 60) == []
