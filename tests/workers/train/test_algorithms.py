"""What must hold for every algorithm: no split matters, a fresh ratio is 1, and who has a gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

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
from workers.rl.averages import averaging, divisor
from workers.rl.batching import Batch, denominator, micro_batches, split_updates
from workers.rl.sums import Sums
from workers.spec import ALGORITHMS, AlgorithmName, Average, RLConfig
from workers.train.trainer import TorchTrainer

#: All that an algorithm may be asked to add to its loss.
EXTRAS: dict[str, Any] = {
    "kl_beta": 0.1,
    "kl_estimator": "k2",
    "entropy_coef": 0.05,
    "importance": "mask",
    "importance_cap": 1.05,
}


def asked(algorithm: AlgorithmName, **loss: Any) -> RLConfig:
    changes: dict[str, Any] = {"algorithm": algorithm, "updates_per_step": 2}
    if algorithm not in ("sft", "dpo"):
        loss = EXTRAS | loss
        if algorithm not in ("cispo", "ppo"):
            loss["dual_clip"] = 1.3
    return config(**changes, loss=loss)


def combinations() -> list[tuple[AlgorithmName, Average | None]]:
    averages = {"dpo": (None,)}
    return [
        (algorithm, average)
        for algorithm in get_args(AlgorithmName)
        for average in averages.get(algorithm, get_args(Average))
    ]


def examined(tiny: Weights, spec: RLConfig) -> Batch:
    """Rollouts with all that the algorithm compares with, a little off what the trainer computes now."""
    batch = rollout(tiny, None, 1.0)
    if spec.algorithm == "dpo":
        batch = batch.select([0, 1, 4, 5, 8, 9])
    else:
        batch = masked(batch)
    trainer = opened(tiny, spec)

    def off(rows: list[list[float]], by: float) -> list[list[float]]:
        return [
            [value + by * ((index * 5 + place) % 7 - 3) for place, value in enumerate(row)]
            for index, row in enumerate(rows)
        ]

    now = trainer.logprobs("run", batch)
    batch = replace(batch, engine_logprobs=off(now, 0.03))
    if spec.algorithm == "ppo":
        values = off(trainer.values("run", batch), 0.1)
        batch = replace(batch, values=values, returns=off(values, -0.2))
    return batch.with_logprobs(
        old=off(now, -0.1) if spec.method.rolls_out else None,
        reference=trainer.logprobs("run", batch, reference=True) if spec.needs_reference else None,
    )


def micros(batch: Batch, spec: RLConfig, size: int) -> list[Batch]:
    return micro_batches(batch, size, pairs=spec.algorithm == "dpo")


def computed(trainer: TorchTrainer, batches: list[Batch]) -> Sums:
    return sum((trainer.forward_backward("run", batch) for batch in batches), Sums())


@pytest.mark.parametrize(("algorithm", "average"), combinations())
def test_no_split_changes_gradient_or_metrics(
    algorithm: AlgorithmName, average: Average | None, tiny: Weights
) -> None:
    spec = asked(algorithm, **({} if average is None else {"average": average}))
    batch = examined(tiny, spec)
    over = denominator(batch, MAX_TOKENS)
    parts = divisor(averaging(spec), over)
    found = []
    for size in (12, 5, 2, 1):
        trainer = opened(tiny, spec)
        sums = computed(trainer, micros(batch, spec, size))
        found.append((gradients(trainer, parts), sums.metrics(over)))
    workers = [opened(tiny, spec) for _ in range(2)]
    shards = split_updates(batch, 2)
    sums = sum(
        (computed(worker, micros(shard, spec, 3)) for worker, shard in zip(workers, shards, strict=True)),
        Sums(),
    )
    one, two = (gradients(worker, parts) for worker in workers)
    found.append(({name: one[name] + two[name] for name in one}, sums.metrics(over)))
    assert max(float(tensor.abs().max()) for tensor in found[0][0].values()) > 1e-4
    for other, metrics in found[1:]:
        assert_close(other, found[0][0])
        assert metrics == pytest.approx(found[0][1], abs=1e-5)


@pytest.mark.parametrize("algorithm", [name for name, row in ALGORITHMS.items() if row.rolls_out])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_ratio_is_1_at_the_first_update(algorithm: AlgorithmName, temperature: float, tiny: Weights) -> None:
    """At any temperature: nothing is clipped, log-probs from before and none at all come to the same, and
    engine and trainer agree.
    """
    spec = config(algorithm=algorithm, sampling={"max_tokens": MAX_TOKENS, "temperature": temperature})
    batch = rollout(tiny, None, 1.0, temperature=temperature)
    if algorithm == "ppo":
        zeros = [[0.0] * len(row) for row in batch.completions]
        batch = replace(batch, values=zeros, returns=zeros)
    fresh, given = TorchTrainer(tiny), TorchTrainer(tiny)
    for trainer in (fresh, given):
        trainer.open("run", spec, 0)
    old = given.logprobs("run", batch)
    for ours, engines in zip(old, batch.engine_logprobs, strict=True):
        assert ours == pytest.approx(engines, abs=1e-4)
    plain = train(fresh, batch)
    sums = train(given, batch.with_logprobs(old=old))
    assert (plain.clipped, sums.clipped) == (0, 0)
    assert sums.mismatch_max is not None and sums.mismatch_max < 1e-4
    assert sums.loss == pytest.approx(plain.loss, abs=1e-4)
    assert_close(gradients(fresh, 65), gradients(given, 65))


@pytest.mark.parametrize(
    ("changes", "teaches"),
    [
        ({}, False),
        ({"loss": {"kl_beta": 0.5, "kl_in": "reward"}}, False),
        ({"loss": {"kl_beta": 0.5}}, True),
        ({"loss": {"entropy_coef": 0.1}}, True),
        ({"algorithm": "ppo"}, True),
        ({"algorithm": "sft"}, True),
        ({"algorithm": "dpo"}, True),
    ],
)
def test_who_learns_without_advantages(changes: dict[str, Any], teaches: bool, tiny: Weights) -> None:
    spec = config(**changes)
    trainer = opened(tiny, spec)
    batch = advantaged(rollout(tiny, None, 1.0), [0.0] * 12).select([0, 1, 4, 5, 8, 9])
    reference = trainer.logprobs("run", batch, reference=True)
    values = [[0.5] * len(row) for row in batch.completions]
    batch = replace(batch.with_logprobs(reference=reference), values=values, returns=values)
    sums = computed(trainer, micros(batch, spec, 4))
    assert sums.tokens == denominator(batch, MAX_TOKENS).tokens
    assert any(bool(tensor.any()) for tensor in gradients(trainer).values()) == teaches


def test_a_pair_that_is_not_whole_is_refused(tiny: Weights) -> None:
    spec = config(algorithm="dpo")
    trainer = opened(tiny, spec)
    batch = examined(tiny, spec)
    with pytest.raises(ValueError, match="both samples"):
        trainer.forward_backward("run", batch.select([0, 1, 2]))
