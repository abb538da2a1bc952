"""The jobs list and the job page, whole and in fragments."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.template.loader import render_to_string
from django.utils import timezone
from django.views.decorators.http import require_GET, require_POST

from backend.catalog.selectors import datasets_all, models_all
from backend.common.errors import InvalidRequest, ServiceError
from backend.jobs.access import job_access
from backend.jobs.models import Event, Job, Sample
from backend.jobs.selectors import job_checkpoints, job_metrics, job_samples_page, job_waiting, jobs_page
from backend.jobs.services import job_cancel
from backend.metering.selectors import job_alone_micro_usd, job_cost, job_live_cost
from backend.pool.selectors import job_timeline
from backend.tenants.access import Actor
from frontend.web import figures, rows, spec_form, words
from frontend.web.doors import for_members, page
from frontend.web.form_request import curl
from frontend.web.spec_words import RL, SECTION_WORDS
from workers.spec import JobSpec

JOBS_PER_PAGE = 25
TIMELINE_ROWS = 1500
SAMPLES_PER_PAGE = 64
#: Spans the timeline offers, in minutes.
TIMELINE_SPANS = (2, 10, 60)
WAITING_HELP = (
    "Share of its steps' time in which the job wanted a device and computed on none. Waiting is free."
)
#: Types of events, what they are called, and whether they are shown at first.
EVENT_TYPES = (
    (Event.Type.STATUS, "Status", True),
    (Event.Type.MESSAGE, "Messages", True),
    (Event.Type.CHECKPOINT, "Checkpoints", True),
    (Event.Type.METRICS, "Steps", False),
    (Event.Type.SUBSTAGE, "Sub-stages", False),
    (Event.Type.COST, "Cost", False),
)


# ---------------------------------------------------------------- list


@require_GET
@for_members
def jobs(request: HttpRequest, actor: Actor) -> HttpResponse:
    try:
        found = jobs_page(actor.organization, limit=JOBS_PER_PAGE, after=request.GET.get("after"))
    except InvalidRequest:
        found = jobs_page(actor.organization, limit=JOBS_PER_PAGE)
    context = {
        "jobs": _with_sparks(found.items),
        "more_after": found.items[-1].public_id if found.has_more else None,
        "later_page": "after" in request.GET,
        "first_call": "" if found.items else _first_call(request, actor),
        "may_write": actor.role.can_write,
    }
    return page(request, actor, "web/jobs.html", context)


def _first_call(request: HttpRequest, actor: Actor) -> str:
    """A call that makes a job, for whoever has none."""
    models, datasets = models_all(actor.organization), datasets_all()
    example = {
        "model": models[0].name if models else "MODEL",
        "training_file": datasets[0].name if datasets else "FILE_ID",
    }
    return curl(example, request.build_absolute_uri("/v1"))


@require_GET
@for_members
def job_rows(request: HttpRequest, actor: Actor) -> HttpResponse:
    """The rows of ``?ids=a,b`` as they read now, by id; and the ids of the newest page, in order."""
    asked = request.GET.get("ids", "").split(",")[:JOBS_PER_PAGE]
    found = _with_sparks(rows.listed(actor.organization, asked))
    html = {job.public_id: render_to_string("web/part/job_row.html", {"job": job}) for job in found}
    return JsonResponse({"rows": html, "newest": rows.newest_ids(actor.organization, JOBS_PER_PAGE)})


def _with_sparks(found: list[Job]) -> list[Job]:
    rewards = rows.recent_rewards(found)
    for job in found:
        job.spark = words.sparkline(rewards.get(job.pk, []))
    return found


# ---------------------------------------------------------------- job


@require_GET
@for_members
def job(request: HttpRequest, actor: Actor, job_id: str) -> HttpResponse:
    found = job_access(actor, job_id)
    events = rows.recent_events(found)
    spec = JobSpec.model_validate(found.spec).model_dump(mode="json")
    context = {
        **_header(actor, found),
        "figures": _figures(found),
        "charts": figures.CHARTS,
        "events": events,
        "seen": events[0].seq if events else 0,
        "checkpoints": job_checkpoints(found),
        "config": _config(spec),
        "spec": spec,
        "event_types": EVENT_TYPES,
        "spans": TIMELINE_SPANS,
        "legend": figures.LEGEND,
    }
    return page(request, actor, "web/job.html", context)


@require_GET
@for_members
def job_header(request: HttpRequest, actor: Actor, job_id: str) -> HttpResponse:
    return render(request, "web/part/job_header.html", _header(actor, job_access(actor, job_id)))


def _header(actor: Actor, found: Job) -> dict[str, Any]:
    now = timezone.now()
    newest = rows.newest_values(found)
    paces = [values["seconds"] for values in newest if "seconds" in values]
    pace = sum(paces) / len(paces) if paces else None
    return {
        "actor": actor,
        "job": found,
        "over": words.is_over(found),
        "cost": job_live_cost(found, now)["total_micro_usd"],
        "newest": newest[0] if newest else {},
        "elapsed": words.elapsed_seconds(found, now),
        "waiting": job_waiting(found),
        "waiting_help": WAITING_HELP,
        "left": words.seconds_left(found, pace),
        "may_cancel": actor.role.can_write and not words.is_over(found),
    }


def _figures(found: Job) -> dict[str, Any]:
    """Every chart's figure, and the last step in them."""
    metrics = [asdict(row) for row in job_metrics(found, max_points=figures.MAX_POINTS)]
    cost = figures.thin(figures.cumulative_cost(rows.cost_by_step(found)))
    return {
        "figures": {
            chart.key: figures.metric_figure(cost if chart.key == figures.COST else metrics, chart)
            for chart in figures.CHARTS
        },
        "last_step": metrics[-1]["step"] if metrics else -1,
        "max_points": figures.MAX_POINTS,
    }


