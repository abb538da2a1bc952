"""What a tenant's code tries, and does not get, under each isolation that works here."""

import errno
import os
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from tests.workers.sandbox.helpers import LENGTH, one
from workers.sandbox.pool import SandboxPool
from workers.sandbox.process import OUTPUT_BYTES
from workers.sandbox.replies import FailureKind

FORBIDDEN = (errno.ENOENT, errno.EPERM, errno.EACCES, errno.EROFS, errno.EXDEV)


def attempt(pool, code, *arguments, **keywords):
    """``code`` is a tenant's; "refused" when the system did not let it, else what it returned."""
    source = f"""
import os, sys
def f(*arguments):
    try:
        {code}
    except OSError as error:
        return "refused" if error.errno in {FORBIDDEN} else repr(error)
"""
    result = pool.call(source, "f", [arguments], 10.0, **keywords)[0]
    assert result.error is None, result.error
    return result.value


@pytest.fixture
def outside():
    """A folder that lets every user of the machine in: only the sandbox keeps it closed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "secret").write_text("s3cret")
        for opened in (path, path / "secret"):
            opened.chmod(0o777)
        yield path


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    "code",
    [
        "return open(arguments[0] + '/secret').read()",
        "return os.listdir(arguments[0])",
        "os.chdir(arguments[0]); return open('secret').read()",
        "os.symlink(arguments[0] + '/secret', 'way'); return open('way').read()",
        "os.link(arguments[0] + '/secret', 'way'); return open('way').read()",
        "return os.open(arguments[0] + '/secret', os.O_RDONLY | os.O_TRUNC)",
        "return os.truncate(arguments[0] + '/secret', 0)",
        "return open(arguments[0] + '/new', 'w').write('x')",
        "return os.unlink(arguments[0] + '/secret')",
        "return os.rename(arguments[0] + '/secret', 'mine')",
        "return os.mkdir(arguments[0] + '/new')",
        "return open('/etc/shadow').read()",
        "return open('/etc/passwd').read()",
        "return os.listdir('/')  if os.path.exists('/etc/passwd') else os.listdir('/etc/ssl')",
        "return os.mknod('device', 0o600 | 0o020000, os.makedev(1, 3))",
        "return open('/tmp/new', 'w').write('x')",
        "return open('/dev/shm/new', 'w').write('x')",
        "return open(os.__file__, 'a').write('x')",
        "return open(os.path.dirname(os.__file__) + '/new.py', 'w').write('x')",
    ],
)
def test_files_outside_are_neither_read_nor_written(pool, outside, code):
    assert attempt(pool, code, str(outside)) == "refused"
    assert (outside / "secret").read_text() == "s3cret"
    assert [path.name for path in outside.iterdir()] == ["secret"]


def test_modes_and_times_of_files_outside_stay(pool, outside):
    before = (outside / "secret").stat()
    for code in ("os.chmod(arguments[0], 0o600)", "os.utime(arguments[0], (1, 1))"):
        assert attempt(pool, code, str(outside / "secret")) == "refused"
    assert (outside / "secret").stat() == before


def test_the_scratch_folder_can_be_used(pool):
    code = "open('a', 'w').write('x'); os.mkdir('b'); os.rename('a', 'b/a'); return open('b/a').read()"
    assert attempt(pool, code) == "x"


def test_neither_the_project_nor_installed_packages_are_in_view(pool):
    for path in (Path(__file__), Path(pytest.__file__), Path(__file__).parents[3] / "pyproject.toml"):
        assert attempt(pool, "return open(arguments[0]).read()", str(path)) == "refused"
    result = one(pool, "import pydantic\ndef grade(sample, item): return 1\n")
    assert result.kind is FailureKind.SOURCE
    assert result.error == "line 1, in <module>: ModuleNotFoundError: No module named 'pydantic'"


def test_the_whole_standard_library_is_within_reach(pool):
    source = "import ctypes, decimal, email.mime.text, encodings.idna, json.tool, sqlite3, ssl, zoneinfo\n"
    source += "def grade(sample, item):\n    return float('a'.encode('koi8-r') == b'a')\n"
    assert (one(pool, source).score, one(pool, source).error) == (1.0, None)


def test_an_event_loop_runs(pool):
    source = "import asyncio\nasync def go(): await asyncio.sleep(0); return 7\n"
    source += "def f(): return asyncio.run(go())\n"
    result = pool.call(source, "f", [()], 10.0)[0]
    assert (result.value, result.error) == (7, None)


def test_sources_of_our_own_may_import_from_the_folders_they_name(pool, tmp_path):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "ours.py").write_text("value = 5")
        source = "import ours\ndef grade(sample, item): return ours.value\n"
        assert one(pool, source, shared="ours", paths=(folder,)).score == 5
    assert one(pool, source).kind is FailureKind.SOURCE


def test_what_one_source_writes_another_does_not_see(pool):
    """A tool that a model uses cannot reach the grader of its answers, nor one owner another."""
    grader = "def grade(sample, item):\n    return 0.5\n"
    tool = """
