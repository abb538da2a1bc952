"""The child: confine yourself, load one source, call its functions until the pipe closes.

Run as a script by a fresh interpreter that sees the standard library only. Messages are JSON, each preceded
by its length in 4 bytes, big-endian. The first one sent is ``{"op": "hello"}``, so that the parent's clock
for a tenant's code starts after the interpreter's own start; its ``missing`` says why a part of the
confinement could not be had, if so. Requests and replies:

    {"op": "check", "source", "wanted"}                       -> {} or {"error"}  compile and look only
    {"op": "load", "source", "wanted", "timeout_s", "paths"}  -> {} or {"error"}  run its top level
    {"op": "call", "function", "arguments", "timeout_s"}      -> {"value"} or {"error", "kind"}

Whatever a tenant's code prints goes to descriptors 1 and 2, which the parent drains; the messages travel on
two other descriptors. A tenant can find those and write nonsense: it then forges its own values, no one
else's, and the parent reads every reply as untrusted.
"""

# Importing pathlib would slow every start.
# ruff: noqa: PTH106, PTH108, PTH109, PTH112, PTH114, PTH116, PTH118, PTH120, PTH208

from __future__ import annotations

import ast
import contextlib
import ctypes
import fcntl
import json
import linecache
import math
import numbers
import os
import resource
import select
import shutil
import signal
import stat
import struct
import sys
import threading
import types
from collections.abc import Sequence

GRADE = "grade"  # the function whose value is a score, a finite number
FILENAME = "<source>"
VALUE_BYTES = 64 << 10
ERROR_CHARS = 2_000
CPU_HARD_SECONDS = 24 * 3600
#: A child of root's becomes a user of its own, this plus its process number: no two children can signal each
#: other or read each other's files. Above the ranges that accounts and containers are given.
FIRST_USER = 0x70000000
NOBODY = 65534
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38


def main() -> None:
    scratch = os.getcwd()
    inside = os.open(".", os.O_RDONLY)
    fcntl.flock(inside, fcntl.LOCK_EX)  # says that the folder is in use, see pool.sweep
    requests, replies = take_pipes()
    set_process_control(PR_SET_NO_NEW_PRIVS, 1)  # before there are threads: each has its own
    threading.Thread(target=end_with_parent, args=(requests, scratch, inside), daemon=True).start()
    folders, missing = become_nobody(sys.argv[3].split(os.pathsep))
    confine(address_space=int(sys.argv[1]), file_size=int(sys.argv[2]))
    send(replies, {"op": "hello", "missing": missing})
    module, pid = None, os.getpid()
    while (request := receive(requests)) is not None:
        if request["op"] == "check":
            reply = check(request["source"], request["wanted"])
        elif request["op"] == "load":
            limit_cpu(request["timeout_s"])
            sys.path.extend(folders.get(path, path) for path in request["paths"])
            module, reply = load(request["source"], request["wanted"])
        else:
            limit_cpu(request["timeout_s"])
            reply = call(module, request["function"], request["arguments"])
        flush_output()
        if os.getpid() != pid:  # a copy that the source forked came back too; only the first may answer
            os._exit(0)
        send(replies, reply)
    end(scratch, inside)


# ---------------------------------------------------------------- confinement