@require_GET
@for_members
def job_points(request: HttpRequest, actor: Actor, job_id: str) -> HttpResponse:
    """Tails of the charts' traces above ``?after=`` steps; the cost, whose past may still change, whole."""
    found = job_access(actor, job_id)
    after = _integer(request.GET.get("after"), -1)
    metrics = [asdict(row) for row in job_metrics(found, after_step=after, max_points=figures.MAX_POINTS)]
    cost = figures.thin(figures.cumulative_cost(rows.cost_by_step(found)))
    answer = {
        "points": {
            chart.key: figures.metric_points(metrics, chart)
            for chart in figures.CHARTS
            if chart.key != figures.COST
        },
        "cost": figures.metric_figure(cost, figures.BY_KEY[figures.COST]),
        "last_step": metrics[-1]["step"] if metrics else after,
    }
    return JsonResponse(answer)


@require_GET
@for_members
def job_figures(request: HttpRequest, actor: Actor, job_id: str) -> HttpResponse:
    return JsonResponse(_figures(job_access(actor, job_id)))


@require_GET
@for_members
def job_timeline_figure(request: HttpRequest, actor: Actor, job_id: str) -> HttpResponse:
    """Sub-stages of the last ``?minutes=`` before the newest; 0: as many as are drawn at all."""
    found = job_access(actor, job_id)
    minutes = _integer(request.GET.get("minutes"), TIMELINE_SPANS[0])
    recent = job_timeline(found, limit=TIMELINE_ROWS)
    return JsonResponse(
        figures.timeline_figure(figures.within(recent, minutes * 60 if minutes > 0 else None))
    )


@require_GET
@for_members
def job_samples_part(request: HttpRequest, actor: Actor, job_id: str) -> HttpResponse:
    """The first completions of ``?step=``, or of the newest; with ``?after=GROUP.INDEX`` the next ones."""
    found = job_access(actor, job_id)
    asked = request.GET.get("step", "")
    step = _integer(asked, -1) if asked else None
    seen = _seen(request.GET.get("after", "")) if step is not None else None
    after = None if step is None or seen is None else (step, *seen)
    kept = job_samples_page(found, step=step, after=after, limit=SAMPLES_PER_PAGE)
    context = {
        "job": found,
        "groups": _groups(kept.items),
        "step": kept.items[0].step if kept.items else (step if step is not None else 0),
        "last": kept.items[-1] if kept.has_more else None,
        "continued": seen[0] if seen else None,
    }
    if after is not None:
        return render(request, "web/part/sample_groups.html", context)
    context |= {"steps": rows.sample_steps(found), "follows": step is None}
    return render(request, "web/part/samples.html", context)


