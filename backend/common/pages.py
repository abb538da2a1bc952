"""Keyset pages: newest first, continued after the last one seen, so that new rows shift nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from django.db.models import Model, QuerySet

from backend.common.errors import InvalidRequest

MAX_LIMIT = 100

Row = TypeVar("Row", bound=Model)


@dataclass(frozen=True)
class Page(Generic[Row]):
    items: list[Row]
    has_more: bool


def page_by_id(rows: QuerySet[Row], *, limit: int, after: str | None) -> Page[Row]:
    """``rows`` by descending primary key; ``after`` is the public id of the row before the page."""
    check_limit(limit)
    if after is not None:
        last = None if "\0" in after else rows.filter(public_id=after).values_list("pk", flat=True).first()
        if last is None:
            raise InvalidRequest(f"after names nothing of this list: {after!r}", param="after")
        rows = rows.filter(pk__lt=last)
    return page_of(rows.order_by("-pk"), limit)


def page_of(rows: QuerySet[Row], limit: int) -> Page[Row]:
    """The first ``limit`` of ordered rows; one more is read to know whether there are more."""
    check_limit(limit)
    found = list(rows[: limit + 1])
    return Page(found[:limit], len(found) > limit)


def check_limit(limit: int) -> None:
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidRequest(f"limit must be between 1 and {MAX_LIMIT}; got {limit}", param="limit")
