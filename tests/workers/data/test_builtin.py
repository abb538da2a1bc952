"""The built-in datasets: files that pass our own checks, graders worked out by hand and hard to cheat."""

import hashlib
import json
import re

import pytest

from workers.data.builtin import DatasetUnavailable, builtin_named, write_builtin, write_corpora
from workers.data.builtin.constraints import PHRASES
from workers.data.builtin.grid import grid_row, way
from workers.data.builtin.multihop import BEGIN
from workers.data.builtin.passages import TOWNS
from workers.data.rows import check_jsonl, iter_rows
from workers.envs.search import search
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


NAMES = ("exact-words", "small-sums", "arithmetic", "constraints", "multihop-qa", "guessing", "grid")
GRADED = NAMES[:5]


def job(dataset):
    return JobSpec(
        model="m",
        training_file=dataset.name,
        grader=dataset.grader,
        environment=dataset.environment,
        rl=dataset.rl,
    )


def test_names(datasets, tmp_path):
    assert tuple(datasets) == NAMES
    assert builtin_named("grid", tmp_path / "new").path.read_bytes() == datasets["grid"].path.read_bytes()
    with pytest.raises(DatasetUnavailable, match="no built-in dataset 'nothing'"):
        builtin_named("nothing", tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_a_job_on_it_is_valid(datasets, name):
    dataset = datasets[name]
    report = check_jsonl(dataset.path)
    assert report.ok
    spec = job(dataset)
    # No row comes twice in the recommended steps.
    assert report.rows >= spec.rl.steps * spec.rl.prompts_per_step
    if dataset.grader is not None:
        check_grader(dataset.grader)
    assert all(row["messages"][0]["role"] == "system" for row in iter_rows(dataset.path))


@pytest.mark.parametrize("name", NAMES)
def test_the_algorithm_may_be_another(datasets, name):
    dataset = datasets[name]
    for algorithm in ("grpo", "dapo", "rloo", "reinforce_pp", "gspo", "cispo", "ppo", "dr_grpo"):
        JobSpec.model_validate(
            job(dataset).model_dump(exclude={"rl"}) | {"rl": {**dataset.rl, "algorithm": algorithm}}
        )


def test_the_bytes_are_the_same_everywhere(datasets, tmp_path):
    again = {dataset.name: dataset for dataset in write_builtin(tmp_path)}
    for name, dataset in datasets.items():
        assert again[name].path.read_bytes() == dataset.path.read_bytes()
    digests = {name: hashlib.sha256(d.path.read_bytes()).hexdigest()[:16] for name, d in again.items()}
    assert digests == {
        "exact-words": "61a4c90cfd8503b4",
        "small-sums": "c12e530976e25284",
        "arithmetic": "4c11f99c9e312363",
        "constraints": "c0ebdfffd87e6733",
        "multihop-qa": "b3bddbd069bee5dc",
        "guessing": "2d17cb427a1950fa",
        "grid": "88b76a9ed8c5dcb0",
    }
    corpus = write_corpora(tmp_path)[0]
    assert hashlib.sha256(corpus.path.read_bytes()).hexdigest()[:16] == "1f1ae967b4909e88"


def test_a_damaged_file_is_written_again(datasets, tmp_path):
    first = write_builtin(tmp_path)[0]
    first.path.write_text("x")
    assert write_builtin(tmp_path)[0].path.read_bytes() == datasets[first.name].path.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{name}.jsonl" for name in NAMES)


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
        *((name, text, 0.0) for name in GRADED for text in ("", " \n", "...")),
        ("exact-words", "word " * 8, 0.5),
        ("exact-words", "One two three four five six seven eight.", 0.75),
        ("small-sums", "Answer: 22", 0.55),
        ("small-sums", "2 + 2 = 4", 0.2),
        ("arithmetic", "Answer:", 0.0),
        ("arithmetic", "Answer: 20", 0.5),
        ("arithmetic", "6", 0.1),
        ("constraints", "a", 0.34),
        ("constraints", "I am glad to follow every instruction that you give me today.", 0.6),
        ("multihop-qa", "Vess", 0.2),
        ("multihop-qa", "Vess Alder Brin red blue green bells cheese lace Grey Amber Hollow", 0.2),
        (
            "multihop-qa",
            '<tool_call>{"name": "search", "arguments": {"query": "Mira"}}</tool_call>',
            0.2,
        ),
        ("multihop-qa", "Oldmere potter", 0.2),
        ("multihop-qa", " ".join(TOWNS), 0.11),
    ],
)
def test_no_constant_completion_earns_much(datasets, pool, name, text, limit):
    items = list(iter_rows(datasets[name].path))
    earned = scores(datasets[name], pool, *((item, text) for item in items))
    assert sum(earned) / len(earned) <= limit


def test_arithmetic_by_hand(datasets, pool):
    item = {"answer": 20}
    assert scores(
        datasets["arithmetic"],
        pool,
        (item, "Answer: 20"),
        (item, " Answer: 20\n"),
        (item, "Answer: 15"),
        (item, "Answer: -99"),
        (item, "Answer: 20 because 11 + 9"),
        (item, "The result is 20"),
        (item, "Answer: 20.5"),
        (item, "Answer: " + "9" * 5000),
    ) == pytest.approx([1.0, 1.0, 0.2 + 0.8 * 0.5 * 0.75, 0.2, 0.5, 0.2, 0.5, 0.2])