def _seen(text: str) -> tuple[int, int] | None:
    """Group and index of the last completion that is shown; nonsense is as if nothing were."""
    group, _, index = text.partition(".")
    seen = _integer(group, -1), _integer(index, -1)
    return seen if min(seen) >= 0 else None


def _groups(kept: list[Sample]) -> list[list[Sample]]:
    groups: dict[int, list[Sample]] = {}
    for sample in kept:
        groups.setdefault(sample.group, []).append(sample)
    return list(groups.values())


@require_GET
@for_members
def job_checkpoints_part(request: HttpRequest, actor: Actor, job_id: str) -> HttpResponse:
    found = job_access(actor, job_id)
    return render(request, "web/part/checkpoints.html", {"job": found, "checkpoints": job_checkpoints(found)})


@require_GET
@for_members
def job_cost_part(request: HttpRequest, actor: Actor, job_id: str) -> HttpResponse:
    found = job_access(actor, job_id)
    costs = job_cost(found)
    kinds = [
        (word, figures.KIND_COLOURS[kind], costs[kind])
        for kind, word in figures.KIND_WORDS.items()
        if kind in costs
    ]
    paid, alone = costs["total"]["micro_usd"], job_alone_micro_usd(found)
    context = {
        "job": found,
        "kinds": kinds,
        "total": costs["total"],
        "alone_micro_usd": alone,
        "saved_percent": round(100 * (1 - paid / alone)) if 0 < paid < alone else 0,
    }
    return render(request, "web/part/cost.html", context)


def _config(spec: dict[str, Any]) -> list[tuple[str, list[tuple[str, Any]]]]:
    """The resolved spec as headed lists of (name, value), in the order of its fields."""
    head = [(name, spec.get(name)) for name in ("model", "training_file", "start_from", "seed", "suffix")]
    worlds = [(name.capitalize(), spec[name]) for name in ("grader", "environment") if spec[name]]
    sections = [("Job", head), *((title, list(world.items())) for title, world in worlds)]
    rl, algorithm = spec["rl"], spec["rl"]["algorithm"]
    plain = [(name, value) for name, value in rl.items() if not isinstance(value, dict)]
    sections.append(("Run", _used(plain, RL, algorithm)))
    for name, value in rl.items():
        path = f"{RL}.{name}"
        if isinstance(value, dict) and algorithm not in spec_form.ignored_by(path):
            heading = SECTION_WORDS[path][0]
            sections.append((heading, _used(list(value.items()), path, algorithm)))
    return sections


def _used(pairs: list[tuple[str, Any]], prefix: str, algorithm: str) -> list[tuple[str, Any]]:
    """Without the settings that the algorithm has no use for."""
    return [
        (name, value) for name, value in pairs if algorithm not in spec_form.ignored_by(f"{prefix}.{name}")
    ]


@require_POST
@for_members
def cancel(request: HttpRequest, actor: Actor, job_id: str) -> HttpResponse:
    """Answers with the header as it is afterwards, and with the refusal if there was one."""
    found = job_access(actor, job_id, write=True)
    refusal = ""
    try:
        found = job_cancel(actor=actor, job=found)
    except ServiceError as error:
        refusal = error.message
        found = job_access(actor, job_id)
    return render(request, "web/part/job_header.html", {**_header(actor, found), "refusal": refusal})


def _integer(text: str | None, default: int) -> int:
    """What a link of ours says; anything else is as if nothing were said."""
    try:
        number = int(text or "")
    except ValueError:
        return default
    return number if abs(number) < 2**31 else default
