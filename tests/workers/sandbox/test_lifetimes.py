"""Nothing outlives its pool, its parent or its call."""

import subprocess
import sys
import threading

import pytest

from tests.workers.sandbox.helpers import ENDLESS, LENGTH, members_of_session, one, pids, wait_until
from workers.sandbox.pool import SandboxPool

PARENT = """
import sys
from pathlib import Path
from workers.sandbox.isolation import Isolation
from workers.sandbox.process import SandboxProcess

process = SandboxProcess(Isolation(sys.argv[2]), Path(sys.argv[1]))
process.greet()
print(process.pid, flush=True)
"""
BUSY = """
process.load(sys.argv[3], 5.0)
process.call("f", [], 600.0)
"""


def start_parent(program, *arguments):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return parent, int(parent.stdout.readline())


@pytest.mark.parametrize(
    "body",
    ["while True: pass", "import re; re.match('(a+)+$', 'a' * 60 + 'b')", "import time; time.sleep(1000)"],
)
def test_a_busy_child_dies_with_its_parent(isolation, tmp_path, body):
    parent, session = start_parent(PARENT + BUSY, tmp_path, isolation, f"def f():\n    {body}\n")
    assert session in members_of_session(session)
    threading.Event().wait(0.1)
    parent.kill()
    parent.wait(20)
    parent.stdout.close()
    wait_until(lambda: members_of_session(session) == [])
    SandboxPool(1, scratch_root=tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_an_idle_child_ends_when_its_parent_forgets_it(isolation, tmp_path):
    parent, session = start_parent(PARENT, tmp_path, isolation)
    parent.wait(20)
    parent.stdout.close()
    wait_until(lambda: members_of_session(session) == [])
    SandboxPool(1, scratch_root=tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_a_child_outlives_the_thread_that_started_it(isolation, tmp_path):
    with SandboxPool(1, scratch_root=tmp_path) as pool:
        thread = threading.Thread(target=lambda: one(pool, LENGTH, owner="a"))
        thread.start()
        thread.join()
        [pid] = pids(pool)
        assert pid in members_of_session(pid)
        assert one(pool, LENGTH, owner="a").score == 0.75
        assert pids(pool) == [pid]


def test_a_pool_that_starts_leaves_the_folders_of_others_alone(isolation, tmp_path):
    with SandboxPool(1, scratch_root=tmp_path) as pool:
        assert one(pool, LENGTH, owner="a").score == 0.75
        before = set(tmp_path.iterdir())
        SandboxPool(1, scratch_root=tmp_path).close()
        assert set(tmp_path.iterdir()) == before


def test_close_leaves_no_process_and_no_scratch_folder(isolation, tmp_path):
    pool = SandboxPool(2, scratch_root=tmp_path)
    for owner in "ab":
        one(pool, LENGTH, owner=owner)
    running = [*pids(pool), pool._blank.pid]
    assert len(running) == 3
    assert all(pid in members_of_session(pid) for pid in running)
    pool.close()
    for pid in running:
        wait_until(lambda pid=pid: members_of_session(pid) == [])
    assert list(tmp_path.iterdir()) == []
    assert one(pool, LENGTH).error == "the sandbox pool was closed"


def test_an_interpreter_that_ends_does_not_wait_for_calls_it_cannot_start():
    """Once it ends, no executor takes work: calls that are left must be answered, or their caller waits."""
    program = f"""
import threading
from workers.sandbox.pool import SandboxPool
pool = SandboxPool(1)
calls = [({{}}, {{}})] * 5
threading.Thread(target=lambda: print(pool.grade({ENDLESS!r}, calls, 1.0)[-1].error)).start()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.strip()) == (0, "the sandbox pool was closed")
