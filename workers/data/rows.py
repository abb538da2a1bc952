"""Check and read JSONL files, one line in memory at a time. What a row must be is ``workers.data.shapes``'s.

A byte-order mark, CRLF and empty lines at the end are accepted. Rows and lines count from 1 in messages;
``RowIndex`` counts from 0, as the protocol does.
"""

from __future__ import annotations

import io
import json
import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from workers.data.problems import (
    MAX_FIELD_CHARS,
    RowError,
    RowProblem,
    kind_of,
    refuse,
    refuse_field,
    shown,
)
from workers.data.shapes import check_passage, check_row

Source = Path | str | BinaryIO
Row = dict[str, Any]

MAX_LINE_BYTES = 1 << 20
MAX_FIELDS = 1_000
MAX_ERRORS = 20
BOM = b"\xef\xbb\xbf"

STRING_OR_CONSTANT = re.compile(r'"(?:[^"\\]|\\.)*"|(-?Infinity|NaN)')
ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass
class FileReport:
    """What a file holds; ``errors`` are the first MAX_ERRORS of ``error_count``."""

    rows: int = 0
    bytes: int = 0
    fields: dict[str, int] = field(default_factory=dict)  # top-level field -> rows that have it
    kinds: dict[str, int] = field(default_factory=dict)  # prompt, completion, preference -> rows that are one
    errors: list[RowError] = field(default_factory=list)
    error_count: int = 0

    @property
    def ok(self) -> bool:
        return self.error_count == 0

    def add(self, error: RowError) -> None:
        self.error_count += 1
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(error)


@dataclass(frozen=True)
class Line:
    """One line without its end; ``data`` is None when it is longer than MAX_LINE_BYTES."""

    number: int
    offset: int  # of the first byte after a byte-order mark
    data: bytes | None


# ---------------------------------------------------------------- whole files


def check_jsonl(source: Source, max_line_bytes: int = MAX_LINE_BYTES) -> FileReport:
    """Read a whole training file once and say what is wrong with it, in constant memory."""
    return _check(source, check_row, max_line_bytes)


def check_corpus(source: Source, max_line_bytes: int = MAX_LINE_BYTES) -> FileReport:
    """The same for a file of passages that tools search."""
    return _check(source, check_passage, max_line_bytes)


def _check(source: Source, check: Callable[[Row, int], Iterable[str]], max_line_bytes: int) -> FileReport:
    """``check`` raises RowProblem, or names what the row can be used as."""
    report = FileReport()
    with opened(source) as stream:
        counted = CountingReader(stream)
        blank: int | None = None  # the first of a run of empty lines: an error only when a row follows
        for line in read_lines(counted, max_line_bytes):
            if line.data is not None and not line.data.strip():
                blank = blank or line.number
                continue
            if blank is not None:
                report.add(RowError(blank, None, None, f"line {blank} is empty"))
                blank = None
            report.rows += 1
            try:
                row = parse_row(line, max_line_bytes)
                kinds = check(row, line.number)
                count_fields(row, report.fields, line.number)
            except RowProblem as problem:
                report.add(problem.error)
                continue
            for kind in kinds:
                report.kinds[kind] = report.kinds.get(kind, 0) + 1
        report.bytes = counted.bytes
    if report.rows == 0:
        report.add(RowError(1, None, None, "the file is empty: it must hold at least one row"))
    return report


def iter_rows(source: Source) -> Iterator[Row]:
    """The rows in order. Raises RowProblem (a ValueError) at a line that is not a JSON object."""
    with opened(source) as stream:
        for line in read_lines(stream, MAX_LINE_BYTES):
            if line.data is None or line.data.strip():
                yield parse_row(line, MAX_LINE_BYTES)


class RowIndex:
    """A file's rows by number, from 0; holds 8 bytes a row instead of the file."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        with self.path.open("rb") as stream:
            lines = read_lines(stream, MAX_LINE_BYTES)
            self._offsets = array(
                "Q", (line.offset for line in lines if line.data is None or line.data.strip())
            )

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, row: int) -> Row:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a file with {len(self)} rows")
        with self.path.open("rb") as stream:
            stream.seek(self._offsets[row])
            line = next(read_lines(stream, MAX_LINE_BYTES))
        return parse_row(Line(row + 1, self._offsets[row], line.data), MAX_LINE_BYTES)


# ---------------------------------------------------------------- lines


class CountingReader(io.RawIOBase):
    """Counts the bytes that ``read_lines`` takes from a stream."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self.bytes = 0

    def readline(self, size: int | None = -1) -> bytes:
        data = self._stream.readline(size)
        self.bytes += len(data)
        return data


