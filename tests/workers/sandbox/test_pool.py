"""The sandbox: scores, every way to fail, and nothing left behind."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from workers.sandbox.pool import MAX_CALLS, SandboxPool, check_source
from workers.sandbox.process import OUTPUT_BYTES, FailureKind
from workers.sandbox.runner import reachable

LENGTH = "def grade(sample, item):\n    return len(sample['output_text']) / item['n']\n"
CALL = ({"output_text": "abc"}, {"n": 4})


@pytest.fixture
def pool(tmp_path):
    with SandboxPool(2, scratch_root=tmp_path) as pool:
        yield pool


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


def test_scores_come_back_in_order(pool):
    calls = [({"output_text": "x" * n}, {"n": 4}) for n in range(50)]
    assert [result.score for result in pool.grade(LENGTH, calls, 5.0)] == [n / 4 for n in range(50)]


@pytest.mark.parametrize(("returned", "score"), [("True", 1.0), ("False", 0.0), ("3", 3.0), ("-0.5", -0.5)])
def test_numbers_are_scores(pool, returned, score):
    assert one(pool, f"def grade(sample, item):\n    return {returned}\n").score == score


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("float('nan')", "grade returned nan, not a finite number"),
        ("float('-inf')", "grade returned -inf, not a finite number"),
        ("None", "grade returned None, not a number"),
        ("'0.5'", "grade returned '0.5' (str), not a number"),
        ("10 ** 400", "grade returned a number that is no float: OverflowError"),
    ],
)
def test_what_is_no_finite_number_is_an_error_not_a_zero(pool, returned, message):
    result = one(pool, f"def grade(sample, item):\n    return {returned}\n")
    assert (result.score, result.kind, result.error) == (None, FailureKind.BAD_SCORE, message)


def test_an_exception_names_the_tenants_line(pool):
    source = "def helper(x):\n    return 1 / x\n\ndef grade(sample, item):\n    return helper(0)\n"
    result = one(pool, source)
    assert result.kind is FailureKind.EXCEPTION
    assert result.error == "line 2, in helper: ZeroDivisionError: division by zero"


def test_an_exception_inside_the_library_names_the_line_that_called_it(pool):
    result = one(pool, "import json\ndef grade(sample, item):\n    return json.loads('{')\n")
    assert result.error.startswith("line 3, in grade: JSONDecodeError: ")


def test_sys_exit_is_an_error_and_the_process_goes_on(pool):
    source = "import sys\ncount = 0\ndef grade(sample, item):\n    global count; count += 1\n"
    source += "    if count == 1: sys.exit()\n    return count\n"
    assert one(pool, source, owner="a").kind is FailureKind.EXCEPTION
    assert one(pool, source, owner="a").score == 2.0


def test_an_endless_loop_is_killed_and_the_next_grade_works(pool):
    source = "def grade(sample, item):\n    while item['loop']: pass\n    return 1\n"
    calls = [({}, {"loop": loop}) for loop in (True, False, True, False)]
    start = time.monotonic()
    results = pool.grade(source, calls, 0.3, owner="a")
    assert [result.score for result in results] == [None, 1.0, None, 1.0]
    assert (results[0].kind, results[0].error) == (FailureKind.TIMEOUT, "timed out after 0.3 s")
    assert time.monotonic() - start < 10


def test_the_clock_starts_with_the_execution_not_with_the_queueing(pool):
    """Sixteen calls of 0.2 s on two processes queue for 1.4 s, each under its own limit of 1 s."""
    source = "import time\ndef grade(sample, item):\n    time.sleep(0.2)\n    return 1\n"
    assert [result.score for result in pool.grade(source, [CALL] * 16, 1.0)] == [1.0] * 16


def test_an_endless_top_level_fails_the_whole_batch_in_one_limit(pool):
    results = pool.grade("def grade(sample, item): return 1\nwhile True: pass\n", [CALL] * 20, 0.3)
    assert {result.kind for result in results} == {FailureKind.TIMEOUT}
    assert results[0].error == "loading the source: timed out after 0.3 s"


def test_os_exit_is_a_crash_and_the_next_grade_works(pool):
    source = "import os\ndef grade(sample, item):\n    os._exit(3)\n"
    result = one(pool, source, owner="a")
    assert (result.kind, result.error) == (FailureKind.CRASHED, "the sandboxed process exited with status 3")
    assert one(pool, LENGTH, owner="a").score == 0.75


def test_a_segmentation_fault_is_a_crash(pool):
    source = "import ctypes\ndef grade(sample, item):\n    ctypes.string_at(0)\n"
    assert one(pool, source).error == "the sandboxed process was killed by SIGSEGV"


def test_memory_is_limited(pool):
    result = one(pool, "def grade(sample, item):\n    return len(bytearray(2 << 30))\n")
    assert (result.score, result.kind) == (None, FailureKind.MEMORY)


def test_huge_output_is_capped_and_costs_no_score(pool):
    result = one(pool, "def grade(sample, item):\n    print('x' * (8 << 20))\n    return 1\n")
    assert result.score == 1.0
    assert result.output == "x" * OUTPUT_BYTES


def test_output_belongs_to_its_own_call(pool):
    source = "def grade(sample, item):\n    print(item['n'])\n    return 1\n"
    results = pool.grade(source, [({}, {"n": n}) for n in range(6)], 5.0)
    assert [result.output for result in results] == [f"{n}\n" for n in range(6)]


def test_a_forged_reply_is_a_crash(pool):
    source = "import contextlib, os\ndef grade(sample, item):\n    for fd in range(3, 20):\n"
    source += "        with contextlib.suppress(OSError): os.write(fd, bytes([255]) * 8)\n    return 1\n"
    result = one(pool, source)
    assert (result.score, result.kind) == (None, FailureKind.CRASHED)


def test_a_large_file_cannot_be_written(pool):
    source = "def grade(sample, item):\n    open('big', 'wb').write(bytes(32 << 20))\n    return 1\n"
    assert "File too large" in one(pool, source).error


def test_nothing_of_the_parents_environment_is_seen(pool, monkeypatch):
    monkeypatch.setenv("JIGSAW_TEST_SECRET", "s3cret")
    source = "import os\ndef grade(sample, item):\n"
    source += "    print(dict(os.environ), open('/proc/self/environ').read())\n    return 1\n"
    output = one(pool, source).output
    assert "s3cret" not in output
    assert output.split("\0")[0] == "{} PYTHONHASHSEED=0"


def test_only_the_standard_library_can_be_imported(pool):
    result = one(pool, "import pydantic\ndef grade(sample, item): return 1\n")
    assert result.kind is FailureKind.SOURCE
    assert result.error == "line 1, in <module>: ModuleNotFoundError: No module named 'pydantic'"


def test_no_descriptor_of_the_parent_is_inherited(pool, tmp_path):
    with (tmp_path / "secret").open("w") as secret:
        os.set_inheritable(secret.fileno(), True)
        source = "import os\ndef grade(sample, item):\n    for fd in range(64):\n"
        source += (
            "        if os.path.exists(f'/proc/self/fd/{fd}'): print(os.readlink(f'/proc/self/fd/{fd}'))\n"
        )
        source += "    return 1\n"
        with SandboxPool(1, scratch_root=tmp_path) as fresh:
            output = one(fresh, source).output
    assert output.count("pipe:") == 4  # requests, replies, and 1 and 2 for what is printed
    assert "secret" not in output


ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="only root can give root up")


@pytest.mark.parametrize(
    "attempt", ["os.fork()", "os.posix_spawn('/bin/true', ['true'], {})", "threading.Thread().start()"]
)
def test_nothing_is_started_that_could_outlive_a_timeout(pool, attempt):
    result = one(pool, f"import os, threading\ndef grade(sample, item):\n    {attempt}\n    return 1\n")
    assert result.kind is FailureKind.EXCEPTION
    assert "BlockingIOError" in result.error or "can't start new thread" in result.error


PEEK = """
import os
def libraries():
    return [fd for fd in range(3, 20) if os.path.exists(f'/proc/self/fd/{fd}/encodings')]
