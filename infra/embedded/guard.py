"""Waits for the process that started it to die, then stops what that left.

Its standard input is a pipe whose other end only that process holds; the kernel closes it however the process
ends, kill -9 included. Whoever stops in order ends the guard last, so it finds nothing to do.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from infra.embedded import processes, sweep


def main() -> None:
    var = Path(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    if not (var / "run").is_dir():
        return  # somebody removed it all meanwhile
    # The lock is free, since its holder is dead; holding it keeps a new start away until we are done.
    with processes.locked(sweep.up_lock(var), 5.0):
        sweep.everything(var)
        sweep.up_record(var).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
