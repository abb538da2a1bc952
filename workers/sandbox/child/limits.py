"""What the kernel limits by user and by process: rights, memory, file sizes, descriptors, CPU time."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import resource
import signal
import stat
import sys
from collections.abc import Sequence

from workers.sandbox.child import kernel

CPU_HARD_SECONDS = 24 * 3600
DESCRIPTORS = 64
#: Where the lifeline is: out of the way, at the highest descriptor there may be.
LIFELINE = DESCRIPTORS - 1


def die_with(lifeline: int) -> None:
    """Be killed by the kernel, even in mid-call, once the other end of this pipe is closed.

    Nothing is ever written to it. A thread could not do this while a regex holds the interpreter's lock.
    """
    if lifeline != LIFELINE:
        os.dup2(lifeline, LIFELINE, inheritable=False)
        os.close(lifeline)
    fcntl.fcntl(LIFELINE, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(LIFELINE, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(LIFELINE, fcntl.F_SETFL, fcntl.fcntl(LIFELINE, fcntl.F_GETFL) | os.O_ASYNC)
    os.set_blocking(LIFELINE, False)
    with contextlib.suppress(BlockingIOError):
        os.read(LIFELINE, 1)  # returns when it was closed before
        os._exit(0)


def become(users: Sequence[int], own: Sequence[str]) -> None:
    """Give root up for the first of ``users`` that the machine knows, who gets the folders ``own``.

    Imports go on from folders that root alone could reach.
    """
    moved = {path: reachable(path) for path in sys.path if os.path.isdir(path)}  # noqa: PTH112
    for user in users:
        try:
            for folder in own:
                os.chown(folder, user, user)
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        except OSError:  # a container may know few users
            continue
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # lets the process see its own /proc/self again
        import_from(moved)
        return
    raise OSError("root could not be given up")


def reachable(folder: str) -> str:
    """A path by which any user can read the folder.

    Below a closed folder, such as root's home, it is the path of an open descriptor.
    """
    inside = stat.S_IROTH | stat.S_IXOTH
    if os.stat(folder).st_mode & inside != inside:  # noqa: PTH116
        raise OSError(f"{folder} cannot be read by another user than root")
    parent = os.path.dirname(os.path.realpath(folder))  # noqa: PTH120
    while os.stat(parent).st_mode & stat.S_IXOTH:  # noqa: PTH116
        if parent == os.path.dirname(parent):  # noqa: PTH120
            return folder
        parent = os.path.dirname(parent)  # noqa: PTH120
    return f"/proc/self/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY)}"


def import_from(moved: dict[str, str]) -> None:
    """Look for modules in the moved folders; also for those of packages that are loaded already."""
    sys.path[:] = [moved.get(path, path) for path in sys.path]
    for module in list(sys.modules.values()):
        for index, path in enumerate(getattr(module, "__path__", ())):
            parent, name = os.path.split(path)
            module.__path__[index] = f"{moved.get(parent, parent)}/{name}"
    sys.path_importer_cache.clear()


def limit(address_space: int, file_size: int) -> None:
    os.environ.clear()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    # No process, so none that outlives this one, and no thread: the limit counts all of the user's.
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def limit_cpu(timeout_s: float) -> None:
    """A backstop below the parent's wall clock: this much CPU time more than what is already used."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    allowed = math.ceil(usage.ru_utime + usage.ru_stime + timeout_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (min(allowed, CPU_HARD_SECONDS), CPU_HARD_SECONDS))
