"""Tenants' Python in killable, confined child processes.

    SandboxPool ── leases ──► SandboxProcess ══ pipes ══ child/run.py (fresh interpreter, own process group)
         └ probe: which isolation works here     └ isolation, view: what the child is kept apart from

``child`` imports the standard library only; ``process.py`` is one child seen from the parent, ``replies.py``
what it answered; ``pool.py`` keeps children warm, deals calls out to them and never lends one owner's child
to another. The parent executes, compiles or unpickles nothing of a tenant's: it writes and reads JSON.

A child holds nothing: no rights, no environment, no descriptor but its pipes, no file but the interpreter's
and its scratch folder's, no socket, no second process or thread. What its code can reach inside the process
is therefore no secret. Not hidden are the machine's load and kernel, and under Landlock that a path exists.
"""
