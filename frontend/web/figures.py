"""Plotly figures as plain dicts, made from rows by pure functions.

A figure carries data and geometry; colours of text, grid and paper belong to the page's theme and are set in
the browser. ``metric_figure`` and ``metric_points`` build the same traces, whole and as a tail for
``Plotly.extendTraces``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from frontend.web.lanes import Piece, Slice, stack
from workers.protocol import METRICS

Figure = dict[str, Any]
Row = Mapping[str, Any]

#: Points a chart keeps; the browser drops the oldest beyond it.
MAX_POINTS = 2000

#: Okabe and Ito's palette (https://jfly.uni-koeln.de/color/), and Tol's wine and olive for two more kinds:
#: told apart by readers with any of the common colour-vision deficiencies, on light and on dark paper.
KIND_COLOURS = {
    "prefill": "#0072b2",
    "decode": "#56b4e9",
    "tail": "#009e73",
    "tool": "#999933",
    "grade": "#cc79a7",
    "logprob": "#e69f00",
    "update": "#d55e00",
    "sync": "#a3406f",
}
KIND_WORDS = {
    "prefill": "Prefill",
    "decode": "Decode",
    "tail": "Tail decode",
    "tool": "Tool call",
    "grade": "Grade",
    "logprob": "Log-probs",
    "update": "Update",
    "sync": "Weight sync",
}
NEIGHBOUR_COLOUR = "#8a8f98"
#: The timeline's legend: word and colour, in the order of a step. It is drawn by the page.
LEGEND = [(KIND_WORDS[kind], colour) for kind, colour in KIND_COLOURS.items()]
LEGEND.append(("Other jobs", NEIGHBOUR_COLOUR))
#: Work that needs no device (grading) is drawn in a lane of its own.
HOST_LANE = "host"
#: What a lane's bars may fill of the distance from lane to lane.
LANE_HEIGHT = 0.8


@dataclass(frozen=True)
class Chart:
    """One metric's chart. ``digits`` are decimals of the value in the chart's head; ``floor`` shows y = 0;
    ``rare`` is shown by jobs only in which it is ever anything but 0.
    """

    key: str
    title: str
    colour: str
    digits: int = 3
    tick: str = ""
    floor: bool = False
    wide: bool = False
    rare: bool = False

    @property
    def explanation(self) -> str:
        return EXPLANATIONS[self.key]


COST = "cost"
EXPLANATIONS = {**METRICS, COST: "what the job has cost so far, in US dollars"}
CHARTS = (
    Chart("reward", "Reward", "#4f6bed", wide=True),
    Chart("loss", "Loss", "#d55e00", digits=4),
    Chart("kl", "KL to the starting weights", "#009e73", digits=4, floor=True),
    Chart("entropy", "Entropy", "#cc79a7"),
    Chart("completion_length", "Completion length", "#0072b2", digits=1, floor=True),
    Chart("tokens_per_s", "Tokens per second", "#e69f00", digits=0, floor=True),
    Chart(COST, "Cost", "#009e73", digits=6, tick="$", floor=True),
    Chart("mismatch", "Engine–trainer mismatch", "#a3406f", digits=4, floor=True),
    Chart("grad_norm", "Gradient norm", "#56b4e9", floor=True),
    Chart("clip_fraction", "Clipped tokens", "#d55e00", floor=True),
    Chart("zero_variance_groups", "Groups that teach nothing", "#0072b2", floor=True),
    Chart("waiting", "Waiting for a device", "#e69f00", floor=True),
    Chart("accuracy", "Pairs told apart", "#4f6bed", floor=True, rare=True),
    Chart("margin", "Margin of the preferred", "#009e73", rare=True),
    Chart("value_loss", "Value loss", "#d55e00", digits=4, floor=True, rare=True),
    Chart("explained_variance", "Explained variance", "#0072b2", rare=True),
    Chart("turns", "Turns per episode", "#56b4e9", digits=1, floor=True, rare=True),
    Chart("tool_calls", "Tool calls per episode", "#999933", digits=2, floor=True, rare=True),
    Chart("tool_errors", "Failed tool calls", "#a3406f", floor=True, rare=True),
    Chart("environment_errors", "Failed episodes", "#d55e00", floor=True, rare=True),
    Chart("grade_errors", "Samples without a reward", "#d55e00", floor=True, rare=True),
    Chart("grade_seconds", "Seconds per grade", "#cc79a7", floor=True, rare=True),
    Chart("truncated", "Cut completions", "#0072b2", floor=True, rare=True),
    Chart("masked", "Completions left out", "#a3406f", floor=True, rare=True),
    Chart("sampling_rounds", "Rounds of rollouts", "#999933", digits=1, floor=True, rare=True),
    Chart("importance_capped", "Capped importance ratios", "#e69f00", floor=True, rare=True),
    Chart("staleness", "Staleness", "#56b4e9", digits=2, floor=True, rare=True),
)
BY_KEY = {chart.key: chart for chart in CHARTS}


def thin(rows: Sequence[Row], limit: int = MAX_POINTS) -> list[Row]:
    """At most ``limit`` rows, evenly spaced, the first and the last among them."""
    if len(rows) <= limit:
        return list(rows)
    last = len(rows) - 1
    return [rows[round(i * last / (limit - 1))] for i in range(limit)]


def cumulative_cost(micro_usd_by_step: Iterable[tuple[int, int]]) -> list[Row]:
    """Rows of metric ``cost`` from what each step cost; amounts add up as integers."""
    total, rows = 0, []
    for step, micro_usd in micro_usd_by_step:
        total += micro_usd
        rows.append({"step": step, "values": {COST: total / 1_000_000}})
    return rows


def metric_points(rows: Sequence[Row], chart: Chart) -> dict[str, list[list[Any]]]:
    """``{"x": [...], "y": [...]}``, one list per trace, of rows ``{"step", "values"}``.

    The reward has three traces: the lower and the upper edge of one standard deviation, and the mean.
    """
    steps = [row["step"] for row in rows]
    mean = [row["values"].get(chart.key) for row in rows]
    if chart.key != "reward":
        return {"x": [steps], "y": [mean]}
    spread = [row["values"].get("reward_std") or 0.0 for row in rows]
    low = [None if m is None else m - s for m, s in zip(mean, spread, strict=True)]
    high = [None if m is None else m + s for m, s in zip(mean, spread, strict=True)]
    return {"x": [steps, steps, steps], "y": [low, high, mean]}


def metric_figure(rows: Sequence[Row], chart: Chart) -> Figure:
    points = metric_points(rows, chart)
    traces = [
        {"type": "scatter", "x": x, "y": y, **look}
        for x, y, look in zip(points["x"], points["y"], _looks(chart), strict=True)
    ]
    return {"data": traces, "layout": _metric_layout(chart)}


def _looks(chart: Chart) -> list[dict[str, Any]]:
    line = {
        "name": chart.title,
        "mode": "lines+markers",
        "line": {"color": chart.colour, "width": 2},
        "marker": {"size": 4, "color": chart.colour},
        "hovertemplate": f"%{{y:{chart.tick}.{chart.digits}f}}<extra></extra>",
    }
    if chart.key != "reward":
        return [line]
    edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    band = {**edge, "name": "+1 standard deviation", "fill": "tonexty", "fillcolor": _faint(chart.colour)}
    return [{**edge, "name": "-1 standard deviation"}, band, line]


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.16)"


def _metric_layout(chart: Chart) -> dict[str, Any]:
    return {
        "showlegend": False,
        "hovermode": "x unified",
        "uirevision": chart.key,
        "margin": {"l": 52, "r": 12, "t": 8, "b": 32},
        "xaxis": {
            "title": {"text": "step", "standoff": 4},
            # At least eight steps wide, so that no tick falls between two steps.
            "autorangeoptions": {"include": [0, 8]},
            "tickformat": "d",
            "zeroline": False,
            "nticks": 8,
        },
        "yaxis": {
            "tickprefix": chart.tick,
            "nticks": 6,
            "zeroline": False,
            "rangemode": "tozero" if chart.floor else "normal",
        },
    }


def timeline_figure(rows: Sequence[Row]) -> Figure:
    """Sub-stages as bars in one lane per device: start and end along x, share of the device as thickness.

    Rows: device (None: needs no device), kind, started_at, ended_at, share, mine; of the job's own step,
    worker, tokens; and where the share changed on the way ``shares``, a list of {from, to, share}.
    A neighbour shows as grey, without a name.
    """
    slices = stack(piece for row in rows for piece in _pieces(row))
    lanes = sorted({lane(row) for row in rows})
    traces = [
        _bars(
            [part for part in slices if part.piece.row["mine"] and part.piece.row["kind"] == kind],
            lanes,
            kind,
        )
        for kind in KIND_COLOURS
    ]
    traces.append(_bars([part for part in slices if not part.piece.row["mine"]], lanes, None))
    return {"data": [trace for trace in traces if trace["x"]], "layout": _timeline_layout(lanes)}


def within(rows: Sequence[Row], seconds: float | None) -> list[Row]:
    """The rows that end in the last ``seconds`` before the newest end; None: all."""
    if seconds is None or not rows:
        return list(rows)
    newest = max(row["ended_at"] for row in rows)
    return [row for row in rows if (newest - row["ended_at"]).total_seconds() <= seconds]


def lane(row: Row) -> str:
    return row["device"] or HOST_LANE


def _pieces(row: Row) -> list[Piece]:
    """The row by its shares. The job's own work lies below that of others."""
    whole = {"from": row["started_at"], "to": row["ended_at"], "share": row["share"]}
    order = (not row["mine"], row["worker"] or 0, row["started_at"], row["ended_at"])
    return [
        Piece(lane(row), turn["from"], turn["to"], _thickness(row, turn["share"]), order, row)
        for turn in row.get("shares") or [whole]
    ]


