from __future__ import annotations

import io
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from infra.embedded import processes, sweep
from infra.embedded.hold import AlreadyRunning, Hold
from infra.embedded.supervisor import Console, Program, StartFailed, Stopped, Supervisor
from tests.infra.conftest import commands_with, start_python

SERVE = "sleep 1000 & echo here I am; wait"


def shell(name: str, script: str, ready: str = "here I am", **options: float) -> Program:
    return Program(name, ["sh", "-c", script], ready_line=ready, **options)


def make(var: Path, console: io.StringIO | None = None) -> Supervisor:
    return Supervisor(var, os.environ, var, Console(console), first_pause=0.01)


def pid_of(var: Path, name: str) -> int | None:
    return processes.recall(var / "run" / f"{name}.pid")


def test_starts_in_order_and_stops_in_reverse(var: Path) -> None:
    console = io.StringIO()
    supervisor = make(var, console)
    families: set[processes.Process] = set()
    for name in ("first", "second"):
        supervisor.start(shell(name, SERVE))
        supervisor.wait_ready(name)
        pid = pid_of(var, name)
        assert pid is not None
        families |= processes.family(pid)
    assert len(families) >= 4
    supervisor.stop()
    assert families & set(processes.everyone()) == set()
    said = [line.split("│ ")[1] for line in console.getvalue().splitlines() if line.startswith("up")]
    assert said == ["first is ready", "second is ready", "stopping second", "stopping first"]
    assert "first     │ here I am" in console.getvalue()
    assert (var / "logs" / "second.log").read_text() == "here I am\n"
    assert list((var / "run").glob("*.pid")) == []


def test_a_program_run_to_its_end_fails_with_its_last_words(var: Path) -> None:
    supervisor = make(var)
    supervisor.run("good", ["sh", "-c", "exit 0"], 10)
    with pytest.raises(StartFailed, match="no such table"):
        supervisor.run("bad", ["sh", "-c", "echo no such table; exit 3"], 10)
    with pytest.raises(StartFailed, match=r"slow did not end within 0 seconds"):
        supervisor.run("slow", ["sleep", "1000"], 0.1)
    supervisor.stop()


def test_stop_during_start_leaves_nobody(var: Path) -> None:
    supervisor = make(var)
    supervisor.start(shell("never", "echo not yet; sleep 1000"))
    pid = pid_of(var, "never")
    assert pid is not None
    threading.Timer(0.1, supervisor.stopping.set).start()
    with pytest.raises(Stopped):
        supervisor.wait_ready("never")
    supervisor.stop()
    assert processes.look_up(pid) is None
    with pytest.raises(Stopped):
        supervisor.start(shell("late", SERVE))


def test_not_ready_in_time_says_what_it_printed(var: Path) -> None:
    supervisor = make(var)
    supervisor.start(shell("never", "echo loading; sleep 1000", ready_seconds=0.5))
    with pytest.raises(StartFailed, match=r"never was not ready within 0 seconds:\nloading"):
        supervisor.wait_ready("never")
    supervisor.stop()


def test_a_killed_program_is_started_again_with_what_it_left_ended(var: Path) -> None:
    console = io.StringIO()
    supervisor = make(var, console)
    supervisor.start(shell("web", SERVE))
    supervisor.wait_ready("web")
    first = pid_of(var, "web")
    assert first is not None
    members = processes.family(first)
    os.kill(first, signal.SIGKILL)
    assert processes.wait_until(lambda: pid_of(var, "web") not in (None, first), 10)
    assert members & set(processes.everyone()) == set()
    supervisor.wait_ready("web")
    assert supervisor.failure is None
    assert "web was killed by signal 9; starting it again" in console.getvalue()
    supervisor.stop()


def test_a_program_that_keeps_dying_fails_the_whole_with_the_reason(var: Path) -> None:
    supervisor = make(var)
    supervisor.start(shell("calm", SERVE))
    supervisor.start(shell("broken", "echo port taken; exit 7"))
    with pytest.raises(StartFailed, match=r"(?s)broken exited with 7 6 times.*port taken"):
        supervisor.wait()
    calm = pid_of(var, "calm")
    assert calm is not None
    supervisor.stop()
    assert processes.look_up(calm) is None


def test_who_ignores_the_polite_signal_is_forced(var: Path) -> None:
    supervisor = make(var)
    supervisor.start(shell("deaf", f"trap '' TERM; {SERVE}", stop_seconds=0.1))
    supervisor.wait_ready("deaf")
    pid = pid_of(var, "deaf")
    assert pid is not None
    supervisor.stop()
    assert processes.look_up(pid) is None


HOLDER = """
import os, sys
from pathlib import Path
from infra.embedded.hold import Hold
from infra.embedded.supervisor import Console, Program, Supervisor
var = Path(sys.argv[1])
hold = Hold(var)
hold.take()
supervisor = Supervisor(var, os.environ, var, Console(None))
script = "sleep 1000 & echo here I am; wait; : " + str(var)
supervisor.start(Program("web", ["sh", "-c", script], ready_line="here I am"))
supervisor.wait_ready("web")
print("holding", flush=True)
supervisor.wait()
"""


def held(var: Path) -> subprocess.Popen[str]:
    holder = start_python(HOLDER, var)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "holding\n"
    return holder


def test_the_guard_cleans_up_after_kill_9(var: Path) -> None:
    holder = held(var)
    pid = pid_of(var, "web")
    assert pid is not None
    members = processes.family(pid)
    holder.kill()
    holder.wait()
    assert processes.wait_until(lambda: not members & set(processes.everyone()), 20)
    assert processes.wait_until(lambda: commands_with(f"infra.embedded.guard {var}") == [], 20)
    hold = Hold(var)
    hold.take()
    hold.release()


def test_one_holder_at_a_time(var: Path) -> None:
    holder = held(var)
    with pytest.raises(AlreadyRunning, match=rf"already running in .* \(process {holder.pid}\)"):
        Hold(var).take()
    holder.kill()
    holder.wait()


def test_leftovers_are_ended_when_even_the_guard_was_killed(var: Path) -> None:
    holder = held(var)
    pid = pid_of(var, "web")
    assert pid is not None
    guard = next(p.pid for p in processes.everyone() if p.parent == holder.pid and p.pid != pid)
    os.kill(guard, signal.SIGKILL)
    holder.kill()
    holder.wait()
    assert processes.look_up(pid) is not None
    hold = Hold(var)
    hold.take()
    assert processes.look_up(pid) is None
    hold.release()


def test_sweep_ends_programs_and_services(var: Path) -> None:
    assert sweep.down(var) is False
    holder = held(var)
    pid = pid_of(var, "web")
    assert pid is not None
    # The holder here knows no signals: it dies at once, as one killed by a closing terminal would.
    assert sweep.down(var) is True
    holder.wait()
    assert processes.look_up(pid) is None
