"""Every algorithm through a whole attempt; what PPO and penalties in the reward add; starting elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.workers.local import of_kind, of_worker, offers, run, same_weights, weights
from workers import batches
from workers.protocol import CheckpointSaved, Ended, StepDone, SubStageKind

RL = {"steps": 2, "sampling": {"max_tokens": 16}, "prompts_per_step": 4, "group_size": 4}
ALGORITHMS = ("grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "cispo", "ppo")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_trains(start, cluster, algorithm):
    reports = asyncio.run(run(start("out", RL | {"algorithm": algorithm})))
    assert of_kind(reports, Ended)[0].outcome == "succeeded"
    for done in of_kind(reports, StepDone):
        assert done.metrics["grad_norm"] > 0
        assert done.metrics["mismatch_max"] < 1e-3
        assert all(value == value for value in done.metrics.values())
    assert any(tensor.any() for name, tensor in weights(reports).items() if "lora_B" in name)
    assert cluster.runs() == []


def test_ppo_asks_for_values_and_resumes_with_its_head(start):
    rl = RL | {"algorithm": "ppo", "steps": 3, "updates_per_step": 2, "keep_checkpoints": 9}
    whole = asyncio.run(run(start("whole", rl)))
    kinds = [offer.kind for offer in offers(whole) if offer.step == 0]
    assert SubStageKind.LOGPROB in kinds
    for done in of_kind(whole, StepDone):
        assert done.metrics["value_loss"] > 0
        assert done.metrics["explained_variance"] <= 1
    saved = of_kind(whole, CheckpointSaved)[0]
    more = {"resume_from": saved.path, "start_step": saved.step, "run_key": "rest.2"}
    rest = asyncio.run(run(start("rest", rl, **more)))
    assert same_weights(whole, rest)
    heads = [
        load_file(Path(of_kind(r, CheckpointSaved)[-1].path) / "value_head.safetensors")
        for r in (whole, rest)
    ]
    assert all((heads[0][name] == heads[1][name]).all() and heads[0][name].any() for name in heads[0])


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce_pp", "ppo"])
def test_a_penalty_in_the_reward_is_taken_off_it(start, algorithm):
    """In the first step nothing has diverged; later the advantages are others than without."""
    rl = RL | {"algorithm": algorithm, "steps": 3, "sample_groups": 4}
    rl |= {"optimizer": {"learning_rate": 0.02}}
    plain = asyncio.run(run(start("plain", rl)))
    heavy = asyncio.run(run(start("heavy", rl | {"loss": {"kl_beta": 1.0, "kl_in": "reward"}})))
    assert SubStageKind.LOGPROB in {offer.kind for offer in offers(heavy)}
    first, *later = of_kind(heavy, StepDone)
    assert first.metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert all(abs(done.metrics["kl"]) > 1e-5 for done in later)
    ours, others = ([s.advantage for s in of_kind(r, StepDone)[0].samples] for r in (heavy, plain))
    assert ours == pytest.approx(others, abs=1e-4)
    assert not same_weights(plain, heavy, tolerance=1e-4)


def test_estimators_of_the_penalty_by_hand():
    """x = log 0.5 - log 0.25 = log 2."""
    found = [batches.divergence(name, -0.6931472, -1.3862944) for name in ("k1", "k2", "k3")]
    assert found == pytest.approx([0.6931472, 0.2402265, 0.1931472], abs=1e-6)


@pytest.mark.parametrize("tuning", ["lora", "full"])
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_a_job_that_starts_from_another_ones_checkpoint_has_not_diverged_from_it(start, tuning, kl_in):
    base = RL | {"tuning": {"type": tuning}, "optimizer": {"learning_rate": 0.01}}
    before = asyncio.run(run(start("before", base)))
    saved = of_kind(before, CheckpointSaved)[-1].path
    rl = base | {"loss": {"kl_beta": 0.5, "kl_in": kl_in}}
    after = asyncio.run(run(start("after", rl, start_path=saved)))
    assert of_kind(after, Ended)[0].outcome == "succeeded"
    first, second = of_kind(after, StepDone)
    assert first.metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert first.metrics["mismatch_max"] < 1e-3, "the engine samples with the weights it started from"
    assert abs(second.metrics["kl"]) > 1e-6


def test_a_resumed_start_from_a_checkpoint_keeps_its_reference(start):
    base = RL | {"optimizer": {"learning_rate": 0.01}, "keep_checkpoints": 9}
    saved = of_kind(asyncio.run(run(start("before", base))), CheckpointSaved)[-1].path
    rl = base | {"steps": 3, "loss": {"kl_beta": 0.5}}
    whole = asyncio.run(run(start("whole", rl, start_path=saved)))
    half = of_kind(whole, CheckpointSaved)[0]
    more = {"start_path": saved, "resume_from": half.path, "start_step": half.step, "run_key": "rest.2"}
    rest = asyncio.run(run(start("rest", rl, **more)))
    assert same_weights(whole, rest)
    assert of_kind(rest, StepDone)[0].metrics["kl"] == of_kind(whole, StepDone)[1].metrics["kl"] != 0


def test_workers_share_what_is_compared_over_the_batch(start, cluster):
    """Batch normalization and values see the whole step, on however many devices."""
    for algorithm in ("reinforce_pp", "ppo"):
        rl = RL | {"algorithm": algorithm}
        one = asyncio.run(run(start(f"{algorithm}-1", rl)))
        two = asyncio.run(run(start(f"{algorithm}-2", rl | {"devices": 2}), place=of_worker))
        norms = [[done.metrics["grad_norm"] for done in of_kind(r, StepDone)] for r in (one, two)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        # Adam blows the rounding of small gradients up: of steps of 1e-3 it is a tenth at the most.
        assert same_weights(one, two, tolerance=1e-4)
    assert cluster.runs() == []