def grade(sample, item):
    try:
        PLACE
    except PermissionError:
        return 1
    return 0
"""


@needs_root
@pytest.mark.parametrize(
    "place",
    [
        "open(f'/proc/{os.getppid()}/environ').read()",
        "open('/etc/shadow').read()",
        "open(os.path.join(item['outside'], 'grader'), 'w')",
        "os.chmod(item['outside'], 0o777)",
        "os.kill(os.getppid(), 0)",
        "os.setuid(0)",
        # The way to a closed folder's library leads nowhere else.
        "[os.listdir(f'/proc/self/fd/{fd}/' + '../' * n) for fd in libraries() for n in range(9)]",
    ],
)
def test_a_child_of_root_has_no_rights(pool, place, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    if "libraries" in place and all(
        path.stat().st_mode & 0o1 for path in Path(os.__file__).resolve().parents
    ):
        pytest.skip("the interpreter lies in open folders")
    result = pool.grade(PEEK.replace("PLACE", place), [({}, {"outside": str(outside)})], 5.0)[0]
    assert (result.score, result.error) == (1.0, None)


@needs_root
def test_children_of_root_are_users_of_their_own(pool):
    source = "import os\ndef grade(sample, item):\n    open('mine', 'w').close()\n"
    source += "    assert len({os.getuid(), os.geteuid(), os.getgid(), *os.getgroups()}) == 1\n"
    source += "    for task in os.listdir('/proc/self/task'):\n"
    source += "        assert f'{os.getuid()}' in open(f'/proc/self/task/{task}/status').read()\n"
    source += "    assert 'NoNewPrivs:\\t1' in open('/proc/self/status').read()\n"
    source += "    return os.getuid()\n"
    users = {one(pool, source, owner=owner).score for owner in "ab"}
    assert len(users) == 2
    assert 0 not in users


def test_the_whole_standard_library_is_within_reach(pool):
    source = "import ctypes, decimal, email.mime.text, encodings.idna, json.tool, sqlite3, zoneinfo\n"
    source += "def grade(sample, item):\n    return float('a'.encode('koi8-r') == b'a')\n"
    assert (one(pool, source).score, one(pool, source).error) == (1.0, None)


@needs_root
def test_who_can_read_a_folder(tmp_path):
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    (folder / "home" / "lib").mkdir(parents=True)
    for path in (folder, folder / "home", folder / "home" / "lib"):
        path.chmod(0o755)
    assert reachable(str(folder / "home" / "lib")) == str(folder / "home" / "lib")
    (folder / "home").chmod(0o700)
    assert reachable(str(folder / "home" / "lib")).startswith("/proc/self/fd/")
    (folder / "home" / "lib").chmod(0o700)
    assert reachable(str(folder / "home" / "lib")) is None
    shutil.rmtree(folder)


@needs_root
def test_a_child_that_stays_root_says_why(tmp_path, monkeypatch, caplog):
    closed = tmp_path / "site-packages"
    closed.mkdir(mode=0o700)
    monkeypatch.syspath_prepend(str(closed))
    with SandboxPool(1, scratch_root=tmp_path) as pool:
        assert one(pool, LENGTH).score == 0.75
    assert f"graders run as root, for {closed} cannot be read by another user" in caplog.text


PARENT = """
import sys
from pathlib import Path
from workers.sandbox.process import SandboxProcess

