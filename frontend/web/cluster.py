"""The operators' look at the cluster: what every device computes, for whom, what moved or waits, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template.loader import render_to_string
from django.utils import timezone
from django.views.decorators.http import require_GET

from backend.jobs.models import Job
from backend.pool.models import Device, Placement
from backend.pool.selectors import devices, open_placements, waiting_jobs
from backend.pool.states import DeviceState
from backend.tenants.access import Actor
from frontend.web import cluster_rows as rows
from frontend.web.cluster_figure import MARKS, PATTERNS, cluster_figure, tenant_colours
from frontend.web.cluster_rows import Turn, Window
from frontend.web.doors import for_operators, page
from frontend.web.figures import KIND_WORDS

#: Spans the timeline offers, in minutes.
SPANS = {1: "1 min", 5: "5 min", 15: "15 min", 60: "1 h", 360: "6 h", 1440: "24 h"}
SPAN = 5
#: Longer spans (minutes), and more allotments than these, are drawn as means over so many columns of time.
LONGEST_EXACT = 60
MAX_TURNS = 2000
COLUMNS = 240
MAX_MARKS = 300
DECISIONS = 50
QUEUED = 50
#: The page asks again after a part of its span, within these seconds.
ASKS_PER_SPAN = 150
EVERY_S = (2.0, 60.0)
DECISION_WORDS = {
    **{kind: word for kind, (_, _, word) in MARKS.items()},
    "admit": "Admitted",
    "place": "Placed",
    "evict": "Unloaded",
}


@require_GET
@for_operators
def cluster(request: HttpRequest, actor: Actor) -> HttpResponse:
    look = _look(SPAN)
    context = {
        **look.parts,
        "spans": SPANS.items(),
        "span": SPAN,
        "figure": {"figure": look.figure, "every_ms": _every_ms(SPAN)},
        "kinds": [(kind, KIND_WORDS[kind]) for kind in PATTERNS],
        "marks": [(character, word) for _, character, word in MARKS.values()],
    }
    return page(request, actor, "web/cluster.html", context)


@require_GET
@for_operators
def cluster_live(request: HttpRequest, actor: Actor) -> HttpResponse:
    """The page's parts as they are now, by the ids of their places, and the figure over ``?minutes=``."""
    asked = request.GET.get("minutes", "")
    minutes = int(asked) if asked in map(str, SPANS) else SPAN
    look = _look(minutes)
    html = {
        name: render_to_string(f"web/part/{name}.html", look.parts)
        for name in ("cluster_now", "cluster_tenants", "cluster_decisions")
    }
    return JsonResponse({"figure": look.figure, "every_ms": _every_ms(minutes), "html": html})


def _every_ms(minutes: int) -> int:
    least, most = EVERY_S
    return int(1000 * min(most, max(least, minutes * 60 / ASKS_PER_SPAN)))


@dataclass(frozen=True)
class Look:
    figure: dict[str, Any]
    parts: dict[str, Any]


def _look(minutes: int) -> Look:
    window = rows.window_before(timezone.now(), minutes)
    pool = list(devices())
    turns = rows.turns(pool, window, MAX_TURNS + 1) if minutes <= LONGEST_EXACT else []
    coarse = minutes > LONGEST_EXACT or len(turns) > MAX_TURNS
    work = rows.columns(pool, window, COLUMNS) if coarse else turns
    now, waits = rows.turns_now(pool, window.until), rows.waits(window, MAX_MARKS)
    names = {row.tenant: row.tenant_name for row in (*work, *now, *waits)}
    colours = tenant_colours(names)
    figure = cluster_figure(
        lanes={device.name: _lane_name(device) for device in pool},
        work=work,
        waits=waits,
        decisions=rows.marked_decisions(window, MAX_MARKS),
        colours=colours,
        window=window,
    )
    cards = _cards(pool, window, now, colours)
    parts = {
        "cards": cards,
        "busy": percent(sum(card.allotted_s for card in cards), sum(card.capacity_s for card in cards)),
        "span_word": SPANS[minutes],
        "tenants": [(name, colours[tenant]) for tenant, name in sorted(names.items())],
        "column_s": window.seconds / COLUMNS if coarse else None,
        "decisions": _told(rows.latest_decisions(DECISIONS)),
        "queued": _queued(),
    }
    return Look(figure, parts)


def _lane_name(device: Device) -> str:
    state = condition(device)
    return device.name if state == "in service" else f"{device.name}<br>{state}"


def condition(device: Device) -> str:
    if device.state == DeviceState.LOST:
        return "lost"
    return "draining" if device.draining else "in service"


def percent(part: float, whole: float) -> float:
    """0 where there is no whole."""
    return 100 * part / whole if whole else 0.0


# ---------------------------------------------------------------- devices


@dataclass(frozen=True)
class Computing:
    turn: Turn
    kind: str
    colour: str
    percent: float


@dataclass(frozen=True)
class Card:
    """A device now and over the window."""

    device: Device
    condition: str
    holder: Placement | None
    computing: list[Computing]
    batches: list[int]
    allotted_s: float
    capacity_s: float
    moved: int
    yielded: int

    @property
    def busy(self) -> float:
        return percent(self.allotted_s, self.capacity_s)

    @property
    def free(self) -> float:
        return max(0.0, 100.0 - sum(entry.percent for entry in self.computing))


def _cards(
    pool: Sequence[Device], window: Window, now: Sequence[Turn], colours: dict[int, str]
) -> list[Card]:
    allotted = rows.allotted_seconds(pool, window)
    capacity = rows.capacity_seconds(pool, window)
    moved, yielded = rows.moved_away(pool, window), rows.made_room(pool, window)
    holders = {hold.device_id: hold for hold in open_placements().select_related("attempt__job")}
    cards = []
    for device in pool:
        here = [turn for turn in now if turn.device == device.name]
        cards.append(
            Card(
                device=device,
                condition=condition(device),
                holder=holders.get(device.pk),
                computing=[
                    Computing(turn, KIND_WORDS[turn.kind], colours[turn.tenant], 100 * turn.part)
                    for turn in here
                ],
                batches=batches(here),
                allotted_s=allotted.get(device.pk, 0.0),
                capacity_s=capacity.get(device.pk, 0.0),
                moved=moved.get(device.pk, 0),
                yielded=yielded.get(device.pk, 0),
            )
        )
    return cards


def batches(here: Sequence[Turn]) -> list[int]:
    """How many jobs compute in each batch of several, of what runs on one device."""
    jobs: dict[str, set[str]] = {}
    for turn in here:
        if turn.slot:
            jobs.setdefault(turn.slot, set()).add(turn.job)
    return sorted((len(of) for of in jobs.values() if len(of) > 1), reverse=True)


def _queued() -> list[Job]:
    return list(waiting_jobs().select_related("organization")[:QUEUED])


def _told(decisions: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(DECISION_WORDS.get(decision.kind, decision.kind), decision) for decision in decisions]