import builtins, os, sys
def f():
    builtins.grade = lambda sample, item: 1.0
    sys.modules["source"] = None
    done = []
    for folder in {".", "/scratch", "/tmp", *sys.path}:
        for place in (folder, *(os.path.join(folder, "..", name) for name in named(folder + "/.."))):
            try:
                open(place + "/grade.py", "w").write("1")
            except OSError:
                continue
            done.append(place)
    return done
def named(folder):
    try:
        return os.listdir(folder)
    except OSError:
        return []
"""
    peek = "import os\ndef f(): return [hasattr(__builtins__, 'grade'), os.listdir('.')]\n"
    assert one(pool, grader, owner="a").score == 0.5
    written = pool.call(tool, "f", [()], 10.0, owner="a")[0]
    assert written.error is None
    assert written.value != []  # its own folder
    assert one(pool, grader, owner="a").score == 0.5
    assert pool.call(peek, "f", [()], 10.0, owner="a")[0].value == [False, []]
    assert pool.call(tool, "named", [(".",)], 10.0, owner="b")[0].value == []


# ---------------------------------------------------------------- the parent and others


def test_nothing_of_the_parents_environment_is_seen(pool, monkeypatch, tmp_path):
    monkeypatch.setenv("JIGSAW_TEST_SECRET", "s3cret")
    source = "import os\ndef f(): return [dict(os.environ), open('/proc/self/environ').read()]\n"
    with SandboxPool(1, scratch_root=tmp_path) as fresh:
        seen, given = fresh.call(source, "f", [()], 10.0)[0].value
    assert seen == {}
    assert set(given.split("\0")) <= {"PYTHONHASHSEED=0", "PWD=/scratch", ""}


@pytest.mark.parametrize("name", ["environ", "cmdline", "maps", "root/etc/passwd", "fd", "mem"])
def test_proc_of_others_is_closed(pool, name):
    read = "os.listdir(path)" if name == "fd" else "open(path, 'rb').read(1)"
    for process in (os.getpid(), os.getppid()):
        code = f"path = '/proc/{process}/{name}'; return {read}.hex()"
        assert attempt(pool, code) == "refused"


def test_no_other_process_is_listed(pool):
    assert attempt(pool, "return [p for p in os.listdir('/proc') if p.isdigit()]") in ("refused", ["1", "2"])


def test_no_descriptor_of_the_parent_is_inherited(isolation, tmp_path):
    with (tmp_path / "secret").open("w") as secret:
        os.set_inheritable(secret.fileno(), True)
        source = "import os\ndef link(fd):\n    try: return os.readlink(f'/proc/self/fd/{fd}')\n"
        source += "    except FileNotFoundError: return ''\ndef f(): return [link(fd) for fd in range(64)]\n"
        with SandboxPool(1, scratch_root=tmp_path) as fresh:
            seen = fresh.call(source, "f", [()], 10.0)[0].value
    assert sum("pipe:" in link for link in seen) == 5  # requests, replies, 1 and 2, the lifeline
    assert not any("secret" in link for link in seen)


@pytest.mark.parametrize(
    "code",
    [
        "return os.kill(arguments[0], 0)",
        "return os.kill(-1, 0)",
        "return os.killpg(0, 9)",
        "return os.kill(os.getppid(), 9)",
        "import signal; return signal.pidfd_send_signal(os.pidfd_open(arguments[0]), 0)",
        "import resource; return resource.prlimit(arguments[0], resource.RLIMIT_NOFILE)",
        "import fcntl; return fcntl.fcntl(1, fcntl.F_SETOWN, arguments[0])",
        "return os.setpriority(os.PRIO_PROCESS, arguments[0], 19)",
        "return os.setsid()",
        "return os.setuid(0)",
        "return os.sched_setaffinity(arguments[0], {0})",
    ],
)
def test_no_other_process_can_be_touched(pool, code):
    assert attempt(pool, code, os.getpid()) == "refused"


def test_the_way_to_a_closed_folders_library_leads_nowhere_else(pool):
    source = """
import os
def f():
    found = []
    for fd in range(64):
        for n in range(9):
            try:
                found += os.listdir(f'/proc/self/fd/{fd}/' + '../' * n)
            except OSError:
                pass
    return found
