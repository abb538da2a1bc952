"""What runs in the child: standard library only, and nothing of the project beside this folder.

run.py ──► limits, landlock, seccomp    give up what a tenant's code must not have
       ──► source                       compile it, run it, call its functions
       ══ messages ══ the parent
"""
