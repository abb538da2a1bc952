"""System calls that Python does not have; a failed one is an OSError."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38


def syscall(number: int, *arguments: object) -> int:
    return checked(_libc.syscall(ctypes.c_long(number), *arguments))


def prctl(option: int, *arguments: object) -> int:
    padded = [*arguments, 0, 0, 0, 0][:4]
    return checked(_libc.prctl(option, *(ctypes.c_ulong(a) if isinstance(a, int) else a for a in padded)))


def drop_capabilities() -> None:
    """Those that could be passed on, too, which giving root up leaves."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    checked(_libc.capset(header, (ctypes.c_uint32 * 6)()))


def checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
