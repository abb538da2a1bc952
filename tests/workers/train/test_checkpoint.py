from __future__ import annotations

import json
from pathlib import Path

import pytest

from workers.train import checkpoint


def save(text: str) -> object:
    return lambda folder: (folder / "weights").write_text(text)


def test_written_whole_and_read_back(tmp_path: Path) -> None:
    folder = checkpoint.write(tmp_path / "job", 5, {"step": 5, "cursor": [1, 2]}, save("five"))
    assert folder == tmp_path / "job" / "step-5"
    assert json.loads((folder / "state.json").read_text()) == {"step": 5, "cursor": [1, 2]}
    assert (folder / "weights").read_text() == "five"
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["step-5"]
    assert checkpoint.folder_bytes(folder) == 4 + (folder / "state.json").stat().st_size


def test_steps_are_ordered_by_number(tmp_path: Path) -> None:
    assert checkpoint.checkpoints(tmp_path / "nothing") == []
    for step in (9, 10, 2):
        checkpoint.write(tmp_path, step, {"step": step}, save(""))
    assert checkpoint.checkpoints(tmp_path) == [tmp_path / f"step-{step}" for step in (2, 9, 10)]


def test_a_writer_that_dies_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, 1, {"step": 1}, save("one"))

    def die(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.write(tmp_path, 2, {"step": 2}, die)
    assert checkpoint.checkpoints(tmp_path) == [tmp_path / "step-1"]
    checkpoint.write(tmp_path, 2, {"step": 2}, save("two"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]


def test_same_step_is_replaced(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, 1, {"step": 1}, save("old"))
    folder = checkpoint.write(tmp_path, 1, {"step": 1}, save("new"))
    assert (folder / "weights").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        checkpoint.write(tmp_path, step, {"step": step}, save(""))
    assert checkpoint.prune(tmp_path, 2) == [tmp_path / "step-1"]
    assert checkpoint.prune(tmp_path, 2) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-2"]
    with pytest.raises(ValueError, match="at least 1"):
        checkpoint.prune(tmp_path, 0)
