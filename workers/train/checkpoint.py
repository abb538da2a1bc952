"""Checkpoint folders ``step-N``: whole or not there at all.

A folder is written under a temporary name in the same parent, every file and the folder itself are synced to
the disk, and only then does it get its name. A leftover of a killed writer is swept away by the next one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

STATE_FILE = "state.json"
NAME = re.compile(r"step-(\d+)")
TEMPORARY = ".writing-"


def write(parent: Path, step: int, state: Mapping[str, Any], save: Callable[[Path], None]) -> Path:
    """``parent/step-N`` with what ``save`` puts into the folder it is given, and ``state`` as ``state.json``.

    One writer per parent at a time. A checkpoint of the same step is replaced.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for leftover in parent.glob(f"{TEMPORARY}*"):
        shutil.rmtree(leftover)
    scratch = parent / f"{TEMPORARY}step-{step}"
    scratch.mkdir()
    save(scratch)
    (scratch / STATE_FILE).write_text(json.dumps(dict(state), indent=2, sort_keys=True), encoding="utf-8")
    for path in scratch.rglob("*"):
        _sync(path)
    _sync(scratch)
    final = parent / f"step-{step}"
    if final.exists():
        # A folder cannot be renamed over a full one; aside first, so that no half of it is ever seen.
        final.rename(parent / f"{TEMPORARY}old-step-{step}")
    scratch.rename(final)
    _sync(parent)
    shutil.rmtree(parent / f"{TEMPORARY}old-step-{step}", ignore_errors=True)
    return final


def checkpoints(parent: Path) -> list[Path]:
    """The complete checkpoints, oldest step first."""
    if not parent.exists():
        return []
    steps = {int(match[1]): path for path in parent.iterdir() if (match := NAME.fullmatch(path.name))}
    return [steps[step] for step in sorted(steps)]


def prune(parent: Path, keep: int) -> list[Path]:
    """Delete all but the newest ``keep`` checkpoints; the deleted folders."""
    if keep < 1:
        raise ValueError("keep must be at least 1: the newest checkpoint is never deleted")
    old = checkpoints(parent)[:-keep]
    for folder in old:
        # Renamed first: an interrupted deletion must not leave half a checkpoint under a good name.
        doomed = folder.with_name(f"{TEMPORARY}old-{folder.name}")
        folder.rename(doomed)
        shutil.rmtree(doomed)
    return old


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
