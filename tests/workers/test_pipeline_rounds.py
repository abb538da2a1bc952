"""Dynamic sampling: groups that teach nothing are replaced, in bounded rounds, the same in every attempt."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.workers.local import STOP, of_kind, of_worker, offers, run, same_weights, texts
from workers.data.cursor import rows_of
from workers.protocol import CheckpointSaved, Ended, Log, Offer, StepDone, SubStageKind

#: Of the rows 0 to 4, only the last two tell completions apart.
SOURCE = (
    "def grade(sample, item):\n"
    "    return 0.5 if item['number'] < 3 else len(set(sample['output_text'])) / 16\n"
)
SPEC = {"grader": {"type": "python", "name": "some", "source": SOURCE}}
RL = {
    "steps": 3,
    "prompts_per_step": 2,
    "group_size": 4,
    "sampling": {"max_tokens": 16},
    "sampling_rounds": 4,
    "sample_groups": 2,
    "keep_checkpoints": 9,
}


def prefills(reports) -> Counter[int]:
    """Rounds of each step."""
    return Counter(offer.step for offer in offers(reports) if offer.kind is SubStageKind.PREFILL)


def test_groups_that_teach_nothing_are_replaced_by_groups_that_teach(start, cluster):
    reports = asyncio.run(run(start("out", RL, spec=SPEC)))
    assert of_kind(reports, Ended)[0].outcome == "succeeded"
    steps = of_kind(reports, StepDone)
    rounds = prefills(reports)
    assert max(rounds.values()) > 1, "otherwise this test says nothing"
    for done in steps:
        assert done.metrics["sampling_rounds"] == rounds[done.step] <= 4
        assert Counter(sample.group for sample in done.samples) == {0: 4, 1: 4}
        first = rows_of(3, done.step, 0, 2, 3, 5, True)
        for group in range(2):
            own = [sample for sample in done.samples if sample.group == group]
            assert len({sample.row for sample in own}) == 1
            if own[0].row >= 3:
                assert any(sample.advantage for sample in own)
            if first[group] >= 3:
                assert own[0].row == first[group], "what teaches stays"
    trained = {sample.row for done in steps for sample in done.samples}
    replaced = [rows_of(3, step, 0, 2, 3, 5, True) for step in range(3)]
    assert trained != {row for rows in replaced for row in rows}
    assert cluster.runs() == []


def test_what_was_replaced_is_told_of(start):
    """All that was rolled out is counted, whether it is trained or not."""
    reports = asyncio.run(run(start("out", RL, spec=SPEC)))
    rounds = prefills(reports)
    several = next(done for done in of_kind(reports, StepDone) if rounds[done.step] > 1)
    assert several.metrics["tokens"] > sum(sample.tokens for sample in several.samples)
    assert several.metrics["zero_variance_groups"] > 0
    plain = asyncio.run(run(start("plain", RL | {"sampling_rounds": 1}, spec=SPEC)))
    assert all("sampling_rounds" not in done.metrics for done in of_kind(plain, StepDone))
    assert prefills(plain) == {0: 1, 1: 1, 2: 1}


def test_rounds_are_bounded_and_the_step_then_trains_what_it_has(start):
    source = "def grade(sample, item):\n    return 1\n"
    spec = {"grader": {"type": "python", "name": "same", "source": source}}
    reports = asyncio.run(run(start("out", RL | {"steps": 2}, spec=spec)))
    assert of_kind(reports, Ended)[0].outcome == "succeeded"
    assert prefills(reports) == {0: 4, 1: 4}
    assert [done.metrics["sampling_rounds"] for done in of_kind(reports, StepDone)] == [4, 4]
    warned = [log.message for log in of_kind(reports, Log) if log.level == "warning"]
    assert len(warned) == 2 and all("all rewards are equal" in text for text in warned)


def test_an_attempt_that_resumes_in_the_middle_samples_the_same(start):
    whole = asyncio.run(run(start("whole", RL, spec=SPEC)))
    made = start("half", RL, spec=SPEC)
    seen: Counter[int] = Counter()

    async def stop(report):
        body = report.body
        if isinstance(body, Offer) and body.kind is SubStageKind.PREFILL:
            seen[body.step] += 1
            if body.step and seen[body.step] == 2:
                await made.stop(STOP)

    half = asyncio.run(run(made, seen=stop))
    assert of_kind(half, Ended)[0].outcome == "stopped"
    saved = of_kind(half, CheckpointSaved)[-1]
    resumed = start(
        "half", RL, spec=SPEC, resume_from=saved.path, start_step=saved.step, run_key="half.2", attempt=2
    )
    rest = asyncio.run(run(resumed))
    assert texts(half) + texts(rest) == texts(whole)
    assert same_weights(rest, whole)


def test_workers_replace_their_own_groups(start, cluster):
    """Two workers, on a device each, give the same groups as one alone."""
    rl = RL | {"prompts_per_step": 4, "sample_groups": 4}
    alone = asyncio.run(run(start("alone", rl, spec=SPEC)))
    two = asyncio.run(run(start("two", rl | {"devices": 2}, spec=SPEC), place=of_worker))
    assert texts(alone) == texts(two)
    assert same_weights(alone, two, tolerance=1e-4)
    assert cluster.runs() == []


def test_each_round_has_its_own_rows_while_there_are_others():
    for step in range(4):
        rounds = [rows_of(7, step, round, 3, 4, 20, True) for round in range(3)]
        assert all(len(rows) == 3 for rows in rounds)
        flat = [row for rows in rounds for row in rows]
        assert len(set(flat)) == 9
        assert rounds == [rows_of(7, step, round, 3, 4, 20, True) for round in range(3)]
    assert rows_of(7, 0, 0, 3, 4, 20, False) == [0, 1, 2]
    assert set(rows_of(7, 0, 1, 3, 4, 12, False)).isdisjoint({0, 1, 2}), "the next epoch begins there"


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_few_rows_come_again(rows):
    for round in range(4):
        found = rows_of(1, 0, round, 3, 2, rows, True)
        assert len(found) == 3 and set(found) <= set(range(rows))
