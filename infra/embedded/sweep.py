"""Stop everything of ours that still runs in a ``var/``: ``python -m infra.embedded.sweep [var]``.

Standard library only, so that ``make clean`` works without the virtual environment.
"""

from __future__ import annotations

import sys
from pathlib import Path
from signal import SIGTERM

from infra.embedded import paths, postgres, processes, ray_head, valkey

SERVICES = ("postgres", "valkey", "ray")
# A running ``up`` needs this long at most to stop all its programs in order.
_UP_SECONDS = 90.0


def up_lock(var: Path) -> Path:
    return var / "run" / "up.lock"


def up_record(var: Path) -> Path:
    return var / "run" / "up.pid"


def programs(var: Path) -> None:
    """End the programs that a killed ``up`` left; the services stay."""
    for record in sorted((var / "run").glob("*.pid")):
        if record.stem not in (*SERVICES, "up"):
            processes.end(record, ((SIGTERM, 3.0),))


def everything(var: Path) -> None:
    """End all programs and services of this folder. Raises RuntimeError if something does not end."""
    programs(var)
    for service in (ray_head, valkey, postgres):
        if (var / "run").is_dir():
            service.stop(var)


def down(var: Path) -> bool:
    """Stop a running ``up`` as its Ctrl-C would, then sweep; whether one ran."""
    ran = processes.recall(up_record(var)) is not None
    if ran:
        # Only itself: what it started, it stops in order; its terminal and parents are not ours.
        processes.ask_to_end(up_record(var), SIGTERM, _UP_SECONDS)
    everything(var)
    return ran


def main() -> None:
    var = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else paths.var_dir()
    # Test runs keep services in folders of their own below var/.
    for folder in (var, *(run.parent for run in sorted(var.glob("test/*/run")))):
        if folder.is_dir() and down(folder):
            print(f"stopped what ran in {folder}")


if __name__ == "__main__":
    main()
