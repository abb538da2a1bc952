"""The built-in datasets: files that pass our own checks, graders worked out by hand and hard to cheat."""

import hashlib

import pytest

from workers.data.builtin import write_builtin
from workers.data.rows import check_jsonl, iter_rows
from workers.graders.run import GradeInput, check_grader, grade_batch
from workers.sandbox.pool import SandboxPool
from workers.spec import JobSpec


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    return {dataset.name: dataset for dataset in write_builtin(tmp_path_factory.mktemp("datasets"))}


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with SandboxPool(1, scratch_root=tmp_path_factory.mktemp("scratch")) as pool:
        yield pool


def scores(dataset, pool, *samples):
    inputs = [GradeInput(item, text) for item, text in samples]
    results = grade_batch(dataset.grader, inputs, pool=pool, owner=dataset.name)
    assert [result.error for result in results] == [None] * len(results)
    return [result.score for result in results]


@pytest.mark.parametrize("name", ["exact-words", "small-sums"])
def test_a_job_on_it_is_valid(datasets, name):
    dataset = datasets[name]
    report = check_jsonl(dataset.path)
    assert report.ok
    assert report.rows > 20 * 4  # no prompt comes twice in the recommended steps
    check_grader(dataset.grader)
    spec = JobSpec(model="m", training_file=name, grader=dataset.grader, rl=dataset.rl)
    assert spec.rl.prompts_per_step * spec.rl.group_size == 32


def test_the_bytes_are_the_same_everywhere(datasets, tmp_path):
    again = {dataset.name: dataset for dataset in write_builtin(tmp_path)}
    for name, dataset in datasets.items():
        assert again[name].path.read_bytes() == dataset.path.read_bytes()
    digests = {name: hashlib.sha256(d.path.read_bytes()).hexdigest()[:16] for name, d in again.items()}
    assert digests == {"exact-words": "61a4c90cfd8503b4", "small-sums": "c12e530976e25284"}


def test_a_damaged_file_is_written_again(datasets, tmp_path):
    first = write_builtin(tmp_path)[0]
    first.path.write_text("x")
    assert write_builtin(tmp_path)[0].path.read_bytes() == datasets[first.name].path.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exact-words.jsonl", "small-sums.jsonl"]


def test_exact_words_by_hand(datasets, pool):
    item = {"words": 5, "topic": "the sea"}
    assert scores(
        datasets["exact-words"],
        pool,
        (item, "The sea is very deep."),
        (item, "the sea is very deep"),
        (item, "The sea is deep."),
        (item, "Cats like to sleep here."),
        (item, "The sea. Is very deep."),
        (item, "sea sea sea sea sea"),
    ) == pytest.approx([1.0, 0.7, 0.8, 0.85, 0.7, 0.4 + 0.15 + 0.15 / 5])


def test_small_sums_by_hand(datasets, pool):
    item = {"answer": 20}
    assert scores(
        datasets["small-sums"],
        pool,
        (item, "Answer: 20"),
        (item, " Answer: 20\n"),
        (item, "Answer: 15"),
        (item, "Answer: 99"),
        (item, "Answer: 20 because 11 + 9"),
        (item, "The sum is 20"),
        (item, "20"),
        (item, "Answer: " + "9" * 5000),
    ) == pytest.approx([1.0, 1.0, 0.3 + 0.7 * 0.3 * 0.75, 0.3, 0.5, 0.2, 0.2, 0.3])


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        *(
            (name, text, 0.0)
            for name in ("exact-words", "small-sums")
            for text in ("", " \n", "...", "Answer:")[:3]
        ),
        ("exact-words", "word " * 8, 0.5),
        ("exact-words", "One two three four five six seven eight.", 0.75),
        ("small-sums", "Answer: 22", 0.55),
        ("small-sums", "2 + 2 = 4", 0.2),
    ],
)
def test_no_constant_completion_earns_much(datasets, pool, name, text, limit):
    items = list(iter_rows(datasets[name].path))
    earned = scores(datasets[name], pool, *((item, text) for item in items))
    assert sum(earned) / len(earned) <= limit