def take_pipes() -> tuple[int, int]:
    """Move the two message pipes off 0 and 1, which the tenant's code will see as stdin and stdout."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


def set_process_control(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def become_nobody(import_folders: list[str]) -> tuple[dict[str, str], str]:
    """Give root up for a user without rights, who owns the scratch folder alone.

    Returns where ``import_folders`` are to be found from now on, and why root could not be given up, if so.
    """
    if os.geteuid() != 0:
        return {}, ""
    folders = {path: reachable(path) for path in {*sys.path, *import_folders} if os.path.isdir(path)}
    closed = [path for path, found in folders.items() if found is None]
    if closed:
        return {}, f"graders run as root, for {closed[0]} cannot be read by another user"
    for user in (FIRST_USER + os.getpid(), NOBODY):
        try:
            os.chown(".", user, user)
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        except OSError:  # a container may know few users
            continue
        set_process_control(PR_SET_DUMPABLE, 1)  # lets the process see its own /proc/self again
        import_from(folders)
        return folders, ""
    return {}, "graders run as root, for the process may not change its user"


def reachable(folder: str) -> str | None:
    """A path by which any user can read the folder, if there is one.

    Below a closed folder, such as root's home, it is the path of an open descriptor.
    """
    inside = stat.S_IROTH | stat.S_IXOTH
    if os.stat(folder).st_mode & inside != inside:
        return None
    parent = os.path.dirname(os.path.realpath(folder))
    while os.stat(parent).st_mode & stat.S_IXOTH:
        if parent == os.path.dirname(parent):
            return folder
        parent = os.path.dirname(parent)
    if sys.platform != "linux":
        return None
    return f"/proc/self/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY)}"


def import_from(moved: dict[str, str]) -> None:
    """Look for modules in the moved folders; also for those of packages that are loaded already."""
    sys.path[:] = [moved.get(path, path) for path in sys.path]
    for module in list(sys.modules.values()):
        for index, path in enumerate(getattr(module, "__path__", ())):
            parent, name = os.path.split(path)
            module.__path__[index] = os.path.join(moved.get(parent, parent), name)
    sys.path_importer_cache.clear()


def confine(address_space: int, file_size: int) -> None:
    """What the child gives up before it sees a tenant's code."""
    os.environ.clear()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    # No process, so none that outlives this one, and no thread: the limit counts all of the user's. Only root
    # is exempt.
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def end_with_parent(requests: int, scratch: str, inside: int) -> None:
    """End the whole group once the parent's end of the request pipe is gone, even in mid-grade."""
    poll = select.poll()
    poll.register(requests, 0)  # no events asked for: only a hang-up or an error wakes it
    poll.poll()
    end(scratch, inside)


def end(scratch: str, inside: int) -> None:
    """What the parent does when it is there: empty the scratch folder, kill the group.

    A user without rights cannot remove the folder itself from its parent, nor go to it by its full path.
    """
    with contextlib.suppress(OSError):
        os.fchdir(inside)
        for entry in os.listdir("."):
            if os.path.isdir(entry) and not os.path.islink(entry):
                shutil.rmtree(entry, ignore_errors=True)
            else:
                os.unlink(entry)
        os.rmdir(scratch)
    os.killpg(0, signal.SIGKILL)


