"""The operators' timeline as a plotly figure: pure functions of rows.

One lane per device, in which sub-stages lie upon each other by their part of it; colours tell tenants,
patterns kinds. Below them a lane of attempts that are held back on purpose. Lines lead from the place where
sequences left to the place where they went on; marks above a lane are decisions, with their reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

from backend.pool.models import Decision
from frontend.web.cluster_rows import Column, Turn, Wait, Window
from frontend.web.figures import KIND_WORDS, LANE_HEIGHT, Figure, bars, iso
from frontend.web.lanes import Piece, Slice, stack

#: Okabe and Ito's palette with Tol's wine and olive, as for kinds on the tenants' pages.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999933", "#a3406f")
#: Plotly's pattern of each kind that runs on devices.
PATTERNS = {"prefill": "|", "decode": "", "tail": ".", "logprob": "-", "update": "/", "sync": "x"}
#: Kind of decision -> plotly's symbol, the same as a character, and what it says.
MARKS = {
    "wait": ("circle-open", "○", "Held back"),
    "yield": ("triangle-down", "▼", "Made room"),
    "merge": ("diamond", "◆", "Merged"),
    "rehome": ("star", "★", "New home"),
}
HELD_LANE = "held back"
IDLE = "rgba(138,143,152,0.13)"
#: Names traces whose colour is that of the page's text, which the browser knows.
INK = "ink"


def tenant_colours(tenants: Iterable[int]) -> dict[int, str]:
    """A colour for each tenant, the same from one look to the next as far as colours suffice.

    Each has a place of its own in the palette and takes the next free one where another has it. Beyond the
    palette's length colours are shared.
    """
    taken: dict[int, int] = {}
    size = len(PALETTE)
    for tenant in sorted(set(tenants)):
        own = tenant % size
        free = [(own + step) % size for step in range(size) if (own + step) % size not in taken.values()]
        taken[tenant] = free[0] if free else own
    return {tenant: PALETTE[place] for tenant, place in taken.items()}


def cluster_figure(
    *,
    lanes: Mapping[str, str],
    work: Sequence[Turn] | Sequence[Column],
    waits: Sequence[Wait],
    decisions: Sequence[Decision],
    colours: Mapping[int, str],
    window: Window,
) -> Figure:
    """``lanes``: device -> how its lane is called. ``work``: turns, or means over columns of time."""
    order = [*lanes, HELD_LANE]
    traces = [
        _work_trace(stack(_piece(row, window) for row in work), order, colours),
        _waits_trace(stack(_wait_pieces(waits, window)), order, colours),
        _moves_trace([row for row in work if isinstance(row, Turn)], order, window),
        _decisions_trace(decisions, order),
    ]
    return {"data": traces, "layout": _layout([*lanes.values(), HELD_LANE], window)}


def _piece(row: Turn | Column, window: Window) -> Piece:
    start, end = max(row.start, window.since), min(row.end or window.until, window.until)
    order = (row.tenant, row.job, row.worker, row.start) if isinstance(row, Turn) else (row.tenant,)
    return Piece(row.device, start, end, row.part, order, row)


def _work_trace(slices: Sequence[Slice], order: Sequence[str], colours: Mapping[int, str]) -> dict[str, Any]:
    rows = [part.piece.row for part in slices]
    kinds = [row.kind if isinstance(row, Turn) else "decode" for row in rows]
    return {
        **bars(slices, order),
        "name": "Work",
        "customdata": [turn_told(row) if isinstance(row, Turn) else column_told(row) for row in rows],
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {
            "color": [colours[row.tenant] for row in rows],
            "pattern": {
                "shape": [PATTERNS.get(kind, "") for kind in kinds],
                "fillmode": "overlay",
                "size": 6,
                "solidity": 0.3,
            },
            "line": {"width": 0},
        },
    }


def turn_told(turn: Turn) -> str:
    seconds = f"{(turn.end - turn.start).total_seconds():.2f} s" if turn.end else "running"
    told = [
        f"<b>{escape(turn.tenant_name, quote=False)}</b> · {_named(turn.title, turn.job)}",
        f"{KIND_WORDS[turn.kind]} · step {turn.step} · worker {turn.worker} · {turn.sequences} sequences",
        f"{100 * turn.part:.0f} % of {escape(turn.device, quote=False)} · {seconds}",
    ]
    if turn.part < turn.share:
        told.append(f"in a batch that has {100 * turn.share:.0f} %")
    if turn.moves_to:
        told.append("its sequences went on elsewhere")
    return "<br>".join([*told, *_reason(turn.reason)])


def column_told(column: Column) -> str:
    tenant, device = (escape(name, quote=False) for name in (column.tenant_name, column.device))
    return f"<b>{tenant}</b><br>{100 * column.part:.1f} % of {device} on average"


def _named(title: str, job: str) -> str:
    return f"{escape(title, quote=False)} ({job})" if title else job


def _reason(text: str) -> list[str]:
    return [f"<i>{escape(text, quote=False)}</i>"] if text else []


# ---------------------------------------------------------------- waits


def _wait_pieces(waits: Sequence[Wait], window: Window) -> list[Piece]:
    """All bars are as thick as leaves room for as many as ever wait at once."""
    spans = [(max(wait.since, window.since), wait.until or window.until, wait) for wait in waits]
    part = 1 / most_at_once([(start, end) for start, end, _ in spans])
    return [Piece(HELD_LANE, start, end, part, (w.tenant, w.job, start), w) for start, end, w in spans]


def most_at_once(spans: Sequence[tuple[datetime, datetime]]) -> int:
    """How many of the spans there are at one instant at most, and at least 1."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    number, most = 0, 1
    for _, change in changes:
        number += change
        most = max(most, number)
    return most


