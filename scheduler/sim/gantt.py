"""``python -m scheduler.sim gantt [TRACE.json] --out F.html``: devices by time, one policy above the other.

A bar is a sub-stage on a device; its height is its part of the device. Colours are tenants, shades and
patterns kinds of sub-stages. The page holds plotly.js, so that it opens without a network. Only this program
needs plotly.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from scheduler.core.state import POLICIES, Kind
from scheduler.sim.engine import simulate
from scheduler.sim.replay import policies
from scheduler.sim.result import Result
from scheduler.sim.scenario import Scenario
from scheduler.sim.trace import EXAMPLE, read
from scheduler.sim.usage import Piece, pieces

Figure = dict[str, Any]

#: Dark enough for white lines, told apart by the colour-blind (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F3C8D", "#666666")
#: How much of white is mixed in, and the pattern.
LOOKS: Mapping[Kind, tuple[float, str]] = {
    Kind.PREFILL: (0.0, "|"),
    Kind.DECODE: (0.0, ""),
    Kind.TAIL: (0.45, ""),
    Kind.LOGPROB: (0.3, "/"),
    Kind.UPDATE: (0.0, "x"),
    Kind.SYNC: (0.7, "."),
}
#: Part of a device's lane that bars fill.
FILLED = 0.9
LANE_PIXELS = 80


def figure(scenario: Scenario, results: Sequence[Result]) -> Figure:
    """The first result on top; all have the same time axis."""
    data = [trace for row, result in enumerate(results) for trace in _traces(scenario, result, row)]
    last = max((interval.end for result in results for interval in result.timeline), default=0.0)
    layout: Figure = {
        "title": {"text": scenario.name},
        "barmode": "overlay",
        "bargap": 0,
        "height": 160 + LANE_PIXELS * scenario.devices * len(results),
        "legend": {"groupclick": "togglegroup"},
        "annotations": [_caption(result, row, len(results)) for row, result in enumerate(results)],
        "xaxis": {"title": {"text": "seconds"}, "range": [0, last], "anchor": _axis("y", len(results) - 1)},
    }
    for row in range(len(results)):
        layout[f"yaxis{row + 1 if row else ''}"] = _lanes(scenario, row, len(results))
    return {"data": data, "layout": layout}


def _axis(letter: str, row: int) -> str:
    return f"{letter}{row + 1 if row else ''}"


def _domain(row: int, rows: int) -> tuple[float, float]:
    """From the bottom, where 0 is, leaving room for a caption above each row."""
    gap = 0.08
    height = (1 - gap * rows) / rows
    bottom = (rows - 1 - row) * (height + gap)
    return bottom, bottom + height


def _lanes(scenario: Scenario, row: int, rows: int) -> Figure:
    return {
        "domain": list(_domain(row, rows)),
        "tickvals": [place + 0.5 for place in range(scenario.devices)],
        "ticktext": list(scenario.device_names),
        "range": [scenario.devices, 0],
        "fixedrange": True,
    }


def _caption(result: Result, row: int, rows: int) -> Figure:
    text = (
        f"<b>{result.policy}</b>: {result.throughput:,.0f} tokens/s, {result.makespan:,.0f} s,"
        f" devices used {result.used / result.capacity:.0%}"
    )
    place = {"x": 0, "y": _domain(row, rows)[1], "xref": "paper", "yref": "paper"}
    return {"text": text, **place, "xanchor": "left", "yanchor": "bottom", "showarrow": False}


def _traces(scenario: Scenario, result: Result, row: int) -> list[Figure]:
    """One for each tenant and kind, so that the legend can switch them."""
    own: dict[tuple[int, Kind], list[Piece]] = defaultdict(list)
    for piece in pieces(result.timeline, scenario.jobs):
        own[piece.interval.tenant, piece.interval.kind].append(piece)
    steps = {job.id: tuple(accumulate(job.step_seconds, initial=job.admitted or 0.0)) for job in result.jobs}
    return [_trace(scenario, key, own[key], row, steps) for key in sorted(own, key=_in_legend)]


def _in_legend(key: tuple[int, Kind]) -> tuple[int, int]:
    """Tenants by number, kinds as they follow each other in a step."""
    return key[0], list(LOOKS).index(key[1])


def _trace(
    scenario: Scenario,
    key: tuple[int, Kind],
    own: Sequence[Piece],
    row: int,
    steps: Mapping[str, tuple[float, ...]],
) -> Figure:
    tenant, kind = key
    lanes = {name: place for place, name in enumerate(scenario.device_names)}
    mixed, pattern = LOOKS[kind]
    colour = COLOURS[scenario.tenants.index(tenant) % len(COLOURS)]
    return {
        "type": "bar",
        "orientation": "h",
        "name": str(kind),
        "legendgroup": f"tenant {tenant}",
        "legendgrouptitle": {"text": f"tenant {tenant}"},
        "showlegend": row == 0,
        "yaxis": _axis("y", row),
        "base": [round(piece.start, 3) for piece in own],
        "x": [round(piece.end - piece.start, 3) for piece in own],
        "y": [_middle(lanes[piece.interval.device], piece) for piece in own],
        "width": [piece.height * FILLED for piece in own],
        "marker": {"color": tinted(colour, mixed), "pattern": {"shape": pattern, "size": 5}},
        "hovertext": [_hover(piece, steps[piece.interval.job]) for piece in own],
        "hoverinfo": "text",
    }


def _middle(lane: int, piece: Piece) -> float:
    return lane + (1 - FILLED) / 2 + (piece.bottom + piece.height / 2) * FILLED


def tinted(colour: str, white: float) -> str:
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def _hover(piece: Piece, ends: Sequence[float]) -> str:
    """Steps are counted from 0; of asynchronous jobs it is the step whose update comes next."""
    own = piece.interval
    return (
        f"{own.job} (tenant {own.tenant})<br>step {bisect_right(ends, own.start) - 1}, {own.kind}"
        f"{f', {own.batch} sequences' if own.batch > 1 else ''}<br>{piece.height:.0%} of {own.device}"
        f"<br>{piece.start:.1f} to {piece.end:.1f} s"
    )


# ---------------------------------------------------------------- the program


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, nargs="?", default=EXAMPLE, metavar="TRACE.json")
    parser.add_argument("--out", type=Path, required=True, metavar="F.html")
    parser.add_argument("--policy", type=policies, default=["exclusive", "lookahead"], metavar="P,..")
    parser.add_argument("--seed", type=int, default=0, help="of the draws of response lengths")


def run(options: argparse.Namespace) -> int:
    try:
        to_html = importlib.import_module("plotly.io").to_html
    except ModuleNotFoundError:
        print("error: this picture needs plotly: pip install plotly", file=sys.stderr)
        return 2
    scenario = read(options.trace)
    results = [simulate(scenario, POLICIES[name], options.seed) for name in options.policy]
    options.out.write_text(to_html(figure(scenario, results), include_plotlyjs=True), encoding="utf-8")
    print(f"{options.out}: {scenario.name}, {' above '.join(options.policy)}")
    return 0
