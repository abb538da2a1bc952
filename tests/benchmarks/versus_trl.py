"""The same GRPO work by TRL's GRPOTrainer and by this service: one job alone, and four tenants' at once.

    python -m tests.benchmarks.versus_trl [--steps 6] [--repeats 1] [--json F]

Model, precision (bf16), rows, grader, group size, lengths, learning rate, LoRA and steps are the same. TRL
runs one job after another, with as many threads as is fastest for it, in an environment of its own, which is
made at the first run. The service runs one job alone and four at once. Of TRL only ``train()`` is timed; of
the service everything from the first job's admission to the last one's end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from infra.embedded import paths, processes
from tests.benchmarks.memory import Peak
from tests.benchmarks.mixes import MODEL, Task, rl
from tests.benchmarks.multiplex import Bench
from workers.data.builtin import WORDS_GRADER, word_rows
from workers.models.smollm2 import ensure_smollm2

PINS = (
    "torch==2.13.0",
    "trl==1.16.0",
    "transformers==5.23.0",
    "datasets==5.2.0",
    "accelerate==1.15.0",
    "peft==0.21.2",
)
ROWS = tuple(word_rows(random.Random(0))[:64])
LEARNING_RATE = 1e-3
TENANTS = 4


def task(seed: int, steps: int) -> Task:
    """Mix a's sizes, with a reward that can be learnt."""
    settings = rl(steps, optimizer={"learning_rate": LEARNING_RATE}, micro_batch_size=16)
    grader = {"type": "python", "name": "exact_words", "source": WORDS_GRADER}
    method = {"type": "reinforcement", "reinforcement": {"grader": grader}}
    return Task(f"t{seed}", ROWS, {"model": MODEL, "method": method, "rl": settings, "seed": seed})


# ---------------------------------------------------------------- TRL


def trl_python(console: Console) -> Path:
    """The interpreter of TRL's own environment, made when it is not there."""
    folder = paths.var_dir() / "benchmarks" / "trl"
    python = folder / "bin" / "python"
    if not (folder / ".made").exists():
        console.print("installing TRL into an environment of its own (once) …")
        venv.create(folder, with_pip=True, clear=True)
        command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *PINS]
        subprocess.run(command, check=True)
        (folder / ".made").touch()
    return python


def trl_job(python: Path, model: Path, seed: int, steps: int, threads: int) -> dict[str, Any]:
    settings = task(seed, steps).body["rl"]
    with tempfile.TemporaryDirectory(prefix="trl-") as folder:
        job = Path(folder) / "job.json"
        job.write_text(
            json.dumps(
                {
                    "model": str(model),
                    "rows": ROWS,
                    "seed": seed,
                    "steps": steps,
                    "prompts": settings["prompts_per_step"],
                    "group": settings["group_size"],
                    "micro_batch": settings["micro_batch_size"],
                    "max_tokens": settings["sampling"]["max_tokens"],
                    "learning_rate": LEARNING_RATE,
                    "threads": threads,
                    "grader": WORDS_GRADER,
                    "output": folder,
                }
            )
        )
        script = Path(__file__).with_name("trl_run.py")
        made = subprocess.run(
            [python, script, job], capture_output=True, text=True, timeout=3600, check=False
        )
    if made.returncode:
        raise SystemExit(f"TRL failed:\n{made.stderr[-2000:]}")
    return json.loads(made.stdout.strip().splitlines()[-1])


def best_threads(python: Path, model: Path) -> int:
    """How many threads TRL is fastest with: two steps each."""
    options = range(1, (os.cpu_count() or 1) + 1)
    return min(options, key=lambda threads: trl_job(python, model, 0, 2, threads)["seconds"])


# ---------------------------------------------------------------- the service