def _thickness(row: Row, share: float | None) -> float:
    return share if row["device"] and share else 1.0


def _bars(slices: Sequence[Slice], lanes: Sequence[str], kind: str | None) -> dict[str, Any]:
    name = KIND_WORDS[kind] if kind else LEGEND[-1][0]
    own = "step %{customdata[2]} · worker %{customdata[3]}<br>" if kind else ""
    tokens = "<br>%{customdata[4]:,} tokens" if kind else ""
    return {
        "name": name,
        **bars(slices, lanes),
        "customdata": [_told(part.piece) for part in slices],
        "marker": {
            "color": KIND_COLOURS[kind] if kind else NEIGHBOUR_COLOUR,
            "opacity": 1.0 if kind else 0.35,
            "line": {"width": 0},
        },
        "hovertemplate": (
            f"<b>{name}</b><br>{own}%{{customdata[0]:.2f}} s at %{{customdata[1]:.0f}} % of the device"
            f"{tokens}<extra></extra>"
        ),
    }


def _told(piece: Piece) -> list[Any]:
    """Seconds and percent of a bar, and of the job's own what was done: never of a neighbour."""
    row = piece.row
    seconds = (piece.end - piece.start).total_seconds()
    return [seconds, 100 * piece.part, row["step"], row["worker"], row["tokens"]]


