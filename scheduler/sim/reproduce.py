"""``python -m scheduler.sim reproduce``: the paper's comparisons, simulated, in one table."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from scheduler.sim.comparisons import GROUPS, comparisons, too_large
from scheduler.sim.devices import H100
from scheduler.sim.outcomes import needed, run_all
from scheduler.sim.report import FOOT, as_json, rows, table, verdicts

STEPS, SEEDS = 6, 3
QUICK_STEPS, QUICK_SEEDS = 2, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="F", help="write the rows to this file too")
    parser.add_argument(
        "--seeds", type=positive, metavar="N", help=f"draws of each comparison (default {SEEDS})"
    )
    parser.add_argument("--group", choices=GROUPS, action="append", help="only this group; can be repeated")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_STEPS} steps, {QUICK_SEEDS} seed, no sensitivity: a look",
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, is {text}")
    return int(text)


def run(options: argparse.Namespace) -> int:
    steps = QUICK_STEPS if options.quick else STEPS
    seeds = options.seeds or (QUICK_SEEDS if options.quick else SEEDS)
    asked = comparisons(options.group or list(GROUPS), steps)
    outcomes = run_all(needed(asked, seeds, sensitivity=not options.quick), _progress)
    found = rows(asked, outcomes, seeds)
    print(*table(found), FOOT, *left_out(), sep="\n")
    print(f"Seeds 0 to {seeds - 1}; {steps} steps of each job alike, half as many of others and of crowds.")
    if options.json is not None:
        content = {"steps": steps, "seeds": seeds, "rows": [as_json(row) for row in found]}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if not options.check:
        return 0
    judged = list(verdicts(found))
    print("\nMust reach", *judged, sep="\n")
    return 0 if all(verdict.met for verdict in judged) else 1


def left_out() -> list[str]:
    return [f"Left out on 8 H100: {name} {reason}." for name, reason in too_large(H100, 8).items()]


def _progress(done: int, of: int) -> None:
    end = "\n" if done == of else ""
    if sys.stderr.isatty():
        print(f"\r{done} of {of} simulations", end=end, file=sys.stderr, flush=True)
    elif done * 10 // of > (done - 1) * 10 // of:
        print(f"{done} of {of} simulations", file=sys.stderr, flush=True)
