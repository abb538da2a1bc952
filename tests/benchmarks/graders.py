"""``python -m tests.benchmarks.graders [--json F]``: grades per second, by kind of grader.

``python``: a tenant's small function in the sandbox's pool, in batches as a step sends them; ``python, 4
owners``: four runs at the same time. ``loop``: the same function called in this process, without a sandbox,
in the same run: what isolation costs. The first batch, which starts the processes, is timed apart. Returns 1
when ``python`` makes fewer than TARGET grades per second.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from workers.graders.grades import as_sample
from workers.graders.run import GradeInput, GradeResult, grade_batch
from workers.sandbox.pool import SandboxPool
from workers.spec import Grader

#: Small Python grades per second that two cores should make.
TARGET = 200.0
OWNERS = 4
SOURCE = """
import re


def grade(sample, item):
    numbers = re.findall(r"-?\\d+", sample["output_text"])
    return bool(numbers) and int(numbers[-1]) == item["answer"]
"""
RIGHT = {"type": "string_check", "reference": "{{item.answer}}", "operation": "like"}
GRADERS: dict[str, dict[str, Any]] = {
    "python": {"type": "python", "source": SOURCE},
    "math": {"type": "math", "reference": "{{item.answer}}"},
    "json_schema": {"type": "json_schema", "json_schema": {"type": "string"}},
    "string_check": RIGHT,
    "fuzzy_match": {"type": "text_similarity", "reference": "{{item.reference}}"},
    "meteor": {
        "type": "text_similarity",
        "reference": "{{item.reference}}",
        "evaluation_metric": "meteor",
    },
    "multi": {
        "type": "multi",
        "graders": {"right": RIGHT, "python": {"type": "python", "source": SOURCE}},
        "calculate_output": "0.5 * right + 0.5 * python",
    },
}


@dataclass(frozen=True)
class Row:
    """``per_s`` without the first batch; milliseconds are the clock's: of the first batch, of one grade."""

    grader: str
    grades: int
    per_s: float
    first_ms: float
    p50_ms: float
    p99_ms: float


def samples(count: int) -> list[GradeInput]:
    """Sums and their answers, every other one wrong."""
    return [
        GradeInput(
            {"answer": 2 * number, "reference": f"{number} and {number} make {2 * number}"},
            f"{number} and {number} are {2 * number + number % 2}",
        )
        for number in range(count)
    ]


def measure(name: str, batches: int, size: int, batch: Callable[[], list[float]]) -> Row:
    """``batch`` grades ``size`` samples and returns the seconds of each."""
    begun = time.perf_counter()
    batch()
    first_ms = 1000 * (time.perf_counter() - begun)
    begun = time.perf_counter()
    seconds = [each for _ in range(batches) for each in batch()]
    passed = time.perf_counter() - begun
    cuts = quantiles(seconds, n=100)
    return Row(name, batches * size, batches * size / passed, first_ms, 1000 * cuts[49], 1000 * cuts[98])


def through_pool(grader: Grader, given: Sequence[GradeInput], pool: SandboxPool, owner: str) -> list[float]:
    return [checked(result).seconds for result in grade_batch(grader, given, pool=pool, owner=owner)]


def by_owners(grader: Grader, given: Sequence[GradeInput], pool: SandboxPool) -> list[float]:
    share = len(given) // OWNERS
    parts = [given[start * share : (start + 1) * share] for start in range(OWNERS)]
    with ThreadPoolExecutor(OWNERS) as threads:
        found = threads.map(
            lambda part: through_pool(grader, part[1], pool, f"owner {part[0]}"), enumerate(parts)
        )
        return [each for seconds in found for each in seconds]


def in_a_loop(given: Sequence[GradeInput]) -> Callable[[], list[float]]:
    space: dict[str, Any] = {}
    exec(SOURCE, space)

    def batch() -> list[float]:
        seconds = []
        for sample in given:
            begun = time.perf_counter()
            float(space["grade"](as_sample(sample.output_text), sample.item))
            seconds.append(time.perf_counter() - begun)
        return seconds

    return batch


def checked(result: GradeResult) -> GradeResult:
    if result.score is None:
        raise RuntimeError(f"a grade failed: {result.error}")
    return result


def rows(batches: int, size: int, processes: int) -> list[Row]:
    given = samples(size)
    graders: TypeAdapter[Grader] = TypeAdapter(Grader)
    found = [measure("loop", batches, size, in_a_loop(given))]
    with SandboxPool(processes) as pool:
        for name, settings in GRADERS.items():
            grader = graders.validate_python(settings)
            found.append(
                measure(name, batches, size, lambda grader=grader: through_pool(grader, given, pool, "run"))
            )
            if name == "python":
                found.append(
                    measure(
                        f"python, {OWNERS} owners",
                        batches,
                        size,
                        lambda grader=grader: by_owners(grader, given, pool),
                    )
                )
    return found


def table(found: Sequence[Row]) -> Table:
    shown = Table("grader", "grades", "per s", "first batch, ms", "p50, ms", "p99, ms")
    for row in found:
        shown.add_row(
            row.grader,
            f"{row.grades:,}",
            f"{row.per_s:,.0f}",
            f"{row.first_ms:.0f}",
            f"{row.p50_ms:.3f}",
            f"{row.p99_ms:.3f}",
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--size", type=int, default=64, help="samples of a batch; a multiple of 4")
    parser.add_argument("--processes", type=int, default=max(2, os.cpu_count() or 1), help="of the pool")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    asked = parser.parse_args(arguments)
    found = rows(asked.batches, asked.size, asked.processes)
    console = Console()
    console.print(table(found))
    by_name = {row.grader: row for row in found}
    ratio = by_name["loop"].per_s / by_name["python"].per_s
    console.print(
        f"in the sandbox a small grade takes {ratio:,.0f} times as long as in a loop", highlight=False
    )
    if asked.json:
        report = {
            "cores": os.cpu_count(),
            "processes": asked.processes,
            "batch": asked.size,
            "target_per_s": TARGET,
            "rows": [asdict(row) for row in found],
        }
        asked.json.write_text(json.dumps(report, indent=2) + "\n")
    if by_name["python"].per_s < TARGET:
        console.print(f"[bold red]fewer than {TARGET:.0f} small Python grades per second[/]")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
