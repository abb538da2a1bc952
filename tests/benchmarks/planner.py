"""``python -m tests.benchmarks.planner [--json F]``: how long a decision takes, from 8 to 1,024 devices.

Each size and policy runs in a process of its own, one after the other, so that neither time nor memory is
shared. Only ``decide`` is timed: what the pool does in between (``world.py``) is not.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from scheduler.core.state import POLICIES
from tests.benchmarks.world import Decision, World

SIZES = ((8, 4), (16, 8), (64, 32), (256, 128), (1024, 512))
DECISIONS = 2000
#: Milliseconds that the 99th percentile should stay under, by size.
TARGETS = {(64, 32): 10.0, (1024, 512): 100.0}


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds are those of the clock; ``cpu_p99_ms`` leaves out when other processes had the core.
    ``running`` pipelines were admitted at the end. ``admission_ms`` is the median of decisions about
    queued jobs too, ``touched`` the mean number of devices that a decision was about, ``rss_mb`` the peak of
    the whole process.
    """

    devices: int
    pipelines: int
    policy: str
    running: int
    decisions: int
    p50_ms: float
    p99_ms: float
    cpu_p99_ms: float
    most_ms: float
    admission_ms: float
    touched: float
    rss_mb: float


def measure(devices: int, pipelines: int, policy: str, decisions: int, seed: int) -> Row:
    """The first decisions, about pools that were just thrown together, are left out."""
    world = World(devices, pipelines, POLICIES[policy], seed)
    for _ in range(pipelines):
        world.play()
    seen = [world.play() for _ in range(decisions)]
    seconds = [decision.seconds for decision in seen]
    return Row(
        devices=devices,
        pipelines=pipelines,
        policy=policy,
        running=world.pipelines,
        decisions=len(seen),
        p50_ms=1000 * quantile(seconds, 0.5),
        p99_ms=1000 * quantile(seconds, 0.99),
        cpu_p99_ms=1000 * quantile([decision.cpu_seconds for decision in seen], 0.99),
        most_ms=1000 * max(seconds),
        admission_ms=1000 * quantile(_admissions(seen), 0.5),
        touched=sum(decision.touched for decision in seen) / len(seen),
        rss_mb=peak_megabytes(),
    )


def _admissions(seen: Sequence[Decision]) -> list[float]:
    return [decision.seconds for decision in seen if decision.admission]


def quantile(values: Sequence[float], q: float) -> float:
    """The least value that so many of all do not exceed; 0 of none."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)] if values else 0.0


def peak_megabytes() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def growth(first: tuple[int, float], last: tuple[int, float]) -> float:
    """The power of the number of devices with which a time grows from one (devices, time) to another: 0 is
    constant, 1 linear.
    """
    return math.log(last[1] / first[1]) / math.log(last[0] / first[0])


def growths(rows: Sequence[Row]) -> str:
    """From the smallest pool to the largest."""
    first, last = rows[0], rows[-1]
    median = growth((first.devices, first.p50_ms), (last.devices, last.p50_ms))
    text = f"{last.policy}: the median grows as devices^{median:.2f}"
    if first.admission_ms > 0 and last.admission_ms > 0:
        admission = growth((first.devices, first.admission_ms), (last.devices, last.admission_ms))
        text += f", that of admissions as devices^{admission:.2f}"
    return text


def apart(devices: int, pipelines: int, policy: str, decisions: int, seed: int) -> Row:
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process:
        return process.submit(measure, devices, pipelines, policy, decisions, seed).result()


HEADER = (
    "devices pipelines running policy      p50 ms   p99 ms  p99 CPU  most ms admission ms touched  rss MB"
    "  p99 bound"
)


def line(row: Row) -> str:
    target = TARGETS.get((row.devices, row.pipelines)) if row.policy == "lookahead" else None
    verdict = "" if target is None else f"< {target:g}: {'met' if row.p99_ms < target else 'missed'}"
    return (
        f"{row.devices:7} {row.pipelines:9} {row.running:7} {row.policy:9} {row.p50_ms:8.2f}"
        f" {row.p99_ms:8.2f} {row.cpu_p99_ms:8.2f} {row.most_ms:8.2f} {row.admission_ms:12.2f}"
        f" {row.touched:7.1f} {row.rss_mb:7.0f}  {verdict}"
    )


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, is {text}")
    return int(text)


def size(text: str) -> tuple[int, int]:
    devices, _, pipelines = text.partition("x")
    return int(devices), int(pipelines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.planner", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows of lookahead, and of greedy, to this file")
    parser.add_argument("--sizes", type=size, nargs="+", default=SIZES, metavar="DEVICESxPIPELINES")
    parser.add_argument("--decisions", type=positive, default=DECISIONS, help="to be timed at each size")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    found: dict[str, list[Row]] = {}
    print(HEADER)
    for policy in ("lookahead", "greedy"):
        found[policy] = []
        for devices, pipelines in options.sizes:
            found[policy].append(apart(devices, pipelines, policy, options.decisions, options.seed))
            print(line(found[policy][-1]), flush=True)
        if len(found[policy]) > 1:
            print(growths(found[policy]))
    if options.json:
        content = {
            "rows": [asdict(r) for r in found["lookahead"]],
            "greedy": [asdict(r) for r in found["greedy"]],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