def bars(slices: Sequence[Slice], lanes: Sequence[str]) -> dict[str, Any]:
    """The geometry of horizontal bars in their lanes."""
    return {
        "type": "bar",
        "orientation": "h",
        "y": [lanes.index(part.piece.lane) for part in slices],
        "base": [iso(part.start) for part in slices],
        "x": [(part.end - part.start).total_seconds() * 1000 for part in slices],
        "width": [LANE_HEIGHT * part.height for part in slices],
        # Plotly counts downwards here: the pile begins at the lane's lower edge.
        "offset": [LANE_HEIGHT * (0.5 - part.bottom - part.height) for part in slices],
    }


def iso(moment: datetime) -> str:
    """Plotly reads times without a zone; UTC is written everywhere."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _timeline_layout(lanes: Sequence[str]) -> dict[str, Any]:
    return {
        "barmode": "overlay",
        "hovermode": "closest",
        "uirevision": "timeline",
        "height": 66 + 56 * max(1, len(lanes)),
        "margin": {"l": 16, "r": 12, "t": 8, "b": 44},
        "showlegend": False,
        "xaxis": {"type": "date", "title": {"text": "UTC", "standoff": 4}, "nticks": 6, "tickangle": 0},
        "yaxis": {
            "tickvals": list(range(len(lanes))),
            "ticktext": list(lanes),
            "range": [len(lanes) - 0.4, -0.6],
            "fixedrange": True,
            "automargin": True,
            "zeroline": False,
        },
    }
