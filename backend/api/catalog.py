"""``/v1/files``, ``/v1/models``, ``/v1/datasets``."""

from __future__ import annotations

from pathlib import Path

from django.conf import settings
from django.core.files.uploadedfile import UploadedFile
from django.http import StreamingHttpResponse
from rest_framework.parsers import MultiPartParser
from rest_framework.request import Request
from rest_framework.response import Response

from backend.api import shapes
from backend.api.base import FORM_BYTES, ApiView, actor_of, listed, one_of, whole
from backend.api.downloads import download, file_chunks
from backend.catalog.access import file_access, model_access
from backend.catalog.selectors import datasets_all, files_page, models_all
from backend.catalog.services import CHECKS, PURPOSE, file_create
from backend.common.errors import InvalidRequest, NotFound
from backend.jobs.services import file_delete
from backend.tenants.access import require_write


class Files(ApiView):
    parser_classes = [MultiPartParser]
    max_body_bytes = settings.MAX_UPLOAD_BYTES + FORM_BYTES

    def get(self, request: Request) -> Response:
        page = files_page(
            actor_of(request).organization,
            limit=whole(request, "limit", 20),
            after=request.query_params.get("after"),
            purpose=one_of(request, "purpose", CHECKS),
        )
        return Response(listed(page.items, shapes.file, has_more=page.has_more))

    def post(self, request: Request) -> Response:
        actor = actor_of(request)
        require_write(actor)  # before the body is read
        upload = request.data.get("file")
        if not isinstance(upload, UploadedFile):
            raise InvalidRequest("Send the file as the part 'file' of a multipart form.", param="file")
        row = file_create(
            actor=actor,
            filename=upload.name or "",
            purpose=request.data.get("purpose", PURPOSE),
            chunks=upload.chunks(),
        )
        return Response(shapes.file(row))


class FileOne(ApiView):
    def get(self, request: Request, file_id: str) -> Response:
        return Response(shapes.file(file_access(actor_of(request), file_id)))

    def delete(self, request: Request, file_id: str) -> Response:
        actor = actor_of(request)
        file_delete(actor=actor, file=file_access(actor, file_id, write=True))
        return Response({"id": file_id, "object": "file", "deleted": True})


class FileContent(ApiView):
    def get(self, request: Request, file_id: str) -> StreamingHttpResponse:
        row = file_access(actor_of(request), file_id)
        path = Path(row.path)
        if not path.exists():
            raise NotFound("The file's content is gone.")
        return download(
            file_chunks(path),
            size=path.stat().st_size,
            filename=f"{row.public_id}.jsonl",
            content_type="application/jsonl",
        )


class Models(ApiView):
    def get(self, request: Request) -> Response:
        return Response(listed(models_all(actor_of(request).organization), shapes.model))


class ModelOne(ApiView):
    def get(self, request: Request, name: str) -> Response:
        return Response(shapes.model(model_access(actor_of(request), name)))


class Datasets(ApiView):
    def get(self, request: Request) -> Response:
        return Response(listed(datasets_all(), shapes.dataset))
