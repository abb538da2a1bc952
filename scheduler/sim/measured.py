"""The tables of ``calibration/``, read once. Their README says where each comes from."""

from __future__ import annotations

import csv
import gzip
import io
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

#: Rollouts of a step in ``step_times.csv``: 256 prompts x 4 samples.
ROLLOUTS = 1024


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Median seconds of a step's phases on 4 H100. ``tokens`` counts prompts and responses of the step."""

    run: str
    step: float
    generation: float
    old_logprob: float
    reference: float
    update: float
    weight_sync: float
    response_tokens: float
    tool: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled response: its tokens over all turns, and how many turns the model had."""

    tokens: int
    turns: int


@dataclass(frozen=True, slots=True)
class ToolLatency:
    """Seconds of one batched call of about 1,024 queries."""

    least: float
    mean: float
    most: float


@cache
def step_times() -> dict[str, StepTimes]:
    return {row["run"]: _step_times(row) for row in _rows("step_times.csv")}


@cache
def responses(run: str) -> tuple[Sampled, ...]:
    """In the order of the log: the samples of a prompt are neighbours."""
    record = _samples()[run]
    pairs = zip(record["response_tokens"], record["messages"], strict=True)
    return tuple(Sampled(tokens, max(1, messages // 2)) for tokens, messages in pairs)


@cache
def tool_latency(run: str) -> ToolLatency:
    """Of the call after the first turn; the run's log has none after the last."""
    row = next(row for row in _rows("tool_latency.csv") if row["run"] == run and row["turn"] == "1")
    return ToolLatency(float(row["min s"]), float(row["mean s"]), float(row["max s"]))


@cache
def slowdowns() -> dict[str, tuple[float, ...]]:
    """By kind of work, at 30 % to 90 % of the SMs in steps of 10 %."""
    return {
        row["kind"]: tuple(float(row[f"{percent} %"]) for percent in range(30, 100, 10))
        for row in _rows("slowdown_by_sm_share.csv")
    }


@cache
def decode_ms(run: str) -> dict[str, float]:
    """Median ms of a decode forward by band of the running batch ("1", "2–4", ...)."""
    row = next(row for row in _rows("decode_ms_by_batch.csv") if row["run"] == run)
    return {band: float(cell.split()[0]) for band, cell in row.items() if band != "run" and cell != "–"}


@cache
def cpu_decode_ms() -> tuple[tuple[float, float], ...]:
    """(batch, ms) of SmolLM2-135M on one thread."""
    return tuple((float(row["batch"]), float(row["ms"])) for row in _rows("cpu_decode_ms.csv"))


def _step_times(row: dict[str, str]) -> StepTimes:
    return StepTimes(
        run=row["run"],
        step=float(row["step s"]),
        generation=float(row["gen"]),
        old_logprob=float(row["old_logp"]),
        reference=float(row["ref"]),
        update=float(row["update"]),
        weight_sync=float(row["weight sync"]),
        response_tokens=float(row["mean resp tok"]),
        tool=float(row["tool max s"]),
        tokens=float(row["tokens/step"].removesuffix("M")) * 1e6,
    )


@cache
def _samples() -> dict[str, dict[str, list[int]]]:
    loaded: dict[str, dict[str, list[int]]] = json.loads(
        gzip.decompress(_bytes("response_length_samples.json.gz"))
    )
    return loaded


@cache
def _rows(name: str) -> tuple[dict[str, str], ...]:
    return tuple(csv.DictReader(io.StringIO(_bytes(name).decode())))


def _bytes(name: str) -> bytes:
    return (files("scheduler.sim") / "calibration" / name).read_bytes()