process = SandboxProcess(Path(sys.argv[1]))
process.load("def grade(sample, item):\\n    print(1, flush=True)\\n    while True: pass\\n", 5.0)
print(process.pid, flush=True)
process.grade({}, {}, 600.0)
"""


def test_a_busy_child_dies_with_its_parent(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    session = int(parent.stdout.readline())
    assert members_of_session(session) == [session]
    parent.kill()
    parent.wait(20)
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while members_of_session(session) and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert members_of_session(session) == []
    SandboxPool(1, scratch_root=tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_an_idle_child_ends_when_its_parent_forgets_it(tmp_path):
    parent = "import sys\nfrom pathlib import Path\nfrom workers.sandbox.process import SandboxProcess\n"
    parent += "process = SandboxProcess(Path(sys.argv[1]))\nprocess.greet()\nprint(process.pid)\n"
    command = [sys.executable, "-c", parent, str(tmp_path)]
    session = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    deadline = time.monotonic() + 20
    while members_of_session(session) and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert members_of_session(session) == []
    SandboxPool(1, scratch_root=tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_a_pool_that_starts_leaves_the_folders_of_others_alone(tmp_path):
    with SandboxPool(1, scratch_root=tmp_path) as pool:
        assert one(pool, LENGTH, owner="a").score == 0.75
        before = set(tmp_path.iterdir())
        SandboxPool(1, scratch_root=tmp_path).close()
        assert set(tmp_path.iterdir()) == before


def test_close_leaves_no_process_and_no_scratch_folder(tmp_path):
    pool = SandboxPool(2, scratch_root=tmp_path)
    pids = [
        int(one(pool, "import os\ndef grade(sample, item): return os.getpid()\n", owner=o).score)
        for o in "ab"
    ]
    pids.append(pool._blank.pid)
    assert all(members_of_session(pid) == [pid] for pid in pids)
    pool.close()
    assert all(members_of_session(pid) == [] for pid in pids)
    assert list(tmp_path.iterdir()) == []
    assert one(pool, LENGTH).error == "the sandbox pool was closed"


ENDLESS = "def grade(sample, item):\n    open('started', 'w').close()\n    while True: pass\n"


def wait_until_started(scratch_root):
    deadline = time.monotonic() + 30
    while not list(scratch_root.glob("*/started")) and time.monotonic() < deadline:
        threading.Event().wait(0.01)


def test_an_owner_whose_calls_hang_leaves_the_others_their_part(tmp_path):
    """On two processes the hanging owner has both, and gives one up as soon as another owner asks."""
    with SandboxPool(2, scratch_root=tmp_path) as pool:
        thread = threading.Thread(target=lambda: pool.grade(ENDLESS, [CALL] * 50, 1.0, owner="a"))
        thread.start()
        wait_until_started(tmp_path)
        begun = time.monotonic()
        assert [result.score for result in pool.grade(LENGTH, [CALL] * 40, 5.0, owner="b")] == [0.75] * 40
        # One wait of at most a second for a place; taking turns would have cost about twenty.
        assert time.monotonic() - begun < 10
        pool.cancel("a")
        thread.join(20)


@pytest.mark.parametrize("shared", [None, "math"])
def test_cancel_ends_an_owners_grades_and_no_one_elses(tmp_path, shared):
    results = []
    with SandboxPool(2, scratch_root=tmp_path) as pool:
        own = one(pool, "import os\ndef grade(sample, item): return os.getpid()\n", owner="a").score
        other = one(pool, "import os\ndef grade(sample, item): return os.getpid()\n", owner="b").score
        begun = time.monotonic()
        thread = threading.Thread(
            target=lambda: results.extend(pool.grade(ENDLESS, [CALL] * 50, 60.0, owner="a", shared=shared))
        )
        thread.start()
        wait_until_started(tmp_path)
        pool.cancel("a")
        thread.join(30)
        assert time.monotonic() - begun < 30
        assert [(result.score, result.error) for result in results] == [
            (None, "the grading was cancelled")
        ] * 50
        assert members_of_session(int(own)) == []
        assert members_of_session(int(other)) == [int(other)]
        assert not list(tmp_path.glob("*/started"))
        assert one(pool, LENGTH, owner="b").score == 0.75
        pool.cancel("nobody")


def test_a_cancelled_owner_gets_no_further_call(pool):
    pool.cancel("a")
    assert one(pool, LENGTH, owner="a").error == "the grading was cancelled"
    assert one(pool, LENGTH, owner="b").score == 0.75


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


def test_close_ends_a_grade_in_progress(tmp_path):
    pool = SandboxPool(1, scratch_root=tmp_path)
    results = []
    thread = threading.Thread(target=lambda: results.extend(pool.grade(ENDLESS, [CALL] * 3, 60.0)))
    thread.start()
    wait_until_started(tmp_path)
    pool.close()
    thread.join(20)
    assert [result.score for result in results] == [None] * 3
    assert results[-1].kind is FailureKind.SANDBOX


def test_a_process_serves_one_owner_only(pool):
    source = "import os\nseen = []\ndef grade(sample, item):\n    seen.append(1)\n    return os.getpid()\n"
    first, again = one(pool, source, owner="a").score, one(pool, source, owner="a").score
    other = one(pool, source, owner="b").score
    assert first == again
    assert other != first


def test_without_an_owner_the_process_ends_with_the_batch(pool):
    pid = int(one(pool, "import os\ndef grade(sample, item): return os.getpid()\n").score)
    assert members_of_session(pid) == []


def test_a_process_is_replaced_after_its_share_of_calls(tmp_path):
    source = "count = 0\ndef grade(sample, item):\n    global count; count += 1\n    return count\n"
    with SandboxPool(1, scratch_root=tmp_path) as pool:
        scores = [result.score for result in pool.grade(source, [CALL] * (MAX_CALLS + 1), 5.0, owner="a")]
    assert scores == [*range(1, MAX_CALLS + 1), 1]


def test_a_slow_batch_does_not_starve_another(tmp_path):
    """On one process a batch of 40 slow calls and one of 2 take turns."""
    slow = "import time\ndef grade(sample, item):\n    time.sleep(0.05)\n    return time.monotonic()\n"
    with SandboxPool(1, scratch_root=tmp_path) as pool:
        results = []
        thread = threading.Thread(
            target=lambda: results.extend(pool.grade(slow, [CALL] * 40, 5.0, owner="a"))
        )
        thread.start()
        quick = pool.grade(slow, [CALL] * 2, 5.0, owner="b")
        thread.join(60)
    assert quick[-1].score < results[-1].score


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def grade(sample, item):\n    return 1\nx = = 2\n", "line 3: invalid syntax"),
        ("def grade(sample, item)\n    return 1\n", "line 1: expected ':'"),
        ("x = 1\n", "line 1: the source must define a function grade(sample, item)"),
        ("\n\ndef grade(sample): return 1\n", "line 3: grade must take two arguments, sample and item"),
        ("def grade(a, b, c): return 1\n", "line 1: grade must take two arguments, sample and item"),
        ("def grade(a, b, *, c): return 1\n", "line 1: grade must take two arguments, sample and item"),
        ("async def grade(a, b): return 1\n", "line 1: grade must be a plain function, not async"),
        ("x = '\0'\n", "line 1: source code string cannot contain null bytes"),
        ("x = " + "(" * 300 + "\n", "line 1: too many nested parentheses"),
    ],
)
def test_check_source_names_the_line(source, message):
    with pytest.raises(ValueError) as refused:
        check_source(source)
    assert str(refused.value) == message


@pytest.mark.parametrize("source", ["x = '\ud800'\n", "-" * 100_000 + "1", "x" + ".a" * 100_000])
def test_check_source_survives_what_breaks_a_compiler(source):
    with pytest.raises(ValueError, match="line 1: the source"):
        check_source(source)


def test_check_source_runs_nothing(tmp_path):
    check_source(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef grade(sample, item, extra=None): return 1\n")
    check_source("def grade(*args): return 1\n")
    assert list(tmp_path.iterdir()) == []


def test_a_pool_needs_a_process():
    with pytest.raises(ValueError, match="at least one process"):
        SandboxPool(0)