"""
    result = pool.call(source, "f", [()], 10.0)[0]
    assert result.error is None
    assert not {"pyproject.toml", "passwd", ".ssh", ".bashrc"} & set(result.value)


# ---------------------------------------------------------------- the network


@pytest.fixture
def listening(tmp_path):
    """A server on a loopback port and one on a socket file, as the database has both."""
    with (
        socket.socket() as port,
        socket.socket(socket.AF_UNIX) as file,
        tempfile.TemporaryDirectory() as folder,
    ):
        Path(folder).chmod(0o777)
        path = f"{folder}/db"
        file.bind(path)
        Path(path).chmod(0o777)
        port.bind(("127.0.0.1", 0))
        for server in (port, file):
            server.listen()
        yield port.getsockname()[1], path


@pytest.mark.parametrize(
    "code",
    [
        "return socket.create_connection(('127.0.0.1', arguments[0]))",
        "return socket.socket(socket.AF_UNIX).connect(arguments[1])",
        "return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))",
        "return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "return socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "return socket.socketpair()[0].connect(arguments[1])",
        "return socket.socketpair()[0].sendto(b'x', arguments[1])",
        "return socket.socketpair()[0].sendmsg([b'x'])",
        "return socket.create_server(('127.0.0.1', 0))",
    ],
)
def test_no_socket_leads_out(pool, listening, code):
    assert attempt(pool, f"import socket; {code}", *listening) == "refused"


def test_no_system_call_that_the_filter_does_not_name(pool):
    """Of x86-64: io_uring, bpf, userfaultfd, ptrace, unshare, mount, process_vm_readv; one of tomorrow."""
    numbers = (425, 321, 323, 101, 272, 165, 310, 999) if os.uname().machine == "x86_64" else (425, 999)
    source = "import ctypes\nl = ctypes.CDLL(None, use_errno=True)\n"
    source += "def f(n): return [l.syscall(n, 0, 0, 0, 0, 0, 0), ctypes.get_errno()]\n"
    results = pool.call(source, "f", [(number,) for number in numbers], 10.0)
    assert [result.value for result in results] == [[-1, 1]] * len(numbers)


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(
    "code",
    [
        "return os.fork()",
        "return os.posix_spawn('/bin/true', ['true'], {})",
        "return os.execv('/bin/true', ['true'])",
        "return os.execv(sys.executable, ['python'])",
        "return os.system('true') or 'ran'",
    ],
)
def test_no_process_is_started(pool, code):
    assert attempt(pool, code) in ("refused", -1, 127 << 8)


def test_no_thread_is_started(pool):
    result = one(pool, "import threading\ndef grade(sample, item):\n    threading.Thread().start()\n")
    assert "can't start new thread" in result.error


def test_a_fork_bomb_is_one_process(pool):
    source = "import os\ndef f():\n    n = 0\n    for _ in range(1000):\n        try: os.fork(); n += 1\n"
    source += "        except OSError: pass\n    return n\n"
    assert pool.call(source, "f", [()], 10.0)[0].value == 0


@pytest.mark.parametrize(
    "code", ["bytearray(10 << 30)", "[0] * (10 << 27)", "[bytes(1 << 20) for _ in range(10 << 10)]"]
)
def test_ten_gigabytes_are_a_memory_failure_and_the_next_call_works(pool, code):
    result = one(pool, f"def grade(sample, item):\n    return len({code})\n", owner="memory")
    assert (result.score, result.kind) == (None, FailureKind.MEMORY)
    assert one(pool, LENGTH, owner="memory").score == 0.75


def test_a_large_file_cannot_be_written(pool):
    source = "def grade(sample, item):\n    open('big', 'wb').write(bytes(32 << 20))\n    return 1\n"
    assert "File too large" in one(pool, source).error


def test_limits_cannot_be_raised(pool):
    for name in ("AS", "FSIZE", "NPROC", "NOFILE", "CORE"):
        code = f"import resource as r; return r.setrlimit(r.RLIMIT_{name}, (1 << 40, 1 << 40))"
        source = f"def f():\n    try:\n        {code}\n"
        source += "    except (ValueError, OSError):\n        return 'refused'\n"
        assert pool.call(source, "f", [()], 10.0)[0].value == "refused"


@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
        "return 10 ** 10 ** 10",
        "import signal\n    [signal.signal(s, id) for s in {*signal.Signals} - {9, 19}]\n    while 1: pass",
        "while True: print('x' * 10_000)",
        "input_forever = iter(int, 1)\n    return sum(input_forever)",
    ],
)
def test_the_wall_clock_ends_what_does_not_end(pool, body):
    result = one(pool, f"def grade(sample, item):\n    {body}\n", timeout_s=0.3, owner="endless")
    assert (result.kind, result.error) == (FailureKind.TIMEOUT, "timed out after 0.3 s")
    assert len(result.output) <= OUTPUT_BYTES
    assert one(pool, LENGTH, owner="endless").score == 0.75


def test_the_cpu_clock_is_a_backstop(pool):
    """Below the wall clock: here the tenant lowers its own."""
    source = "import resource as r\ndef grade(sample, item):\n"
    source += "    r.setrlimit(r.RLIMIT_CPU, (1, 1))\n    while True: pass\n"
    result = one(pool, source, timeout_s=30.0)
    assert result.kind is FailureKind.CRASHED
    assert result.error in (
        "the sandboxed process used up its CPU time",
        "the sandboxed process was killed by SIGKILL",
    )


def test_huge_output_is_capped_and_costs_no_score(pool):
    result = one(pool, "def grade(sample, item):\n    print('x' * (8 << 20))\n    return 1\n")
    assert result.score == 1.0
    assert result.output == "x" * OUTPUT_BYTES


def test_an_endless_loop_is_killed_and_the_next_grade_works(pool):
    source = "def grade(sample, item):\n    while item['loop']: pass\n    return 1\n"
    calls = [({}, {"loop": loop}) for loop in (True, False, True, False)]
    results = pool.grade(source, calls, 0.3, owner="a")
    assert [result.score for result in results] == [None, 1.0, None, 1.0]


def test_an_endless_top_level_fails_the_whole_batch_in_one_limit(pool):
    calls = [({}, {})] * 20
    results = pool.grade("def grade(sample, item): return 1\nwhile True: pass\n", calls, 0.3)
    assert {result.kind for result in results} == {FailureKind.TIMEOUT}
    assert results[0].error == "loading the source: timed out after 0.3 s"


# ---------------------------------------------------------------- its own process


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("os._exit(3)", "the sandboxed process exited with status 3"),
        ("os._exit(0)", "the sandboxed process exited with status 0"),
        ("os.abort()", "the sandboxed process was killed by SIGABRT"),
        ("os.kill(os.getpid(), 9)", "the sandboxed process was killed by SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "the sandboxed process was killed by SIGSEGV"),
    ],
)
def test_a_process_that_ends_itself_is_a_crash_and_the_next_call_works(pool, body, error):
    result = one(pool, f"import os\ndef grade(sample, item):\n    {body}\n", owner="ends")
    assert (result.kind, result.error) == (FailureKind.CRASHED, error)
    assert one(pool, LENGTH, owner="ends").score == 0.75


@pytest.mark.parametrize("then", ["return 1", "while True: pass"])
def test_a_process_that_closes_its_descriptors_is_a_typed_failure(pool, then):
    source = f"import os\ndef grade(sample, item):\n    os.closerange(0, 64)\n    {then}\n"
    result = one(pool, source, timeout_s=0.5, owner="closes")
    assert result.kind in (FailureKind.CRASHED, FailureKind.TIMEOUT)
    assert one(pool, LENGTH, owner="closes").score == 0.75


def test_the_lifeline_cannot_be_closed(pool):
    for code in ("os.close(63)", "os.dup2(1, 63)", "import fcntl; fcntl.fcntl(63, fcntl.F_SETFL, 0)"):
        assert attempt(pool, code) == "refused"


def test_a_chain_of_classes_reaches_nothing_that_matters(pool, outside):
    """From a bare literal to every class and module of the process: all of them meet the same walls."""
    source = """
