"""``python -m scheduler.sim``: the evaluation, a trace of jobs, and a picture of both policies."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from scheduler.sim import gantt, replay, reproduce
from scheduler.sim.fields import TraceError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scheduler.sim", description=__doc__)
    programs = parser.add_subparsers(dest="program", required=True, metavar="PROGRAM")
    for program, what in (
        (reproduce, "simulate the paper's comparisons"),
        (replay, "simulate the jobs of a trace file"),
        (gantt, "draw devices by time for two policies"),
    ):
        name = program.__name__.rsplit(".", 1)[1]
        own = programs.add_parser(name, help=what, description=program.__doc__)
        program.add_arguments(own)
        own.set_defaults(run=program.run)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
