"""A folder as one tar, made while it is sent: memory for a chunk, whatever the folder's size."""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from django.db import connections
from django.http import StreamingHttpResponse

from backend.common.errors import NotFound

CHUNK = 1 << 18
BLOCK = 512
END = b"\0" * 2 * BLOCK

#: (path inside the tar, where its bytes are, their number)
Member = tuple[str, Path, int]


def members(folder: Path, root: str) -> list[Member]:
    """The folder's files below the name ``root``, in a stable order. A link is no file of the folder."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return [(f"{root}/{path.relative_to(folder).as_posix()}", path, path.stat().st_size) for path in found]


def tar_bytes(entries: list[Member]) -> int:
    return sum(len(_header(name, size)) + _padded(size) for name, _, size in entries) + len(END)


def tar_chunks(entries: list[Member]) -> Iterator[bytes]:
    """The archive. A file that shrank or vanished meanwhile breaks the stream rather than lie about it."""
    for name, path, size in entries:
        yield _header(name, size)
        sent = 0
        with path.open("rb") as stream:
            while chunk := stream.read(min(CHUNK, size - sent)):
                sent += len(chunk)
                yield chunk
        if sent != size:
            raise OSError(f"{path} has {sent} bytes, not {size}")
        yield b"\0" * (_padded(size) - size)
    yield END


def file_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            yield chunk


def download(
    chunks: Iterator[bytes], *, size: int, filename: str, content_type: str
) -> StreamingHttpResponse:
    """A response that reads ``chunks`` off the event loop, the database connection given back before."""
    connections.close_all()
    response = StreamingHttpResponse(_off_the_loop(chunks), content_type=content_type)
    response["Content-Length"] = str(size)
    response["Content-Disposition"] = f'attachment; filename="{filename}"'
    return response


async def _off_the_loop(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        yield chunk


def checkpoint_download(job_id: str, folder: Path) -> StreamingHttpResponse:
    """A checkpoint's folder as a tar, below the folder's own name."""
    if not folder.is_dir():
        raise NotFound("The checkpoint's content is gone.")
    entries = members(folder, root=folder.name)
    return download(
        tar_chunks(entries),
        size=tar_bytes(entries),
        filename=f"{job_id}-{folder.name}.tar",
        content_type="application/x-tar",
    )


def _header(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size = size
    return entry.tobuf(tarfile.GNU_FORMAT)


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
