"""A seccomp filter that allows the system calls of ``syscalls.py`` and refuses all others with EPERM.

A classic BPF program by hand, as libseccomp writes them: https://docs.kernel.org/userspace-api/seccomp_filter.html
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import sys
import termios
from collections import namedtuple

from workers.sandbox.child import kernel
from workers.sandbox.child.syscalls import CHECKED, MACHINES, METADATA, PLAIN, numbers

LOAD, JUMP_EQUAL, AND, RETURN = 0x20, 0x15, 0x54, 0x06
ALLOW, DENY, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
FILTER_MODE = 2

AF_UNIX, SOCK_STREAM, SOCK_FLAGS = 1, 1, 0o2004000  # non-blocking, close on exec
#: Not those that name who gets signals, of which the kernel asks only for the same user.
FCNTL = (*range(8), 36, 37, 38, fcntl.F_DUPFD_CLOEXEC, 1031, 1032)
IOCTL = (
    termios.FIONREAD,
    termios.FIONBIO,
    termios.FIOCLEX,
    termios.FIONCLEX,
    termios.TCGETS,
    termios.TIOCGWINSZ,
)


#: An argument's lower half, all that the kernel reads of an int, under a mask is ``among`` the values, or not
#: among them; ``upper``: the other half. No dataclass: importing those takes as long as Python's own start.
Check = namedtuple("Check", "argument values mask among upper", defaults=(0xFFFFFFFF, True, False))


def checks(pid: int, lifeline: int) -> dict[str, tuple[Check, ...]]:
    """What must hold, all of it, of the calls that are allowed with some arguments only.

    Signals and limits go to the process itself. The lifeline, by which it dies with its parent, stays open.
    A pair of connected sockets is what event loops wake up by; it reaches no one else.
    """
    return {
        "close": (Check(0, (lifeline,), among=False),),
        "dup2": (Check(1, (lifeline,), among=False),),
        "dup3": (Check(1, (lifeline,), among=False),),
        "fcntl": (Check(0, (lifeline,), among=False), Check(1, FCNTL)),
        "ioctl": (Check(1, IOCTL),),
        "socketpair": (Check(0, (AF_UNIX,)), Check(1, (SOCK_STREAM,), mask=0xFFFFFFFF & ~SOCK_FLAGS)),
        "sendto": (Check(4, (0,)), Check(4, (0,), upper=True)),  # without an address
        "kill": (Check(0, (pid,)),),
        "tgkill": (Check(0, (pid,)),),
        "prlimit64": (Check(0, (0, pid)),),
    }


def program(machine: str, pid: int, lifeline: int, metadata: bool) -> bytes:
    """``metadata``: whether modes, owners and times of files may be changed."""
    code = [step(LOAD, ARCHITECTURE_AT), step(JUMP_EQUAL, MACHINES[machine][0], 1, 0), step(RETURN, KILL)]
    code.append(step(LOAD, NUMBER_AT))
    for number in numbers(PLAIN + ("," + METADATA if metadata else ""), machine).values():
        code += [step(JUMP_EQUAL, number, 0, 1), step(RETURN, ALLOW)]
    conditions = checks(pid, lifeline)
    for name, number in numbers(CHECKED, machine).items():
        block = [part for check in conditions[name] for part in tested(check)] + [step(RETURN, ALLOW)]
        code += [step(JUMP_EQUAL, number, 0, len(block)), *block]
    code.append(step(RETURN, DENY))
    return b"".join(code)


def tested(check: Check) -> list[bytes]:
    """Falls through when the check holds."""
    load = [step(LOAD, ARGUMENTS_AT + 8 * check.argument + 4 * check.upper), step(AND, check.mask)]
    if not check.among:
        return [
            *load,
            *(part for value in check.values for part in (step(JUMP_EQUAL, value, 0, 1), step(RETURN, DENY))),
        ]
    count = len(check.values)
    return [
        *load,
        *(step(JUMP_EQUAL, value, count - index, 0) for index, value in enumerate(check.values)),
        step(RETURN, DENY),
    ]


def step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def install(lifeline: int, metadata: bool) -> None:
    """On this thread, and what it starts; new privileges must have been given up."""
    machine = os.uname().machine
    if machine not in MACHINES or sys.maxsize < 1 << 32:
        raise OSError(f"the sandbox's filter of system calls is not written for {machine}")
    code = program(machine, os.getpid(), lifeline, metadata)
    steps = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))

    described = Program(len(code) // 8, ctypes.addressof(steps))
    kernel.prctl(kernel.PR_SET_SECCOMP, FILTER_MODE, ctypes.byref(described))
