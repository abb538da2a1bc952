"""The operators' look at the pool: each device, who holds it, how busy it has been."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.views.decorators.http import require_GET

from backend.common.errors import NotFound
from backend.pool.models import SubStage
from backend.pool.selectors import devices, open_placements, waiting_jobs
from backend.tenants.access import Actor
from frontend.web.doors import for_members, page

#: Utilization is taken over the minutes before now.
WINDOW = timedelta(minutes=5)


@require_GET
@for_members
def pool(request: HttpRequest, actor: Actor) -> HttpResponse:
    """For everybody but operators there is no such page."""
    if not request.user.is_staff:
        raise NotFound("There is no such page.")
    holders = {
        placement.device_id: placement for placement in open_placements().select_related("attempt__job")
    }
    busy = _busy_share()
    lanes: list[dict[str, Any]] = [
        {"device": device, "holder": holders.get(device.pk), "busy": busy.get(device.pk, 0.0)}
        for device in devices()
    ]
    context = {
        "lanes": lanes,
        "held": len(holders),
        "utilization": sum(lane["busy"] for lane in lanes) / len(lanes) if lanes else 0.0,
        "queued": list(waiting_jobs().select_related("organization")[:50]),
        "minutes": WINDOW.seconds // 60,
    }
    return page(request, actor, "web/pool.html", context)


def _busy_share() -> dict[int, float]:
    """Device -> percent of the last minutes that sub-stages computed on it, by share."""
    now = timezone.now()
    since = now - WINDOW
    recent = SubStage.objects.filter(device__isnull=False, started_at__isnull=False).filter(
        Q(ended_at__gte=since) | Q(ended_at__isnull=True)
    )
    sums: dict[int, float] = {}
    for device_id, share, start, end in recent.values_list("device_id", "share", "started_at", "ended_at"):
        seconds = ((end or now) - max(start, since)).total_seconds()
        sums[device_id] = sums.get(device_id, 0.0) + share * seconds
    return {device_id: min(100.0, 100 * total / WINDOW.total_seconds()) for device_id, total in sums.items()}
