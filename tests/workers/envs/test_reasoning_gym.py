"""Puzzles of reasoning-gym: made, and scored, by the library itself in the sandbox."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.workers.envs.local import episode, play, settings
from workers.data.builtin import DatasetUnavailable, builtin_named
from workers.data.builtin import puzzles as builtin
from workers.data.rows import check_jsonl, iter_rows
from workers.envs.problems import EnvironmentProblem, EpisodeFailed, EpisodeFailure
from workers.graders.pool import GraderPool
from workers.spec import JobSpec

library = pytest.importorskip("reasoning_gym", reason="the extra environments is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("builtin")


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    found = GraderPool()
    yield found
    found._sandbox.close()


def rows(folder: Path, task: str) -> list[dict[str, Any]]:
    return list(iter_rows(builtin_named(f"reasoning-gym/{task}", folder).path))


def answer_of(puzzle: dict[str, Any]) -> str:
    found = library.create_dataset(puzzle["task"], seed=puzzle["seed"], size=puzzle["size"])
    return found[puzzle["index"]]["answer"]


def puzzle(**fields: Any) -> dict[str, Any]:
    named = {"task": "chain_sum", "version": version("reasoning-gym"), "seed": 0, "size": 100, "index": 0}
    return {"puzzle": {**named, **fields}}


def test_a_task_is_a_dataset_by_its_name(folder):
    found = builtin_named("reasoning-gym/chain_sum", folder)
    report = check_jsonl(found.path)
    assert report.ok and report.rows == builtin.ROWS
    spec = JobSpec(model="m", training_file=found.name, environment=found.environment, rl=found.rl)
    assert spec.grader is None
    asked = next(iter_rows(found.path))["messages"][-1]["content"]
    assert asked == library.create_dataset("chain_sum", seed=0, size=100)[0]["question"]


def test_a_file_that_is_there_is_not_made_again(folder, monkeypatch):
    first = builtin_named("reasoning-gym/chain_sum", folder)
    monkeypatch.setattr(builtin, "puzzles", lambda task: pytest.fail("made again"))
    assert builtin_named("reasoning-gym/chain_sum", folder) == first


@pytest.mark.parametrize("task", ["nothing", "composite", "../chain_sum", ""])
def test_other_names_are_refused(folder, task):
    with pytest.raises(DatasetUnavailable, match="has no task"):
        builtin_named(f"reasoning-gym/{task}", folder)


def test_without_the_library_what_to_install_is_said(folder, monkeypatch):
    def missing(name: str) -> str:
        raise builtin.PackageNotFoundError(name)

    monkeypatch.setattr(builtin, "version", missing)
    with pytest.raises(DatasetUnavailable, match=r"pip install 'jigsaw-rl\[environments\]'"):
        builtin_named("reasoning-gym/chain_sum", folder)


# word_ladder iterates over sets: its puzzles are others in a process with another hash seed.
@pytest.mark.parametrize("task", ["chain_sum", "leg_counting", "word_ladder"])
def test_the_right_answer_is_worth_one_and_another_is_not(folder, pool, task):
    row = rows(folder, task)[3]
    (entry,) = pool._sandbox.call(
        builtin.SOURCE + "\ndef answer(*place):\n    return entry(*place)['answer']\n",
        "answer",
        [[row["puzzle"][name] for name in ("task", "seed", "size", "index")]],
        60,
        owner="test",
        load_timeout_s=builtin.LOAD_TIMEOUT_S,
        paths=builtin.packages(),
    )
    wrong, right = play(
        episode(settings(type="reasoning_gym", max_turns=3), row, pool=pool), "no", str(entry.value)
    )
    assert wrong.text == "That is not right. Try again." and wrong.reward < 0.5
    assert right.text is None
    assert wrong.reward + right.reward == pytest.approx(1)


def test_an_answer_may_stand_in_tags_and_the_last_turn_counts(folder, pool):
    row = rows(folder, "chain_sum")[0]
    asked = settings(type="reasoning_gym", max_turns=2)
    right = f"I think that <answer> {answer_of(row['puzzle'])} </answer> it is."
    (found,) = play(episode(asked, row, pool=pool), right)
    assert (found.text, found.reward) == (None, 1)
    found = play(episode(asked, row, pool=pool), "no", "neither")
    assert found[1].text is None
    assert sum(each.reward for each in found) < 0.5


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ("prime_factorization", "x"),  # its own code raises at such a text
        ("spiral_matrix", "__import__('os')._exit(1)"),  # evaluates it
        ("spiral_matrix", "[__import__('os').environ]"),
    ],
)
def test_an_answer_that_upsets_the_library_earns_nothing(pool, task, text):
    game = episode(settings(type="reasoning_gym"), puzzle(task=task), pool=pool)
    try:
        (found,) = play(game, text)
    except EpisodeFailed as failed:
        assert failed.kind is EpisodeFailure.CRASHED
    else:
        assert found.reward < 0.1


def test_a_puzzle_of_another_version_is_not_scored(pool):
    game = episode(settings(type="reasoning_gym"), puzzle(version="0.0.1"), pool=pool)
    with pytest.raises(EpisodeFailed, match=r"of reasoning-gym 0\.0\.1") as failed:
        play(game, "1")
    assert failed.value.kind is EpisodeFailure.EXCEPTION


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ({}, "puzzle must be an object of task, version"),
        ({"puzzle": {"task": "chain_sum"}}, "puzzle must be an object of task, version"),
        (puzzle(seed="1"), "puzzle.seed must be a whole number"),
        (puzzle(index=True), "puzzle.index must be a whole number"),
        (puzzle(task=7), "puzzle.task must be a text"),
    ],
)
def test_a_row_that_names_no_puzzle_is_a_problem(item, reason):
    with pytest.raises(EnvironmentProblem, match=reason):
        episode(settings(type="reasoning_gym"), item)