def limit_cpu(timeout_s: float) -> None:
    """A backstop below the parent's wall clock: this much CPU time more than what is already used."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    allowed = math.ceil(usage.ru_utime + usage.ru_stime + timeout_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (min(allowed, CPU_HARD_SECONDS), CPU_HARD_SECONDS))


# ---------------------------------------------------------------- the source


def check(source: str, wanted: Sequence[str]) -> dict:
    try:
        tree = ast.parse(source, FILENAME)
        compile(source, FILENAME, "exec", dont_inherit=True)
    except SyntaxError as error:
        return {"error": f"line {error.lineno or 1}: {error.msg}"}
    except (ValueError, RecursionError, MemoryError) as error:
        return {"error": f"line 1: the source cannot be compiled: {type(error).__name__}: {error}"}
    problems = (check_signature(tree, signature) for signature in wanted)
    return next((problem for problem in problems if problem), {})


def check_signature(tree: ast.Module, signature: str) -> dict:
    """Whether the source defines ``f(x, y)``, a function, or ``C.f(x)``, a method, at its top level."""
    path, _, names = signature.rstrip(")").partition("(")
    owner, _, name = path.rpartition(".")
    body, inherits = tree.body, False
    if owner:
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner]
        if not classes:
            return {"error": f"line 1: the source must define a class {owner}"}
        body, inherits = classes[-1].body, bool(classes[-1].bases)
    functions = [
        node
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    if functions:
        return check_parameters(functions[-1], path, names.split(", "), bound=bool(owner))
    if inherits:
        return {}
    what = f"class {owner} must define a method" if owner else "source must define a function"
    return {"error": f"line 1: the {what} {name}({names})"}


def check_parameters(
    function: ast.FunctionDef | ast.AsyncFunctionDef, path: str, names: list[str], bound: bool
) -> dict:
    if isinstance(function, ast.AsyncFunctionDef):
        return {"error": f"line {function.lineno}: {path} must be a plain function, not async"}
    args = function.args
    count = len(names) + bound
    positional = len(args.posonlyargs) + len(args.args)
    required = positional - len(args.defaults)
    needs_keyword = any(default is None for default in args.kw_defaults)
    if required > count or (positional < count and args.vararg is None) or needs_keyword:
        number = {1: "one argument", 2: "two arguments"}.get(len(names), f"{len(names)} arguments")
        return {"error": f"line {function.lineno}: {path} must take {number}, {' and '.join(names)}"}
    return {}


def load(source: str, wanted: Sequence[str]) -> tuple[types.ModuleType | None, dict]:
    """Run the source's top level in a module of its own; the module, and the reply."""
    problem = check(source, wanted)
    if problem:
        return None, problem
    module = types.ModuleType("source")
    sys.modules["source"] = module  # dataclasses and pickle look a class's module up by name
    linecache.cache[FILENAME] = (len(source), None, source.splitlines(keepends=True), FILENAME)
    try:
        exec(compile(source, FILENAME, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 its purpose
    except BaseException as error:
        return None, {"error": describe(error)}
    return module, {}


def call(module: types.ModuleType, name: str, arguments: Sequence[object]) -> dict:
    function = module.__dict__.get(name)
    if function is None:
        return {"error": f"the source defines no {name}", "kind": "source"}
    try:
        value = function(*arguments)
    except MemoryError as error:
        return {"error": describe(error), "kind": "memory"}
    except BaseException as error:
        return {"error": describe(error), "kind": "exception"}
    return as_score(value) if name == GRADE else as_json(name, value)


def as_json(name: str, value: object) -> dict:
    """The value as the parent will read it, or what is wrong with it."""
    try:
        data = json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except BaseException as error:
        problem = f"{name} returned {shown(value)}, which is no JSON: {type(error).__name__}"
        return {"error": problem, "kind": "bad_value"}
    if len(data) > VALUE_BYTES:
        problem = f"{name} returned {len(data):,} bytes, more than {VALUE_BYTES:,}"
        return {"error": problem, "kind": "bad_value"}
    return {"value": json.loads(data)}


def as_score(score: object) -> dict:
    """A finite real number, or what is wrong with it; True and False count as 1 and 0."""
    if not isinstance(score, numbers.Real):
        return {"error": f"grade returned {shown(score)}, not a number", "kind": "bad_score"}
    try:
        value = float(score)
    except BaseException as error:
        return {
            "error": f"grade returned a number that is no float: {type(error).__name__}",
            "kind": "bad_score",
        }
    if not math.isfinite(value):
        return {"error": f"grade returned {value}, not a finite number", "kind": "bad_score"}
    return {"value": value}


def shown(value: object) -> str:
    try:
        text = repr(value)
    except BaseException:
        text = "a value without a repr"
    return f"{text[:100]} ({type(value).__name__})" if value is not None else "None"


def describe(error: BaseException) -> str:
    """``line 3, in grade: ZeroDivisionError: division by zero``; the tenant's deepest line."""
    line, name = None, ""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == FILENAME:
            line, name = trace.tb_lineno, trace.tb_frame.f_code.co_name
        trace = trace.tb_next
    try:
        text = str(error)
    except BaseException:
        text = ""
    where = f"line {line}, in {name}: " if line is not None else ""
    return f"{where}{type(error).__name__}{': ' if text else ''}{text}"[:ERROR_CHARS]


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):  # a tenant may have closed or replaced it; the value stands
            stream.flush()


# ---------------------------------------------------------------- messages


def send(fd: int, message: dict) -> None:
    body = json.dumps(message, ensure_ascii=False).encode("utf-8", "replace")
    data = memoryview(struct.pack(">I", len(body)) + body)
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int) -> dict | None:
    head = read_exactly(fd, 4)
    body = read_exactly(fd, struct.unpack(">I", head)[0]) if head else None
    return json.loads(body) if body is not None else None


def read_exactly(fd: int, count: int) -> bytes | None:
    """``count`` bytes, or None when the parent closed the pipe."""
    parts = []
    while count:
        part = os.read(fd, min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main()