def ours(bench: Bench, policy: str, jobs: int, steps: int) -> dict[str, Any]:
    def everyone() -> Iterator[int]:
        roots = [os.getpid(), *filter(None, map(processes.recall, (bench.var / "run").glob("*.pid")))]
        return iter({process.pid for root in roots for process in processes.family(root)} - {os.getpid()})

    with Peak(everyone) as peak:
        run = bench.run(policy, [task(seed, steps) for seed in range(jobs)])
    return run | {"peak_rss_mb": peak.megabytes}


def last_rewards(rewards: Sequence[float]) -> float:
    return statistics.fmean(rewards[-2:])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    asked = parser.parse_args(arguments)
    console = Console()
    model = ensure_smollm2(Path(os.environ.get("JIGSAW_MODELS_DIR", paths.var_dir() / "models")))
    python = trl_python(console)
    threads = best_threads(python, model)
    console.print(f"TRL is fastest with {threads} threads")
    trl: list[dict[str, Any]] = []
    alone: list[dict[str, Any]] = []
    packed: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="versus-") as folder:
        bench = Bench(Path(folder) / "var", os.cpu_count() or 1, 1, console)
        for repeat in range(asked.repeats):
            trl.append(trl_job(python, model, repeat, asked.steps, threads))
            alone.append(ours(bench, "exclusive", 1, asked.steps))
            packed.append(ours(bench, "lookahead", TENANTS, asked.steps))
    report = compared(trl, alone, packed)
    show(console, report)
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def compared(
    trl: Sequence[dict[str, Any]], alone: Sequence[dict[str, Any]], packed: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Four jobs of TRL one after another take four times one."""

    def middle(runs: Sequence[dict[str, Any]], name: str) -> float:
        return statistics.median(run[name] for run in runs)

    seconds = {
        "trl_one": middle(trl, "seconds"),
        "alone": middle(alone, "seconds"),
        "packed_four": middle(packed, "seconds"),
    }
    return {
        "alone_ratio": seconds["trl_one"] / seconds["alone"],
        "packed_ratio": TENANTS * seconds["trl_one"] / seconds["packed_four"],
        "seconds": seconds,
        "tokens_per_s": {"alone": middle(alone, "tokens_per_s"), "packed": middle(packed, "tokens_per_s")},
        "peak_rss_mb": {
            "trl_one": middle(trl, "peak_rss_mb"),
            "alone": middle(alone, "peak_rss_mb"),
            "packed_four": middle(packed, "peak_rss_mb"),
        },
        "reward": {
            "trl": statistics.median(last_rewards(run["rewards"]) for run in trl),
            "alone": statistics.median(last_rewards(run["rewards"][0]) for run in alone),
            "packed": statistics.median(last_rewards(job) for run in packed for job in run["rewards"]),
        },
        "completion_length": {
            "trl": statistics.median(statistics.fmean(run["lengths"]) for run in trl),
            "alone": statistics.median(statistics.fmean(run["lengths"][0]) for run in alone),
        },
    }


def show(console: Console, report: dict[str, Any]) -> None:
    shown = Table(
        title="GRPO, SmolLM2-135M, LoRA, bf16, 4 prompts x 4 samples x 32 tokens", title_justify="left"
    )
    for name in ("", "TRL, one", "ours, alone", "ours, four packed"):
        shown.add_column(name, justify="right" if name else "left")
    seconds, peak, reward = report["seconds"], report["peak_rss_mb"], report["reward"]
    shown.add_row("seconds", *(f"{seconds[name]:.1f}" for name in ("trl_one", "alone", "packed_four")))
    shown.add_row("peak MB", *(f"{peak[name]:,.0f}" for name in ("trl_one", "alone", "packed_four")))
    shown.add_row("last rewards", *(f"{reward[name]:.3f}" for name in ("trl", "alone", "packed")))
    console.print(shown)
    console.print(
        f"one job: {report['alone_ratio']:.2f}x TRL; four jobs: {report['packed_ratio']:.2f}x TRL one by one"
    )


if __name__ == "__main__":
    sys.exit(main())
