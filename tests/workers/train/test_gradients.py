from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.workers.train.runs import (
    MAX_TOKENS,
    advantaged,
    assert_close,
    config,
    gradients,
    masked,
    opened,
    rollout,
    train,
)
from workers.engines.weights import Weights
from workers.rl.batching import denominator, micro_batch_chunks, micro_batches, split_updates
from workers.rl.sums import Sums

AVERAGES = ["token", "sequence", "constant"]
#: What the update of ``rollout`` divides by.
PARTS = {"token": 65, "sequence": 11, "constant": 99}


def test_engine_and_trainer_agree_in_fp32(tiny: Weights) -> None:
    spec = config()
    trainer = opened(tiny, spec)
    batch = rollout(tiny, trainer.adapter("run"), trainer.scaling("run"))
    sums = train(trainer, batch)
    assert sums.tokens == denominator(batch, MAX_TOKENS).tokens
    assert 0 < sums.mismatch_max < 1e-3
    for ours, engines in zip(trainer.logprobs("run", batch), batch.engine_logprobs, strict=True):
        assert ours == pytest.approx(engines, abs=1e-4)


def test_engine_and_trainer_agree_in_bf16(tiny: Weights) -> None:
    half = tiny.map(lambda name, tensor: tensor.bfloat16() if tensor.ndim == 2 else tensor)
    trainer = opened(half, config())
    batch = rollout(half, trainer.adapter("run"), trainer.scaling("run"))
    assert train(trainer, batch).metrics(denominator(batch, MAX_TOKENS))["mismatch"] < 0.05


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_gradient_equals_a_plain_loop(
    average: str, mode: str, tiny: Weights, tiny_folder: Path, tmp_path: Path
) -> None:
    """One sequence at a time through transformers and PEFT, the loss written out; an environment's tokens
    are in between.
    """
    loss = {"average": average, "kl_beta": 0.3, "entropy_coef": 0.02} | (
        {"importance_cap": 1.02} if mode == "async" else {}
    )
    trainer = opened(tiny, config(loss=loss, mode={"type": mode}))
    batch = masked(rollout(tiny, trainer.adapter("run"), trainer.scaling("run")))
    old = [
        [value - 0.1 * (-1) ** index for value in row]
        for index, row in enumerate(trainer.logprobs("run", batch))
    ]
    batch = batch.with_logprobs(old=old, reference=trainer.logprobs("run", batch, reference=True))
    sums = train(trainer, batch)
    trainer.save_state("run", tmp_path, "tiny", tiny_folder)
    base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    kept = [index for index in range(12) if index not in (1, 6)]
    total = torch.zeros(())
    capped = 0
    for index in kept:
        prompt, completion = batch.prompts[index], batch.completions[index]
        marks = torch.tensor(batch.sampled[index])
        table = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        logprobs = table.gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1)[marks]
        assert batch.old_logprobs is not None and batch.reference_logprobs is not None
        before = torch.tensor(batch.old_logprobs[index])[marks]
        ratio = (logprobs - before).exp()
        advantage = batch.advantages[index][0]
        policy = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        if mode == "async":
            staleness = (before - torch.tensor(batch.engine_logprobs[index])[marks]).exp()
            capped += int((staleness > 1.02).sum())
            policy = policy * staleness.clamp(max=1.02)
        difference = torch.tensor(batch.reference_logprobs[index])[marks] - logprobs
        entropy = -(table.exp() * table).sum(-1)[marks]
        losses = -policy + 0.3 * (difference.exp() - difference - 1) - 0.02 * entropy
        total = total + (losses.mean() if average == "sequence" else losses.sum())
    tokens = sum(sum(batch.sampled[index]) for index in kept)
    parts = {"token": tokens, "sequence": 10, "constant": 10 * MAX_TOKENS}[average]
    (total / parts).backward()
    metrics = sums.metrics(denominator(batch, MAX_TOKENS))
    assert metrics["loss"] == pytest.approx(float(total.detach()) / parts, abs=1e-5)
    if mode == "async":
        assert 0 < capped < tokens
        assert metrics["importance_capped"] == pytest.approx(capped / tokens)
    theirs = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert_close(gradients(trainer, parts), theirs)


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_gradient_is_the_same_for_every_split_and_order(average: str, tuning: str, tiny: Weights) -> None:
    spec = config(loss={"average": average}, tuning={"type": tuning})
    batch = masked(rollout(tiny, None, 1.0))
    chunks = micro_batch_chunks(batch.groups, size=4, group_size=4)
    streamed = [micro for chunk in chunks for micro in micro_batches(batch.of_groups(chunk), 4)]
    found = []
    for micros in (*(micro_batches(batch, size) for size in (12, 5, 1)), streamed, streamed[::-1]):
        trainer = opened(tiny, spec)
        sums = sum((trainer.forward_backward("run", micro) for micro in micros), Sums())
        found.append((gradients(trainer, PARTS[average]), sums.metrics(denominator(batch, MAX_TOKENS))))
    # And over two data-parallel workers.
    workers = [opened(tiny, spec) for _ in range(2)]
    for worker, part in zip(workers, split_updates(batch, 2), strict=True):
        worker.forward_backward("run", part)
    one, two = (gradients(worker) for worker in workers)
    workers[0].set_gradients("run", {name: one[name] + two[name] for name in one})
    found.append((gradients(workers[0], PARTS[average]), found[0][1]))
    assert max(float(tensor.abs().max()) for tensor in found[0][0].values()) > 1e-4
    for other, metrics in found[1:]:
        assert_close(other, found[0][0])
        assert metrics == pytest.approx(found[0][1], abs=1e-5)


