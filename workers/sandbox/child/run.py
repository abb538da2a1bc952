"""The child: confine yourself, load one source, call its functions until the pipe closes.

A fresh interpreter runs this as a script. The first request says how to be confined; its reply comes once it
is done, or says why it cannot be, so that the parent's clock for a tenant's code starts after all that:

    {"op": "confine", ...}                                    -> {} or {"refused"}
    {"op": "check", "source", "wanted"}                       -> {} or {"error"}  compile and look only
    {"op": "load", "source", "wanted", "timeout_s"}           -> {} or {"error"}  run its top level
    {"op": "call", "function", "arguments", "timeout_s"}      -> {"value"} or {"error", "kind"}

Whatever a tenant's code prints goes to descriptors 1 and 2, which the parent drains; the messages travel on
two other descriptors. A tenant can find those and write nonsense: it then forges its own values, no one
else's, and the parent reads every reply as untrusted.
"""

from __future__ import annotations

import os
import sys
import types


def main() -> None:
    from workers.sandbox.child import limits, source
    from workers.sandbox.child.messages import receive, send

    requests, replies = take_pipes()
    module = None
    while (request := receive(requests)) is not None:
        if request["op"] == "confine":
            reply = confine(request)
        elif request["op"] == "check":
            reply = source.check(request["source"], request["wanted"])
        elif request["op"] == "load":
            limits.limit_cpu(request["timeout_s"])
            module, reply = source.load(request["source"], request["wanted"])
        else:
            limits.limit_cpu(request["timeout_s"])
            reply = source.call(module, request["function"], request["arguments"])
        source.flush_output()
        send(replies, reply)
    os._exit(0)


def take_pipes() -> tuple[int, int]:
    """Move the two message pipes off 0 and 1, which the tenant's code will see as stdin and stdout."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


def confine(asked: dict) -> dict:
    """Give up all that is asked for, or say what could not be given up."""
    from workers.sandbox.child import kernel, landlock, limits, seccomp

    try:
        limits.die_with(asked["lifeline"])
        sys.path.extend(asked["paths"])
        files = asked["files"]
        own = [os.getcwd()] if files else []  # noqa: PTH109 pathlib would slow every start
        ruleset = None
        if files:
            read = [*files["read"], f"/proc/{os.getpid()}"]
            ruleset = landlock.rules(read, files["listed"], [*files["devices"], *own])
        if asked["users"]:
            limits.become(asked["users"], own)
        limits.limit(asked["address_space"], asked["file_size"])
        kernel.drop_capabilities()
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if ruleset is not None:
            landlock.restrict(ruleset)
        # A user's own files are all of the machine's, unless it is a user of its own or they are out of view.
        seccomp.install(limits.LIFELINE, metadata=bool(asked["users"]) or ruleset is None)
    except OSError as error:
        return {"refused": str(error)}
    return {}


def find_only(folder: str) -> None:
    """Make this folder's modules known by their full names, and nothing else of the project."""
    name = ""
    for part in ("workers", "sandbox", "child"):
        name = f"{name}.{part}".lstrip(".")
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [folder] if part == "child" else []


if __name__ == "__main__":
    find_only(__file__.rpartition("/")[0])
    main()
