"""Where everything that is written at run time lives: one folder, ``var/``."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def var_dir() -> Path:
    """``JIGSAW_VAR``, else ``var/`` in the checkout, else ``var/`` where the process was started."""
    given = os.environ.get("JIGSAW_VAR")
    if given:
        return Path(given).resolve()
    base = PROJECT if (PROJECT / "pyproject.toml").exists() else Path.cwd()
    return base / "var"


# A unix socket's whole path must fit sockaddr_un, its closing zero included.
SOCKET_PATH_LIMIT = 103 if sys.platform == "darwin" else 107


def socket_folder(folder: Path, longest_name: str, limit: int = SOCKET_PATH_LIMIT) -> Path:
    """The name under which sockets in ``folder`` are opened: itself, or a short link to it if it is too long.

    Pure: ``make_socket_folder`` creates what this names.
    """
    if len(os.fsencode(folder / longest_name)) <= limit:
        return folder
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    # Not tempfile.gettempdir(): processes with different TMPDIR must agree on the name.
    return Path("/tmp") / f"jigsaw-{digest}"  # noqa: S108


def make_socket_folder(folder: Path, longest_name: str, limit: int = SOCKET_PATH_LIMIT) -> Path:
    """Create ``folder`` (mode 0700) and, if its path is too long, the short link; returns the name to use."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    short = socket_folder(folder, longest_name, limit)
    if short != folder:
        with contextlib.suppress(FileExistsError):
            short.symlink_to(folder, target_is_directory=True)
        # The temp folder is shared: a link that someone else made could lead anywhere.
        if not short.is_symlink() or short.readlink() != folder or short.lstat().st_uid != os.getuid():
            raise RuntimeError(f"{short} is not our link to {folder}; remove it")
    return short


def drop_socket_folder(folder: Path, longest_name: str, limit: int = SOCKET_PATH_LIMIT) -> None:
    """Remove the short link, if there is one; the folder itself stays."""
    short = socket_folder(folder, longest_name, limit)
    if short != folder and short.is_symlink() and short.readlink() == folder:
        short.unlink(missing_ok=True)


def scratch_dir(var: Path) -> Path:
    """Where temporary files go: what a killed process leaves lies under ``var/`` too."""
    folder = var / "tmp"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
