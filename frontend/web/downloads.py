"""A checkpoint to take home."""

from __future__ import annotations

from pathlib import Path

from django.http import HttpRequest, HttpResponseBase
from django.views.decorators.http import require_GET

from backend.api.downloads import checkpoint_download
from backend.jobs.access import job_checkpoint_access
from backend.tenants.access import Actor
from frontend.web.doors import for_members


@require_GET
@for_members
def checkpoint(request: HttpRequest, actor: Actor, job_id: str, checkpoint_id: str) -> HttpResponseBase:
    produced = job_checkpoint_access(actor, job_id, checkpoint_id)
    return checkpoint_download(job_id, Path(produced.checkpoint.path))