def _waits_trace(slices: Sequence[Slice], order: Sequence[str], colours: Mapping[int, str]) -> dict[str, Any]:
    rows = [part.piece.row for part in slices]
    return {
        **bars(slices, order),
        "name": "Held back",
        "customdata": [wait_told(wait) for wait in rows],
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {"color": [colours[wait.tenant] for wait in rows], "opacity": 0.6, "line": {"width": 0}},
    }


def wait_told(wait: Wait) -> str:
    if wait.until is not None:
        span = f"held back {(wait.until - wait.since).total_seconds():.2f} s"
    elif wait.at_most is not None:
        span = f"held back until {wait.at_most:%H:%M:%S} UTC at most"
    else:
        span = "held back"
    head = f"<b>{escape(wait.tenant_name, quote=False)}</b> · {_named(wait.title, wait.job)}"
    return "<br>".join([head, span, *_reason(wait.reason)])


# ---------------------------------------------------------------- moves and decisions


def moves(turns: Sequence[Turn], window: Window) -> list[tuple[datetime, Turn, Turn]]:
    """(when, from, to) of sequences that left: the last turn of their sub-stage, and that which took them."""
    by_node: dict[tuple[int, str], list[Turn]] = {}
    for turn in sorted(turns, key=lambda turn: turn.start):
        by_node.setdefault((turn.attempt, turn.node), []).append(turn)
    found = []
    for (attempt, _), of_node in by_node.items():
        source = of_node[-1]
        targets = by_node.get((attempt, source.moves_to), [])
        if source.end is None or not targets:
            continue
        lasting = [turn for turn in targets if turn.end is None or turn.end > source.end]
        found.append((max(source.end, window.since), source, lasting[0] if lasting else targets[-1]))
    return found


def _moves_trace(turns: Sequence[Turn], order: Sequence[str], window: Window) -> dict[str, Any]:
    x: list[str | None] = []
    y: list[int | None] = []
    told: list[str | None] = []
    symbols: list[str] = []
    for when, source, target in moves(turns, window):
        lanes = [order.index(turn.device) for turn in (source, target)]
        words = (
            f"<b>{escape(source.tenant_name, quote=False)}</b> · {_named(source.title, source.job)}<br>"
            f"sequences went on from {escape(source.device, quote=False)} "
            f"on {escape(target.device, quote=False)}"
        )
        x += [iso(when), iso(when), None]
        y += [*lanes, None]
        told += [words, words, None]
        symbols += ["circle", "triangle-up" if lanes[1] < lanes[0] else "triangle-down", "circle"]
    return {
        "type": "scatter",
        "name": "Moves",
        "meta": INK,
        "mode": "lines+markers",
        "x": x,
        "y": y,
        "customdata": told,
        "hovertemplate": "%{customdata}<extra></extra>",
        "line": {"width": 2},
        "marker": {"symbol": symbols, "size": 10},
    }


def _decisions_trace(decisions: Sequence[Decision], order: Sequence[str]) -> dict[str, Any]:
    shown = [(decision, _lane_of(decision, order)) for decision in decisions]
    return {
        "type": "scatter",
        "name": "Decisions",
        "meta": INK,
        "mode": "markers",
        "x": [iso(decision.at) for decision, _ in shown],
        "y": [order.index(lane) - LANE_HEIGHT / 2 - 0.05 for _, lane in shown],
        "customdata": [decision_told(decision) for decision, _ in shown],
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {"symbol": [MARKS[decision.kind][0] for decision, _ in shown], "size": 9},
    }


def _lane_of(decision: Decision, order: Sequence[str]) -> str:
    device = decision.device.name if decision.device else HELD_LANE
    return device if device in order else HELD_LANE


def decision_told(decision: Decision) -> str:
    told = [f"<b>{MARKS[decision.kind][2]}</b>"]
    if decision.job is not None:
        tenant = escape(decision.job.organization.name, quote=False)
        told.append(f"{tenant} · {_named(decision.job.name, decision.job.public_id)}")
    return "<br>".join([*told, *_reason(decision.reason)])


def _layout(names: Sequence[str], window: Window) -> dict[str, Any]:
    half = LANE_HEIGHT / 2
    return {
        "barmode": "overlay",
        "hovermode": "closest",
        "uirevision": f"{window.seconds:.0f}",
        "height": 76 + 72 * len(names),
        "margin": {"l": 16, "r": 12, "t": 12, "b": 44},
        "showlegend": False,
        "shapes": [
            {
                "type": "rect",
                "layer": "below",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": lane - half,
                "y1": lane + half,
                "fillcolor": IDLE,
                "line": {"width": 0},
            }
            for lane in range(len(names))
        ],
        "xaxis": {
            "type": "date",
            "title": {"text": "UTC", "standoff": 4},
            "range": [iso(window.since), iso(window.until)],
            "nticks": 6,
            "tickangle": 0,
        },
        "yaxis": {
            "tickvals": list(range(len(names))),
            "ticktext": list(names),
            "range": [len(names) - 0.45, -0.65],
            "fixedrange": True,
            "automargin": True,
            "zeroline": False,
            "showgrid": False,
        },
    }
