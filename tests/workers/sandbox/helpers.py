"""Sources and calls that the tests share, and a look at what still runs."""

import threading
import time
from pathlib import Path

LENGTH = "def grade(sample, item):\n    return len(sample['output_text']) / item['n']\n"
#: Says which process it is in.
WHO = "import os\nme = int.from_bytes(os.urandom(6))\ndef grade(sample, item): return me\n"
ENDLESS = "def grade(sample, item):\n    print('started', flush=True)\n    while True: pass\n"
CALL = ({"output_text": "abc"}, {"n": 4})


def one(pool, source, timeout_s=5.0, **keywords):
    return pool.grade(source, [CALL], timeout_s, **keywords)[0]


def members_of_session(session: int) -> list[int]:
    """Processes of a session that still run; zombies do not."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, sid = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(sid) == session and state != "Z":
                found.append(int(entry.name))
    return found


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        threading.Event().wait(0.005)
    assert condition()


def wait_until_started(pool):
    """Until a call of ENDLESS runs."""
    wait_until(lambda: any(process._output for process in list(pool._leased)))


def pids(pool):
    """Of the processes that wait warm."""
    return [process.pid for _, process in pool._idle]