ATTEMPTS = [("open", ("path",)), ("system", ("true",)), ("fork", ()), ("listdir", ("/home",))]
def f(path):
    found = []
    for kind in ().__class__.__base__.__subclasses__():
        scope = getattr(getattr(kind, "__init__", None), "__globals__", None)
        if scope is None:
            continue
        modules = [scope, *(vars(value) for value in scope.values() if type(value).__name__ == "module")]
        for module in modules:
            for name, arguments in ATTEMPTS:
                if callable(module.get(name)):
                    try:
                        answer = module[name](*(path if a == "path" else a for a in arguments))
                    except (OSError, TypeError):
                        continue
                    found.append([name, repr(answer)])
    return [[name, answer] for name, answer in found if (name, answer) != ("system", "32512")]
"""
    result = pool.call(source, "f", [(str(outside / "secret"),)], 20.0)[0]
    assert (result.error, result.value) == (None, [])


def test_the_process_holds_no_rights(pool):
    source = "def f(): return open('/proc/self/status').read()\n"
    status = dict(line.split(":\t", 1) for line in pool.call(source, "f", [()], 10.0)[0].value.splitlines())
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == int(status["CapInh"], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"], status["Threads"]) == ("1", "2", "1")
    assert "0" not in status["Uid"].split() + status["Gid"].split() + status["Groups"].split()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become others")
def test_children_of_root_are_users_of_their_own(pool):
    source = "import os\ndef grade(sample, item): return os.getuid()\n"
    assert one(pool, source, owner="a").score != one(pool, source, owner="b").score


def test_the_interpreter_is_this_one(pool):
    code = "return sys.version"
    assert attempt(pool, code) == sys.version
