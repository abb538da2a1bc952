"""The benchmark measures what it says: on a small pool, with no bound on any time."""

from __future__ import annotations

import json

import pytest

from scheduler.core.state import POLICIES, Admit, Start
from tests.benchmarks.planner import growth, main, quantile
from tests.benchmarks.world import World


def test_the_nearest_rank_is_taken():
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [quantile(values, q) for q in (0.0, 0.5, 0.61, 0.99)] == [1.0, 3.0, 4.0, 5.0]
    assert quantile([], 0.5) == 0.0


def test_growth_is_the_slope_between_logarithms():
    assert growth((8, 1.0), (128, 4.0)) == pytest.approx(0.5)  # 16 times the devices, 4 times as long
    assert growth((8, 3.0), (128, 48.0)) == pytest.approx(1.0)


@pytest.mark.parametrize("policy", ["lookahead", "greedy"])
def test_the_pool_keeps_going_as_jobs_come_and_go(policy):
    world = World(8, 4, POLICIES[policy], seed=1)
    seen = [world.play() for _ in range(300)]
    assert world.pipelines == 4
    assert world.steps > 4
    assert sum(isinstance(action, Admit) for decision in seen for action in decision.actions) == 3
    assert {decision.admission for decision in seen} == {True, False}
    assert max(decision.touched for decision in seen) <= 8
    assert all(world.board.at_home.values())


def test_the_same_seed_makes_the_same_decisions():
    runs = [World(8, 4, POLICIES["lookahead"], seed=2) for _ in range(2)]
    one, other = ([decision.actions for decision in (world.play() for _ in range(120))] for world in runs)
    assert one == other
    assert any(isinstance(action, Start) for actions in one for action in actions)


def test_the_program_writes_a_row_for_each_size(tmp_path, capsys):
    file = tmp_path / "planner.json"
    assert main(["--json", str(file), "--sizes", "8x4", "16x8", "--decisions", "60"]) == 0
    content = json.loads(file.read_text())
    assert [(row["devices"], row["pipelines"]) for row in content["rows"]] == [(8, 4), (16, 8)]
    for row in (*content["rows"], *content["greedy"]):
        assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["most_ms"]
        assert row["rss_mb"] > 1
        assert row["decisions"] == 60
        assert row["running"] > 0
    assert "the median grows as devices^" in capsys.readouterr().out