def test_recomputing_blocks_changes_no_gradient(tiny: Weights) -> None:
    batch = rollout(tiny, None, 1.0)
    kept, recomputed = opened(tiny, config()), opened(tiny, config(), activation_bytes=0)
    assert train(kept, batch) == train(recomputed, batch)
    ours, theirs = gradients(recomputed), gradients(kept)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_groups_without_advantage_teach_nothing_and_are_measured(tiny: Weights) -> None:
    trainer = opened(tiny, config())
    batch = rollout(tiny, None, 1.0)
    sums = train(trainer, advantaged(batch, [0.0] * 12))
    assert sums.tokens == denominator(batch, MAX_TOKENS).tokens
    assert sums.entropy > 0
    assert all(not tensor.any() for tensor in trainer.gradients("run").values())


def test_a_group_without_advantage_adds_no_gradient_and_is_measured_beside_others(tiny: Weights) -> None:
    batch = rollout(tiny, None, 1.0)
    some = replace(
        batch,
        advantages=[[0.0] * len(row) if 4 <= i < 8 else row for i, row in enumerate(batch.advantages)],
    )
    beside, alone, measured = (opened(tiny, config()) for _ in range(3))
    sums = train(beside, some, 12)
    assert sums == train(alone, some.of_groups({0, 2}), 12) + train(measured, some.of_groups({1}), 12)
    ours, theirs = gradients(beside), gradients(alone)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert sums.tokens == denominator(batch, MAX_TOKENS).tokens


def test_samples_left_out_change_nothing(tiny: Weights) -> None:
    batch = rollout(tiny, None, 1.0)
    changed = replace(
        batch,
        advantages=[[99.0] * len(row) if i == 6 else row for i, row in enumerate(batch.advantages)],
    )
    one, two = opened(tiny, config()), opened(tiny, config())
    train(one, batch)
    train(two, changed)
    assert_close(gradients(one), gradients(two))
    nothing = replace(batch, keep=[False] * 12)
    assert one.forward_backward("run", nothing) == Sums()


def test_runs_on_one_base_do_not_touch_each_other(tiny: Weights) -> None:
    batch = rollout(tiny, None, 1.0)
    alone = opened(tiny, config())
    train(alone, batch)
    shared = opened(tiny, config())
    shared.open("other", config(tuning={"type": "lora", "rank": 3}), 7)
    for micro in micro_batches(batch, 4):
        shared.forward_backward("other", micro)
        shared.forward_backward("run", micro)
    shared.optim_step("other", 0.1, denominator(batch, MAX_TOKENS))
    assert_close(gradients(shared), gradients(alone))
    shared.close("other")
    shared.close("other")
    with pytest.raises(ValueError, match="run other is not open"):
        shared.adapter("other")
