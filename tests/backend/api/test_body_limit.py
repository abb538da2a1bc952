"""Bodies through the whole ASGI application, as a server would hand them over."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.test import Client

from backend.api.base import FORM_BYTES
from backend.api.body_limit import LARGE, SMALL
from backend.asgi import application
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)

CHUNK = 1 << 20
HEAD = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
PURPOSE = b'\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--b--\r\n'


def post(path: str, chunks: list[bytes], *headers: tuple[str, str]) -> tuple[int, bytes, int]:
    """Status, content, and how many of the chunks were asked for."""
    sent: list[dict[str, Any]] = []
    taken = 0

    async def receive() -> dict[str, Any]:
        nonlocal taken
        if taken == len(chunks):
            return {"type": "http.disconnect"} if sent else await never()
        taken += 1
        return {"type": "http.request", "body": chunks[taken - 1], "more_body": taken < len(chunks)}

    async def never() -> dict[str, Any]:
        import asyncio

        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    given = [("host", "localhost"), ("content-type", "multipart/form-data; boundary=b"), *headers]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in given],
        "http_version": "1.1",
        "scheme": "http",
        "client": ("127.0.0.1", 1),
        "server": ("localhost", 80),
    }
    async_to_sync(application)(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], body, taken


def code(answer: tuple[int, bytes, int]) -> tuple[int, str]:
    content = json.loads(answer[1])
    assert set(content) == {"error"} and set(content["error"]) == {"message", "type", "param", "code"}
    return answer[0], content["error"]["code"]


def key(tenant) -> tuple[str, str]:
    return "authorization", tenant.client._credentials["HTTP_AUTHORIZATION"]


def session(person) -> tuple[str, str]:
    client = Client()
    client.force_login(person)
    return "cookie", f"sessionid={client.cookies['sessionid'].value}"


def test_a_strangers_long_body_is_not_read(anonymous):
    chunks = [b"x" * CHUNK] * 20
    answer = post("/v1/files", chunks)
    assert code(answer) == (401, "invalid_api_key")
    assert answer[2] == SMALL // CHUNK + 1
    declared = post("/v1/files", chunks, ("content-length", str(20 * CHUNK)))
    assert (declared[0], declared[2]) == (401, 0)


@pytest.mark.parametrize(
    "header",
    [("authorization", "Bearer jsk-forged"), ("cookie", "sessionid=forged"), ("cookie", 'a="b; sessionid')],
    ids=["a forged key", "a forged session", "a broken cookie"],
)
def test_what_opens_nothing_lets_nothing_in(header, db):
    assert post("/v1/files", [b"x" * CHUNK] * 20, header)[0] == 401


def test_a_viewers_key_uploads_nothing(acme):
    header = ("authorization", acme.viewer_client._credentials["HTTP_AUTHORIZATION"])
    assert code(post("/v1/files", [b"x" * CHUNK] * 20, header)) == (403, "insufficient_role")


@pytest.mark.parametrize("path", ["/v1/fine_tuning/jobs", "/v1/nothing", "/sign-in", "/v1/files/"])
def test_only_files_may_be_long(path, acme):
    answer = post(path, [b"x" * CHUNK] * 20, key(acme))
    assert code(answer) == (413, "too_large")
    assert answer[2] == SMALL // CHUNK + 1


def test_a_file_has_a_limit_too(acme, monkeypatch):
    assert LARGE > SMALL + FORM_BYTES
    monkeypatch.setattr("backend.api.body_limit.LARGE", 6 * CHUNK)
    answer = post("/v1/files", [b"x" * CHUNK] * 20, key(acme))
    assert code(answer) == (413, "too_large")
    assert answer[2] == 7
    assert post("/v1/files", [], key(acme), ("content-length", str(6 * CHUNK + 1)))[0] == 413


def test_a_long_file_is_stored_by_a_member(acme):
    row = json.dumps(factories.row("x" * 1_000)).encode() + b"\n"
    content = row * (6 * CHUNK // len(row))
    chunks = [HEAD + content[:CHUNK], *_parts(content[CHUNK:]), PURPOSE]
    length = ("content-length", str(sum(map(len, chunks))))
    status, said, _ = post("/v1/files", chunks, key(acme), length)
    assert status == 200, said
    assert json.loads(said)["bytes"] == len(content)


def test_a_person_who_is_signed_in_gets_past(acme):
    chunks = [HEAD + b"x" * CHUNK, *[b"x" * CHUNK] * 6]
    status, said, taken = post("/files", chunks, session(acme.member.user))
    # The view's own refusal: the form has no token.
    assert (status, taken) == (403, 7)
    assert b"CSRF" in said


def test_short_bodies_go_on_to_their_view(anonymous):
    assert code(post("/v1/fine_tuning/jobs", [b"{}"])) == (401, "missing_api_key")


def test_bodies_lie_below_var(settings):
    assert Path(tempfile.gettempdir()) == settings.VAR_DIR / "tmp"
    assert tempfile.gettempdir() == settings.FILE_UPLOAD_TEMP_DIR


def _parts(content: bytes) -> list[bytes]:
    return [content[start : start + CHUNK] for start in range(0, len(content), CHUNK)]
