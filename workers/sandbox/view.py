"""The files that a sandboxed process may read: the interpreter, its standard library and shared libraries."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CHILD = Path(__file__).with_name("child")
EXECUTABLE = os.path.realpath(sys.executable)
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
FURTHER = ("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class View:
    """Paths to be read with all below them, but for the folders ``hidden``."""

    read: tuple[str, ...]
    hidden: tuple[str, ...]


@cache
def view(paths: tuple[str, ...] = ()) -> View:
    """``paths`` are further folders to import from. Packages that are installed elsewhere stay hidden."""
    folders = [f"{sys.base_prefix}/lib", *LIBRARIES]
    read = [path for path in (*folders, *FURTHER, EXECUTABLE, str(CHILD), *paths) if Path(path).exists()]
    hidden = {str(found) for folder in folders for found in installed(Path(folder))}
    return View(outermost(read), tuple(sorted(hidden - set(paths))))


def installed(folder: Path) -> list[Path]:
    """Package folders of the Pythons in a library folder."""
    if folder.is_symlink():  # its target is there too
        return []
    return [found for name in INSTALLED for found in folder.glob(f"python3*/{name}") if found.is_dir()]


def packages() -> tuple[str, ...]:
    """Where this process's installed packages are: ``paths`` for sources of our own that need some."""
    return tuple(path for path in sys.path if path.endswith(INSTALLED))


def outermost(paths: Sequence[str]) -> tuple[str, ...]:
    """Without those that lie in another one."""
    unique = dict.fromkeys(paths)
    return tuple(path for path in unique if not any(path.startswith(f"{other}/") for other in unique))


def split(view: View) -> tuple[list[str], list[str]]:
    """The same for who can only allow, not hide: paths to be read, and folders to be listed.

    The names of what is hidden can be listed.
    """
    read: list[str] = []
    listed: list[str] = []
    left = list(view.read)
    while left:
        path = left.pop()
        if path in view.hidden:
            continue
        if any(hidden.startswith(f"{path}/") for hidden in view.hidden):
            listed.append(path)
            left += [entry.path for entry in os.scandir(path)]
        else:
            read.append(path)
    return sorted(read), sorted(listed)
