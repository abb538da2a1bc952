"""Uploads: streamed, checked row by row, and gone without a trace when they cannot be used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.catalog.access import file_access
from backend.catalog.models import File
from backend.catalog.selectors import files_page
from backend.catalog.services import file_create
from backend.common.errors import Forbidden, InvalidRequest, NotFound, TooLarge
from tests import factories

GOOD = "".join(json.dumps(row) + "\n" for row in factories.rows_with_answers(3)).encode()


def create(
    actor, content: bytes = GOOD, *, filename: str = "train.jsonl", purpose: str = "fine-tune"
) -> File:
    half = len(content) // 2
    return file_create(
        actor=actor, filename=filename, purpose=purpose, chunks=[content[:half], content[half:]]
    )


def left_behind(settings) -> list[Path]:
    return [path for path in settings.FILES_DIR.rglob("*") if path.is_file()]


def test_a_good_file_is_kept_as_it_came(acme, settings):
    file = create(acme.member)
    assert Path(file.path).read_bytes() == GOOD
    assert Path(file.path).parent == settings.FILES_DIR / acme.organization.public_id
    assert (file.rows, file.bytes) == (3, len(GOOD))
    assert file.fields == {"messages": 3, "answer": 3}
    assert file.sha256 == hashlib.sha256(GOOD).hexdigest()
    assert left_behind(settings) == [Path(file.path)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (GOOD * 47 + GOOD[: GOOD.index(b"\n") + 1] + b"{oops}\n", "line 143 column 2"),
        (GOOD + b'{"answer": "1"}\n', "row 4 has no field messages"),
        (GOOD + b"\xff\xfe\n", "not UTF-8 at line 4"),
        (b"[1]\n", "line 1 is not a JSON object"),
    ],
    ids=["empty", "not JSON", "no messages", "not UTF-8", "not an object"],
)
def test_a_bad_file_is_refused_by_line_and_leaves_nothing(content, words, acme, settings):
    with pytest.raises(InvalidRequest, match=words) as caught:
        create(acme.member, content)
    assert (caught.value.param, caught.value.code) == ("file", "invalid_file")
    assert not File.objects.exists()
    assert left_behind(settings) == []


def test_the_first_of_many_errors_is_told_with_their_number(acme):
    with pytest.raises(InvalidRequest, match=r"line 1 .*\(2 more lines with errors\)"):
        create(acme.member, b"1\n2\n3\n")


def test_a_file_too_large_is_stopped_where_it_exceeds(acme, settings):
    settings.MAX_UPLOAD_BYTES = 10
    taken = []

    def chunks() -> Iterator[bytes]:
        for number in range(10):
            taken.append(number)
            yield b"12345678"

    with pytest.raises(TooLarge):
        file_create(actor=acme.member, filename="a", purpose="fine-tune", chunks=chunks())
    assert taken == [0, 1]
    assert left_behind(settings) == []


def test_a_client_that_breaks_off_leaves_nothing(acme, settings):
    def chunks() -> Iterator[bytes]:
        yield GOOD
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        file_create(actor=acme.member, filename="a", purpose="fine-tune", chunks=chunks())
    assert left_behind(settings) == []


def test_a_row_that_cannot_be_stored_leaves_no_bytes(acme, settings, monkeypatch):
    def fail(**fields):
        raise RuntimeError("no database")

    monkeypatch.setattr(File.objects, "create", fail)
    with pytest.raises(RuntimeError):
        create(acme.member)
    assert left_behind(settings) == []


def test_only_training_files_are_taken(acme):
    with pytest.raises(InvalidRequest) as caught:
        create(acme.member, purpose="assistants")
    assert caught.value.param == "purpose"


@pytest.mark.parametrize(
    ("given", "kept"),
    [("../../etc/passwd", "passwd"), ("C:\\data\\a.jsonl", "a.jsonl"), ("ü.jsonl", "ü.jsonl")],
)
def test_a_filename_is_a_name_only(given, kept, acme):
    assert create(acme.member, filename=given).filename == kept


@pytest.mark.parametrize("name", ["", "/", "a\0b", "a\nb"])
def test_a_filename_without_a_name_is_refused(name, acme):
    with pytest.raises(InvalidRequest):
        create(acme.member, filename=name)


def test_viewers_upload_nothing(acme):
    with pytest.raises(Forbidden):
        create(acme.viewer)


def test_a_file_is_its_tenants_only(acme, northwind):
    file = create(acme.member)
    assert file_access(acme.viewer, file.public_id) == file
    with pytest.raises(Forbidden):
        file_access(acme.viewer, file.public_id, write=True)
    with pytest.raises(NotFound):
        file_access(northwind.owner, file.public_id, write=True)
    assert files_page(northwind.organization).items == []
    assert files_page(acme.organization).items == [file]
