"""Landlock: of the files, a process keeps those it names, for good (https://docs.kernel.org/userspace-api/landlock.html).

By system calls, for the libraries that exist for Python are pre-releases. It does not hide that a file is
there, and leaves what ``syscalls.METADATA`` does alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Sequence

from workers.sandbox.child.kernel import syscall

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # on all machines
#: The first that keeps files from being cut short (Linux 6.2).
NEEDED_VERSION = 3

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 1 << 1, 1 << 2, 1 << 3
REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_REG, MAKE_SYM = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 12
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
ALL_FILES = (1 << 15) - 1
READ = READ_FILE | READ_DIR
WRITE = READ | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_SYM | REFER | TRUNCATE
OF_FILES = READ_FILE | WRITE_FILE | TRUNCATE  # rights that a rule on a file may give


class Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def version() -> int:
    """Of the kernel's Landlock; 0 without one."""
    try:
        return syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    except OSError:
        return 0


def rules(read: Sequence[str], listed: Sequence[str], write: Sequence[str]) -> int:
    """A ruleset, as a descriptor: paths that may be read, folders that may be listed and paths that may be
    written, each with all below it. Whoever may open them now need not be able to later.
    """
    known = version()
    if known < NEEDED_VERSION:
        what = f"knows Landlock {known}" if known else "has no Landlock"
        raise OSError(f"the kernel {what}; version {NEEDED_VERSION} is needed (Linux 6.2)")
    ruleset = Ruleset(
        files=ALL_FILES | (IOCTL_DEV if known >= 5 else 0),
        network=0b11 if known >= 4 else 0,  # TCP: bind, connect
        scoped=0b11 if known >= 6 else 0,  # abstract sockets and signals go to one's own children only
    )
    size = 8 if known < 4 else 16 if known < 6 else 24
    descriptor = syscall(CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), ctypes.c_uint32(0))
    for paths, allowed in ((read, READ), (listed, READ_DIR), (write, WRITE)):
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # it is gone since the list was made
                allow(descriptor, path, allowed)
    return descriptor


def allow(ruleset: int, path: str, allowed: int) -> None:
    folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(folder).st_mode):
            allowed &= OF_FILES
        rule = Beneath(allowed, folder)
        syscall(ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint32(0))
    finally:
        os.close(folder)


def restrict(ruleset: int) -> None:
    """This thread, and what it starts; new privileges must have been given up."""
    syscall(RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)
