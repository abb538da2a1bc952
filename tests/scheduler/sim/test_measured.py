"""The tables are read as they were written, and travel with the package."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from importlib.resources import files
from pathlib import Path
from statistics import fmean, pvariance

from scheduler.sim import measured


def test_a_row_of_step_times():
    row = measured.step_times()["math_qwen3-4b"]
    assert (row.generation, row.old_logprob, row.reference, row.update) == (492, 39.5, 38.2, 141.9)
    assert row.tokens == 4.36e6


def test_responses_come_with_their_turns():
    sampled = measured.responses("multiturn_aime_llama3.1-8b")
    assert len(sampled) == 1024
    assert sum(s.turns == 1 for s in sampled) == 134
    assert sum(s.turns == 2 for s in sampled) == 890
    assert round(fmean(s.tokens for s in sampled)) == 430


def test_samples_of_a_prompt_are_neighbours():
    """Drawing whole groups relies on it: they resemble each other."""
    tokens = [s.tokens for s in measured.responses("math_qwen3-4b")]
    groups = [tokens[at : at + 4] for at in range(0, len(tokens), 4)]
    assert fmean(pvariance(group) for group in groups) < pvariance(tokens) / 4


def test_tool_latency_is_that_of_the_call_after_the_first_turn():
    assert measured.tool_latency("qwen3_4b_search_r1_sync_nprobe128") == measured.ToolLatency(
        79.718, 81.29, 82.17
    )


def test_slowdowns_start_at_30_percent():
    assert measured.slowdowns()["prefill 30b TP4 bs8"] == (2.37, 1.88, 1.54, 1.34, 1.25, 1.14, 1.06)


def test_every_table_is_packaged():
    root = Path(__file__).parents[3]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    tables = [f.name for f in (files("scheduler.sim") / "calibration").iterdir() if f.name != "README.md"]
    assert len(tables) == 6
    assert all(any(fnmatch(name, pattern) for pattern in patterns) for name in tables)


def test_every_table_has_a_line_of_provenance():
    folder = files("scheduler.sim") / "calibration"
    readme = (folder / "README.md").read_text()
    assert all(f"| `{f.name}` |" in readme for f in folder.iterdir() if f.name != "README.md")
