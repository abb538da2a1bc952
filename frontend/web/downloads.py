"""A checkpoint to take home."""

from __future__ import annotations

from pathlib import Path

from django.http import HttpRequest, HttpResponseBase
from django.views.decorators.http import require_GET

from backend.api.downloads import download, members, tar_bytes, tar_chunks
from backend.common.errors import NotFound
from backend.jobs.access import job_checkpoint_access
from backend.tenants.access import Actor
from frontend.web.doors import for_members


@require_GET
@for_members
def checkpoint(request: HttpRequest, actor: Actor, job_id: str, checkpoint_id: str) -> HttpResponseBase:
    produced = job_checkpoint_access(actor, job_id, checkpoint_id)
    folder = Path(produced.checkpoint.path)
    if not folder.is_dir():
        raise NotFound("The checkpoint's content is gone.")
    entries = members(folder, root=folder.name)
    return download(
        tar_chunks(entries),
        size=tar_bytes(entries),
        filename=f"{job_id}-{folder.name}.tar",
        content_type="application/x-tar",
    )
