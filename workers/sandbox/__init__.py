"""Tenants' Python in killable child processes.

    SandboxPool ── leases ──► SandboxProcess ══ pipes ══ runner.py (fresh interpreter, own process group)

``runner.py`` runs in the child and imports the standard library only; ``process.py`` is one child seen from
the parent; ``pool.py`` keeps children warm, deals calls out to them and never lends one owner's child to
another. The parent executes, compiles or unpickles nothing of a tenant's: it writes and reads JSON.
"""
