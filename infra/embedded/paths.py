"""Where everything that is written at run time lives: one folder, ``var/``."""

from __future__ import annotations

import os
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def var_dir() -> Path:
    """``JIGSAW_VAR``, else ``var/`` in the checkout, else ``var/`` where the process was started."""
    given = os.environ.get("JIGSAW_VAR")
    if given:
        return Path(given).resolve()
    base = PROJECT if (PROJECT / "pyproject.toml").exists() else Path.cwd()
    return base / "var"
