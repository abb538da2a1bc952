"""Searching a corpus by BM25 (https://doi.org/10.1561/1500000019), with the bm25s library.

A corpus is a JSONL file of ``{"title", "text"}``; its index is made at the first search and kept while it is
among the last that were used.
"""

from __future__ import annotations

import json
import re
import threading
from functools import lru_cache
from pathlib import Path

import bm25s

WORD = re.compile(r"\w+")
KEPT = 8
#: Searches come from many threads, and an index is made once.
MAKING = threading.Lock()


def search(path: str, query: str, count: int) -> list[tuple[str, str]]:
    """Title and text of the passages that have words of the query, the best first."""
    with MAKING:
        passages, index = _index(path, Path(path).stat().st_mtime_ns)
    words = words_of(query)
    if not words or index is None:
        return []
    places, scores = index.retrieve([words], k=min(count, len(passages)), show_progress=False)
    return [
        passages[place]
        for place, score in zip(places[0].tolist(), scores[0].tolist(), strict=True)
        if score > 0
    ]


def words_of(text: str) -> list[str]:
    return WORD.findall(text.casefold())


@lru_cache(maxsize=KEPT)
def _index(path: str, version: int) -> tuple[list[tuple[str, str]], bm25s.BM25 | None]:
    """The passages, and their index unless no passage has a word; ``version`` changes with the file."""
    with Path(path).open(encoding="utf-8-sig") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    passages = [(str(row.get("title", "")), str(row["text"])) for row in rows]
    words = [words_of(f"{title} {text}") for title, text in passages]
    if not any(words):
        return passages, None
    index = bm25s.BM25()
    index.index(words, show_progress=False)
    return passages, index
