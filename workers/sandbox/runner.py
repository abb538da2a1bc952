"""The child: confine yourself, load one grader, grade until the pipe closes.

Run as a script by a fresh interpreter that sees the standard library only. Messages are JSON, each preceded
by its length in 4 bytes, big-endian. The first one sent is ``{"op": "hello"}``, so that the parent's clock
for a tenant's code starts after the interpreter's own start. Requests and replies:

    {"op": "check", "source"}                        -> {} or {"error"}      compile and look, run nothing
    {"op": "load", "source", "timeout_s", "paths"}   -> {} or {"error"}      run the module's top level
    {"op": "grade", "sample", "item", "timeout_s"}   -> {"score"} or {"error", "kind"}

Whatever a tenant's code prints goes to descriptors 1 and 2, which the parent drains; the messages travel on
two other descriptors. A tenant can find those and write nonsense: it then forges its own scores, no one
else's, and the parent reads every reply as untrusted.
"""

from __future__ import annotations

import ast
import contextlib
import json
import linecache
import math
import numbers
import os
import resource
import select
import shutil
import signal
import struct
import sys
import threading
import types

FILENAME = "<grader>"
ERROR_CHARS = 2_000
CPU_HARD_SECONDS = 24 * 3600


def main() -> None:
    scratch = os.getcwd()  # noqa: PTH109 importing pathlib would slow every start
    requests, replies = take_pipes()
    threading.Thread(target=end_with_parent, args=(requests, scratch), daemon=True).start()
    confine(address_space=int(sys.argv[1]), file_size=int(sys.argv[2]))
    send(replies, {"op": "hello"})
    grade, pid = None, os.getpid()
    while (request := receive(requests)) is not None:
        if request["op"] == "check":
            reply = check(request["source"])
        elif request["op"] == "load":
            limit_cpu(request["timeout_s"])
            sys.path.extend(request["paths"])
            grade, reply = load(request["source"])
        else:
            limit_cpu(request["timeout_s"])
            reply = run(grade, request["sample"], request["item"])
        flush_output()
        if os.getpid() != pid:  # a copy that the grader forked came back too; only the first may answer
            os._exit(0)
        send(replies, reply)
    end(scratch)


# ---------------------------------------------------------------- confinement


def take_pipes() -> tuple[int, int]:
    """Move the two message pipes off 0 and 1, which the tenant's code will see as stdin and stdout."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


def confine(address_space: int, file_size: int) -> None:
    """What the child gives up before it sees a tenant's code."""
    os.environ.clear()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    if os.geteuid() != 0:  # root is exempt from the limit; for others it counts all of the user's processes
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def end_with_parent(requests: int, scratch: str) -> None:
    """End the whole group once the parent's end of the request pipe is gone, even in mid-grade."""
    poll = select.poll()
    poll.register(requests, 0)  # no events asked for: only a hang-up or an error wakes it
    poll.poll()
    end(scratch)


def end(scratch: str) -> None:
    """What the parent does when it is there: remove the scratch folder, kill the group."""
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def limit_cpu(timeout_s: float) -> None:
    """A backstop below the parent's wall clock: this much CPU time more than what is already used."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    allowed = math.ceil(usage.ru_utime + usage.ru_stime + timeout_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (min(allowed, CPU_HARD_SECONDS), CPU_HARD_SECONDS))


# ---------------------------------------------------------------- the grader


def check(source: str) -> dict:
    try:
        tree = ast.parse(source, FILENAME)
        compile(source, FILENAME, "exec", dont_inherit=True)
    except SyntaxError as error:
        return {"error": f"line {error.lineno or 1}: {error.msg}"}
    except (ValueError, RecursionError, MemoryError) as error:
        return {"error": f"line 1: the source cannot be compiled: {type(error).__name__}: {error}"}
    return check_signature(tree)


def check_signature(tree: ast.Module) -> dict:
    """Whether the source defines ``grade(sample, item)`` at its top level."""
    named = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "grade"
    ]
    if not named:
        return {"error": "line 1: the source must define a function grade(sample, item)"}
    function = named[-1]
    if isinstance(function, ast.AsyncFunctionDef):
        return {"error": f"line {function.lineno}: grade must be a plain function, not async"}
    args = function.args
    positional = len(args.posonlyargs) + len(args.args)
    required = positional - len(args.defaults)
    needs_keyword = any(default is None for default in args.kw_defaults)
    if required > 2 or (positional < 2 and args.vararg is None) or needs_keyword:
        return {"error": f"line {function.lineno}: grade must take two arguments, sample and item"}
    return {}


def load(source: str) -> tuple[object, dict]:
    """Run the grader's top level in a module of its own; the function, and the reply."""
    problem = check(source)
    if problem:
        return None, problem
    module = types.ModuleType("grader")
    sys.modules["grader"] = module  # dataclasses and pickle look a class's module up by name
    linecache.cache[FILENAME] = (len(source), None, source.splitlines(keepends=True), FILENAME)
    try:
        exec(compile(source, FILENAME, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 its purpose
    except BaseException as error:
        return None, {"error": describe(error)}
    return module.__dict__["grade"], {}


def run(grade: object, sample: dict, item: dict) -> dict:
    try:
        score = grade(sample, item)
    except MemoryError as error:
        return {"error": describe(error), "kind": "memory"}
    except BaseException as error:
        return {"error": describe(error), "kind": "exception"}
    return as_score(score)


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
    return {"score": value}


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
        with contextlib.suppress(BaseException):  # a tenant may have closed or replaced it; the score stands
            stream.flush()


# ---------------------------------------------------------------- messages


def send(fd: int, message: dict) -> None:
    body = json.dumps(message).encode()
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