@pytest.mark.parametrize(
    ("kind", "value", "good", "bad"),
    [
        ("required", "river", "A River, wide.", "The rivers are wide."),
        ("ends", "home", "They all went home.", "Home they went."),
        ("sentences", 2, "It rains. We wait!", "It rains. We wait! Why?"),
        ("sentences", 2, "It costs 2.50 now. We pay.", "It rains. We wait"),
        ("least", 3, "One two three", "One two"),
        ("most", 2, "One two", "One two three"),
        ("forbidden", "the", "Then they came", "Over The hill"),
        ("lower", True, "all is quiet.", "All is quiet."),
    ],
)
def test_each_constraint_by_hand(datasets, pool, kind, value, good, bad):
    item = {"constraints": [{"kind": kind, "value": value}]}
    assert scores(datasets["constraints"], pool, (item, good), (item, bad)) == [1.0, 0.0]
    both = {"constraints": [*item["constraints"], {"kind": "required", "value": "zebra"}]}
    assert scores(datasets["constraints"], pool, (both, good)) == [0.5]


def test_all_constraints_of_a_row_can_hold(datasets, pool):
    def text(asked):
        found = {each["kind"]: each["value"] for each in asked}
        words = [found.get("required", "we"), *["we"] * (found.get("least", 5) - 2), found.get("ends", "we")]
        first = [" ".join(words[:1]), *["we"] * (found.get("sentences", 1) - 2), " ".join(words[1:])]
        return ". ".join(first if "sentences" in found else [" ".join(words)]) + "."

    items = list(iter_rows(datasets["constraints"].path))
    kinds = {each["kind"] for item in items for each in item["constraints"]}
    assert kinds == set(PHRASES)
    assert set(
        scores(datasets["constraints"], pool, *((item, text(item["constraints"])) for item in items))
    ) == {1.0}


def test_multihop_qa_by_hand(datasets, pool):
    item = {
        "first": ["Oldmere", "potter"],
        "via": "Oldmere",
        "answer": "Vess",
        "choices": ["Vess", "Alder", "Brin", "Lune"],
    }

    def call(query):
        return f'<tool_call>{{"name": "search", "arguments": {{"query": "{query}"}}}}</tool_call>'

    assert scores(
        datasets["multihop-qa"],
        pool,
        (item, "Vess"),
        (item, "Oldmere is on the vess."),
        (item, "Vess or Lune"),
        (item, "Alder"),
        (item, "The town is Oldmere."),
        (item, "She is a potter."),
        (item, "She is a potter in Oldmere."),
        (item, "Oldmere, Farwick, Ellford, Lowick, Marbeck"),
        (item, "Lowick"),
        (item, call("Oldmere")),
        (item, call("Mira Toll")),
        (item, call("Mira Toll").removesuffix("</tool_call>")),
        (item, call("Vess")),
        (item, "<tool_call>search Mira Toll</tool_call>"),
        (item, '<tool_call>{"name": "search", "arguments": ["Mira"]}</tool_call>'),
        (item, "<tool_call>" + "[" * 20_000),
    ) == pytest.approx([1.0, 1.0, 0.5, 0.1, 0.4, 0.25, 0.4, 0.1, 0.1, 0.4, 0.2, 0.2, 0.2, 0.0, 0.0, 0.0])


def test_a_question_needs_two_passages_and_has_them(datasets, tmp_path):
    texts = [row["text"] for row in map(json.loads, write_corpora(tmp_path)[0].path.read_text().splitlines())]
    assert len(texts) == 60
    for row in iter_rows(datasets["multihop-qa"].path):
        question = row["messages"][-1]["content"].removesuffix(BEGIN)
        named = re.search(r"of ([A-Z]\w+( [A-Z]\w+)?)", question)[1]
        first = [text for text in texts if re.match(rf"(The )?{named}\b", text)]
        second = [text for text in texts if re.match(rf"(A |The )?{row['via']}\b", text)]
        assert len(first) == len(second) == 1
        assert row["via"] in first[0]
        assert row["answer"] in second[0]
        assert not re.search(rf"\b{row['answer']}\b", first[0] + question)


def test_a_search_for_each_name_finds_its_passage_first(datasets, tmp_path):
    corpus = str(write_corpora(tmp_path)[0].path)
    for row in iter_rows(datasets["multihop-qa"].path):
        (_, text), *_ = search(corpus, row["via"], 2)
        assert row["answer"] in text


def test_grid_maps_differ_and_have_short_ways(datasets):
    rows = list(iter_rows(datasets["grid"].path))
    assert len({row["map"] for row in rows}) == len(rows)
    for row in rows:
        assert sorted(row["map"].replace("\n", "")) == sorted("SG##" + "." * 8)
        assert row["map"].replace("S", "@") in row["messages"][-1]["content"]


def test_what_grids_say_of_the_goal():
    assert "G is 2 right and 1 up." in grid_row((2, 0), (1, 2), [])["messages"][-1]["content"]
    assert "G is 1 left." in grid_row((0, 1), (0, 0), [])["messages"][-1]["content"]


def test_a_wall_lengthens_the_way():
    assert way((0, 0), (0, 2), []) == 2
    assert way((0, 0), (0, 2), [(0, 1)]) == 4
    assert way((0, 0), (0, 2), [(0, 1), (1, 1), (2, 1)]) is None


def test_each_number_is_guessed_as_often(datasets):
    numbers = [row["number"] for row in iter_rows(datasets["guessing"].path)]
    assert {number: numbers.count(number) for number in numbers} == dict.fromkeys(range(1, 21), 6)
