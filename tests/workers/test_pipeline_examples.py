"""Jobs that learn from the data's own completions: SFT and DPO, alone, resumed, moved, and beside others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.workers.local import (
    Orders,
    device,
    launch,
    of_kind,
    of_worker,
    offers,
    run,
    same_weights,
    the_node,
)
from workers.pipeline import Pipeline
from workers.protocol import CheckpointSaved, Ended, FailureKind, StepDone, SubStageKind, Yield

RL = {
    "steps": 4,
    "prompts_per_step": 4,
    "sampling": {"max_tokens": 24},
    "precision": "fp32",
    "checkpoint_every": 1,
    "keep_checkpoints": 9,
    "micro_batch_size": 4,
    "optimizer": {"learning_rate": 0.01},
}


def talks(count: int = 8) -> list[dict]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"say {n}"},
                {"role": "assistant", "content": f"it is {n}"},
                {"role": "user", "content": "again"},
                {"role": "assistant", "content": f"{n}"},
            ]
        }
        for n in range(count)
    ]


def pairs(count: int = 8) -> list[dict]:
    return [
        {
            "input": {"messages": [{"role": "user", "content": f"say {n}"}]},
            "preferred_output": [{"role": "assistant", "content": f"yes {n}"}],
            "non_preferred_output": [{"role": "assistant", "content": "no, never"}],
        }
        for n in range(count)
    ]


ROWS = {"sft": talks(), "dpo": pairs()}


def written(folder: Path, rows: list[dict]) -> Path:
    path = folder / f"{len(list(folder.iterdir()))}.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


@pytest.fixture
def study(tiny_folder, tmp_path, cluster):
    """``study(name, algorithm, rl, rows, **launch)``: an attempt in a folder of its own."""

    def made(name: str, algorithm: str, rl=None, rows=None, **more) -> Pipeline:
        data = written(tmp_path, ROWS[algorithm] if rows is None else rows)
        settings = {**RL, "algorithm": algorithm, **(rl or {})}
        return Pipeline(launch(tiny_folder, data, tmp_path / name, rl=settings).model_copy(update=more))

    return made


@pytest.mark.parametrize(
    ("algorithm", "chain"),
    [("sft", [SubStageKind.UPDATE]), ("dpo", [SubStageKind.LOGPROB, SubStageKind.UPDATE])],
)
def test_a_job_of_examples_from_start_to_checkpoint(study, cluster, algorithm, chain):
    reports = asyncio.run(run(study("out", algorithm)))
    assert of_kind(reports, Ended) == [Ended(outcome="succeeded")]
    for step in range(4):
        own = [offer for offer in offers(reports) if offer.step == step]
        assert [(offer.kind, offer.part) for offer in own] == [(kind, i) for i, kind in enumerate(chain)]
        assert all(offer.gang for offer in own)
    assert {role for role, *_ in cluster.residents} == {"trainer"}, "no engine was asked for"
    steps = of_kind(reports, StepDone)
    assert all(done.samples == () for done in steps)
    assert steps[-1].metrics["loss"] < steps[0].metrics["loss"]
    assert all("reward" not in done.metrics and "mismatch" not in done.metrics for done in steps)
    assert of_kind(reports, CheckpointSaved)[-1].final
    assert cluster.runs() == []


def test_sft_counts_the_tokens_that_it_trains(study):
    """A character is a token: of the first talk "it is 0" and "0", each with the token that ends it."""
    reports = asyncio.run(run(study("out", "sft", {"steps": 1, "shuffle": False})))
    (done,) = of_kind(reports, StepDone)
    assert done.metrics["tokens"] == 4 * (7 + 1 + 1 + 1)


def test_dpo_comes_to_prefer_what_is_preferred(study):
    reports = asyncio.run(run(study("out", "dpo", {"steps": 8, "loss": {"dpo_beta": 0.5}})))
    first, *_, last = of_kind(reports, StepDone)
    assert first.metrics["loss"] == pytest.approx(0.6931472, abs=1e-5)
    assert first.metrics["margin"] == pytest.approx(0, abs=1e-5)
    assert last.metrics["accuracy"] == 1
    assert last.metrics["margin"] > 0.5


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_a_resumed_job_goes_on_as_if_nothing_had_happened(study, algorithm):
    whole = asyncio.run(run(study("whole", algorithm)))
    saved = of_kind(whole, CheckpointSaved)[1]
    more = {"resume_from": saved.path, "start_step": saved.step, "run_key": "rest.2"}
    rest = asyncio.run(run(study("rest", algorithm, **more)))
    assert [done.step for done in of_kind(rest, StepDone)] == [2, 3]
    assert same_weights(whole, rest)


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_workers_and_micro_batches_change_nothing(study, cluster, algorithm):
    one = asyncio.run(run(study("one", algorithm, {"micro_batch_size": 8})))
    two = asyncio.run(run(study("two", algorithm, {"devices": 2, "micro_batch_size": 3}), place=of_worker))
    norms = [[done.metrics["grad_norm"] for done in of_kind(r, StepDone)] for r in (one, two)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert same_weights(one, two, tolerance=1e-3)
    assert cluster.runs() == []


def test_an_update_of_examples_makes_room_and_moves(study, cluster):
    calm = asyncio.run(run(study("calm", "sft", {"micro_batch_size": 1})))
    made = study("moves", "sft", {"micro_batch_size": 1})
    orders = Orders(cluster, made)
    orders.at_micro(2, lambda: Yield(action_id="y", node=the_node(made, SubStageKind.UPDATE)))
    reports = orders.run(place=lambda offer: device("local/cpu1") if offer.yielded else device())
    assert [offer.part for offer in offers(reports) if offer.yielded] == [0]
    assert same_weights(calm, reports)
    assert cluster.runs() == []


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_beside_another_tenants_rollouts_nothing_changes(study, start, cluster, algorithm):
    """Both on the same trainer: what each learns is what it learns alone."""
    alone = asyncio.run(run(study("alone", algorithm)))
    other = asyncio.run(run(start("other", {"steps": 3})))

    async def beside():
        return await asyncio.gather(run(study("beside", algorithm)), run(start("others", {"steps": 3})))

    mine, theirs = asyncio.run(beside())
    assert same_weights(alone, mine)
    assert same_weights(other, theirs)
    assert cluster.runs() == []


def test_a_warm_start_goes_on_with_rewards(study, start):
    """SFT, then GRPO from its checkpoint: the first completions are those of the trained weights."""
    warm = asyncio.run(run(study("warm", "sft", {"steps": 30, "sampling": {"max_tokens": 24}})))
    saved = of_kind(warm, CheckpointSaved)[-1].path
    source = "def grade(sample, item):\n    return float('it is' in sample['output_text'])\n"
    spec = {"grader": {"type": "python", "name": "says", "source": source}}
    rl = {"steps": 1, "sampling": {"max_tokens": 12}}
    cold = of_kind(asyncio.run(run(start("cold", rl, spec=spec))), StepDone)[0]
    hot = of_kind(asyncio.run(run(start("hot", rl, spec=spec, start_path=saved))), StepDone)[0]
    assert cold.metrics["reward"] == 0
    assert hot.metrics["reward"] > 0.3


@pytest.mark.parametrize(
    ("algorithm", "rows", "text"),
    [
        (
            "sft",
            [{"messages": [{"role": "user", "content": "hi"}]}],
            "the last message must be the assistant's",
        ),
        (
            "sft",
            [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a" * 30}]}],
            "31 tokens, rl.sampling.max_tokens is 24",
        ),
        ("dpo", [{"input": {"messages": []}, "preferred_output": "a"}], "non_preferred_output"),
        ("dpo", talks(1), "chosen"),
    ],
)
def test_rows_that_do_not_fit_end_the_job_with_their_number(study, algorithm, rows, text):
    rl = {"prompts_per_step": 1}
    (ended,) = of_kind(asyncio.run(run(study("out", algorithm, rl, rows))), Ended)
    assert ended.failure.kind is FailureKind.BAD_DATA
    assert ended.failure.message.startswith("row 1: ") and text in ended.failure.message