def opened(source: Source) -> AbstractContextManager[BinaryIO]:
    """A context manager with the binary stream; a stream that was passed in stays open."""
    return Path(source).open("rb") if isinstance(source, Path | str) else nullcontext(source)


def read_lines(stream: BinaryIO, max_bytes: int) -> Iterator[Line]:
    number = offset = 0
    while data := stream.readline(max_bytes + len(BOM) + 2):  # room for a mark and a CRLF
        number += 1
        start, offset = offset, offset + len(data)
        if number == 1 and data.startswith(BOM):
            data, start = data[len(BOM) :], len(BOM)
        content = data.removesuffix(b"\n").removesuffix(b"\r")
        while not data.endswith(b"\n") and (data := stream.readline(max_bytes)):
            offset += len(data)
            content = None
        yield Line(number, start, content if content is not None and len(content) <= max_bytes else None)


# ---------------------------------------------------------------- one row


def parse_row(line: Line, max_line_bytes: int) -> Row:
    """The line's JSON object. Raises RowProblem."""
    number = line.number
    if line.data is None:
        refuse(number, None, None, f"line {number} is longer than {max_line_bytes:,} bytes")
    text = decode(line.data, number)
    try:
        row = json.loads(
            text, object_pairs_hook=unique_keys, parse_constant=no_constant, parse_float=finite_float
        )
    except json.JSONDecodeError as error:
        refuse(number, error.colno, None, f"not JSON at line {number} column {error.colno}: {error.msg}")
    except NotJSON as error:
        column = constant_column(text) if error.constant else None
        at = f" column {column}" if column else ""
        refuse(number, column, error.field, f"not JSON at line {number}{at}: {error}")
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, a thousand brackets
        reason = "nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"
        refuse(number, None, None, f"not JSON at line {number}: {reason}")
    if not isinstance(row, dict):
        refuse(number, 1, None, f"line {number} is not a JSON object but {kind_of(row)}")
    if ESCAPED_SURROGATE.search(line.data):
        check_surrogates(row, number)
    return row


def decode(data: bytes, number: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        column = len(data[: error.start].decode("utf-8")) + 1
        byte = data[error.start]
        refuse(number, column, None, f"not UTF-8 at line {number} column {column}: byte 0x{byte:02x}")


class NotJSON(ValueError):
    """What Python's parser lets through and JSON does not allow, or leaves undefined."""

    def __init__(self, message: str, field: str | None = None, constant: bool = False):
        super().__init__(message)
        self.field, self.constant = field, constant


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise NotJSON(
                    f"the key {shown(key)} appears twice in one object", field=key[:MAX_FIELD_CHARS]
                )
            seen.add(key)
    return row


def no_constant(name: str) -> NoReturn:
    raise NotJSON(f"{name} is not a JSON number", constant=True)


def finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise NotJSON(f"the number {text[:40]} is too large")
    return value


def constant_column(text: str) -> int | None:
    """Where the first NaN or Infinity outside a string stands, from 1."""
    return next((match.start() + 1 for match in STRING_OR_CONSTANT.finditer(text) if match[1]), None)


def check_surrogates(row: Row, number: int) -> None:
    """Half a surrogate pair is legal in JSON's escapes and no text anywhere else."""
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        refuse(number, None, None, f"line {number} holds half of a surrogate pair, which is no character")


def count_fields(row: Row, fields: dict[str, int], number: int) -> None:
    for name in row:
        if len(name) > MAX_FIELD_CHARS:
            refuse(
                number,
                None,
                None,
                f"row {number} has a field whose name exceeds {MAX_FIELD_CHARS} characters",
            )
        if name not in fields and len(fields) == MAX_FIELDS:
            refuse_field(number, name, f"is one too many: a file may have {MAX_FIELDS:,} different fields")
        fields[name] = fields.get(name, 0) + 1
