"""Template filters over ``frontend.web.words``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from django import template
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

from backend.jobs.models import Job
from backend.jobs.states import JobStatus
from frontend.web import words

register = template.Library()

register.filter("usd", words.usd)
register.filter("duration", words.duration)
register.filter("compact", words.compact)
register.filter("bytes", words.size)
register.filter("reading", words.reading)
register.filter("why", words.why)
register.filter("job_title", words.title)
register.filter("data_name", words.data_name)
register.filter("percent_done", words.percent_done)
register.filter("event_text", words.event_text)
register.filter("setting", words.setting)


@register.filter
def percent(share: float) -> str:
    return f"{100 * share:.0f}"


@register.filter
def as_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


@register.filter
def at(mapping: Mapping[str, Any], key: str) -> Any:
    """``mapping[key]`` for keys that hold dots; empty where there is none."""
    return mapping.get(key, "")


@register.filter
def status_word(job: Job) -> words.StatusWord:
    return words.STATUS_WORDS[JobStatus(job.status)]


@register.filter
def when(moment: datetime | None) -> SafeString | str:
    """A relative time that the page keeps current, with the absolute one on hover."""
    if moment is None:
        return "–"
    absolute = moment.astimezone(UTC)
    return format_html(
        '<time datetime="{}" title="{} UTC" data-ago>{}</time>',
        absolute.isoformat(timespec="seconds"),
        absolute.strftime("%Y-%m-%d %H:%M:%S"),
        words.ago(moment, timezone.now()),
    )


@register.filter
def clock(moment: datetime) -> SafeString:
    absolute = moment.astimezone(UTC)
    return format_html(
        '<time datetime="{}" title="{} UTC">{}</time>',
        absolute.isoformat(timespec="seconds"),
        absolute.strftime("%Y-%m-%d %H:%M:%S"),
        absolute.strftime("%H:%M:%S"),
    )
