"""How a child is kept apart from the machine, by one of two means.

    bubblewrap   namespaces: no other process, network or file is in view; scratch is a small tmpfs of its own
    landlock     the child restricts itself: files by Landlock, and as root it becomes a user of its own

Under both it gives up root, most system calls (seccomp) and what its limits forbid, see ``child``. Which one
works on a machine is found out by trying, see ``probe``.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

# Imported here, they are compiled once; a child writes no .pyc files.
from workers.sandbox.child import kernel, landlock, limits, messages, seccomp, source, syscalls  # noqa: F401
from workers.sandbox.view import CHILD, EXECUTABLE, View, split, view

ADDRESS_SPACE_BYTES = 1 << 30
FILE_SIZE_BYTES = 16 << 20
SCRATCH_BYTES = 64 << 20
#: A child of root's becomes a user of its own, one of the USERS from here on: no two can read each other's
#: files. Above the ranges that accounts and containers are given.
FIRST_USER, USERS = 0x70000000, 1 << 27
NOBODY = 65534
ENVIRONMENT = {"PYTHONHASHSEED": "0"}  # sets iterate in the same order in every child
# No script folder, no user or site packages, no .pyc files written.
PYTHON = (EXECUTABLE, "-P", "-s", "-S", "-B", "-X", "utf8", str(CHILD / "run.py"))


class Isolation(StrEnum):
    BUBBLEWRAP = "bubblewrap"
    LANDLOCK = "landlock"


def command(isolation: Isolation, paths: tuple[str, ...]) -> list[str]:
    """The child's command line."""
    if isolation is Isolation.LANDLOCK:
        return list(PYTHON)
    wrapper = shutil.which("bwrap")
    if wrapper is None:
        raise FileNotFoundError("bubblewrap is not installed")
    return [wrapper, *namespaces(as_root=os.geteuid() == 0), *mounts(view(paths)), "--", *PYTHON]


def confinement(isolation: Isolation, paths: tuple[str, ...], lifeline: int) -> dict[str, Any]:
    """The first request, see ``child/run.py``."""
    return {
        "op": "confine",
        "lifeline": lifeline,
        "paths": paths,
        "files": files(paths) if isolation is Isolation.LANDLOCK else None,
        "users": [FIRST_USER + secrets.randbelow(USERS), NOBODY] if os.geteuid() == 0 else [],
        "address_space": ADDRESS_SPACE_BYTES,
        "file_size": FILE_SIZE_BYTES,
    }


@cache
def files(paths: tuple[str, ...]) -> dict[str, Sequence[str]]:
    read, listed = split(view(paths))
    return {"read": read, "listed": listed, "devices": ["/dev/null", "/dev/zero", "/dev/urandom"]}


def namespaces(as_root: bool) -> list[str]:
    """Root needs no user namespace, and keeps no right but to become another user."""
    if as_root:
        user = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        user = ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    others = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    variables = [part for name, value in ENVIRONMENT.items() for part in ("--setenv", name, value)]
    return [*user, *others, "--hostname", "sandbox", "--clearenv", *variables]


@cache
def mounts(seen: View) -> tuple[str, ...]:
    """All is read-only but the scratch folder."""
    above = {str(parent) for path in seen.read for parent in Path(path).parents} - {"/"}
    # In this order, those above first. Left to bubblewrap, they would be root's alone.
    parts = [part for folder in sorted(above) for part in ("--dir", folder)]
    for path in seen.read:
        if os.path.islink(path) and os.path.isdir(path):  # noqa: PTH112, PTH114
            parts += ["--symlink", os.readlink(path), path]  # noqa: PTH115
        else:
            parts += ["--ro-bind", path, path]
    for path in seen.hidden:
        parts += ["--perms", "0555", "--tmpfs", path, "--remount-ro", path]
    for device in ("null", "zero", "random", "urandom"):
        parts += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    scratch = ["--perms", "0777", "--size", str(SCRATCH_BYTES), "--tmpfs", "/scratch", "--chdir", "/scratch"]
    return (*parts, "--proc", "/proc", *scratch, "--remount-ro", "/")
