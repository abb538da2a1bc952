"""Dropout of adapters: drawn by seed, step and sequence, and by nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.engines.adapters import random_adapter
from tests.workers.train.runs import (
    MAX_TOKENS,
    assert_close,
    config,
    gradients,
    masked,
    opened,
    rollout,
    step,
    train,
)
from workers.engines.lora import join
from workers.engines.weights import Weights
from workers.rl.batching import denominator, micro_batches
from workers.train.dropout import Segments, segments, with_dropout
from workers.train.trainer import TorchTrainer

CPU = torch.device("cpu")


def spec(dropout: float = 0.3, **changes: Any) -> Any:
    return config(tuning={"type": "lora", "dropout": dropout}, **changes)


def drawn(
    seed: int = 0, number: int = 0, prompts: Any = ((5, 6),), rows: Any = ((0, (7, 8, 9)),)
) -> Segments:
    return segments(seed, number, prompts, rows, CPU)


def test_the_share_that_is_kept() -> None:
    kept = segments(0, 0, [tuple(range(50))], [(0, tuple(range(50)))], CPU).kept(0.7, 400, "0 qkv")
    assert kept.shape == (100, 400)
    # 40,000 draws: the deviation of their mean is 0.0023.
    assert float(kept.float().mean()) == pytest.approx(0.7, abs=0.012)
    assert kept.float().mean(0).std() < 0.06  # no column, and
    assert kept.float().mean(1).std() < 0.03  # no token is dropped more often than chance has it


def test_what_a_drawing_depends_on() -> None:
    def kept(segments: Segments, place: str = "1 out") -> torch.Tensor:
        return segments.kept(0.5, 64, place)

    plain = kept(drawn())
    assert torch.equal(kept(drawn()), plain)
    others = [
        kept(drawn(seed=1)),
        kept(drawn(number=1)),
        kept(drawn(), "2 out"),
        kept(drawn(), "1 down"),
        kept(drawn(prompts=((5, 7),))),
    ]
    assert all(not torch.equal(other[:2], plain[:2]) for other in others)
    assert all(not torch.equal(other[2:], plain[2:]) for other in others)
    # Another completion leaves its prompt as it was.
    other = kept(drawn(rows=((0, (7, 8, 8)),)))
    assert torch.equal(other[:2], plain[:2])
    assert not torch.equal(other[2:], plain[2:])
    # So do other sequences in the same batch.
    among = kept(drawn(prompts=((4,), (5, 6)), rows=((0, (1, 2)), (1, (7, 8, 9)))))
    assert torch.equal(among[1:3], plain[:2])
    assert torch.equal(among[5:], plain[2:])


def test_an_adapter_reads_what_is_kept_and_the_frozen_product_reads_all(tiny: Weights) -> None:
    adapters = join(tiny.config, random_adapter(tiny.config, 1), 2.0, torch.float32)
    segment = drawn()
    pair, dropped = adapters[1]["qkv"], with_dropout(adapters, 0.4, segment)[1]["qkv"]
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    y = torch.ones(5, pair.up.shape[0])
    kept = segment.kept(0.6, 128, "1 qkv")
    expected = y + torch.where(kept, x / 0.6, 0) @ pair.down.T @ pair.up.T
    torch.testing.assert_close(dropped.added(y.clone(), x), expected)


def test_only_training_drops(tiny: Weights) -> None:
    plain, dropping = opened(tiny, config()), opened(tiny, spec())
    batch = rollout(tiny, None, 1.0)
    assert dropping.logprobs("run", batch) == plain.logprobs("run", batch)
    assert_close(dropping.adapter("run"), plain.adapter("run"))
    assert train(dropping, batch).entropy != pytest.approx(train(plain, batch).entropy, rel=1e-4)
    ours, theirs = gradients(dropping), gradients(plain)
    assert all((ours[name] - theirs[name]).abs().max() > 1e-4 for name in ours)


@pytest.mark.parametrize("keep", [0, 2**40])
def test_gradient_is_the_same_for_every_split(keep: int, tiny: Weights) -> None:
    """Also where blocks are computed again."""
    batch = masked(rollout(tiny, None, 1.0))
    found = []
    for size in (12, 5, 1):
        trainer = opened(tiny, spec(), activation_bytes=keep)
        train(trainer, batch, size)
        found.append(gradients(trainer, 65))
    kept = opened(tiny, spec())
    train(kept, batch)
    for other in found:
        assert_close(other, gradients(kept, 65))


def test_each_update_draws_anew_also_after_a_reload(tiny: Weights, tiny_folder: Path, tmp_path: Path) -> None:
    batch = rollout(tiny, None, 1.0)
    through = opened(tiny, spec())
    first = train(through, batch)
    assert train(through, batch) == first
    through.optim_step("run", 1e-9, denominator(batch, MAX_TOKENS))
    assert train(through, batch).entropy != pytest.approx(first.entropy, rel=1e-4)
    through.gradients("run")
    saved = opened(tiny, spec())
    step(saved, batch)
    saved.save_state("run", tmp_path, "tiny", tiny_folder)
    resumed = TorchTrainer(tiny)
    resumed.open("run", spec(), 0)
    resumed.load_state("run", tmp_path)
    assert train(resumed, batch) == train(saved, batch)
    ours, theirs = gradients(resumed), gradients(saved)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_workers_draw_the_same_for_a_sample_and_seeds_differ(tiny: Weights) -> None:
    batch = rollout(tiny, None, 1.0)
    one, same, other = opened(tiny, spec()), opened(tiny, spec()), opened(tiny, spec(), seed=1)
    shard = batch.of_groups({1})
    for trainer in (same, other):
        with torch.no_grad():
            for name, tensor in trainer.parameters("run").items():
                tensor.copy_(one.parameters("run")[name])
    assert train(one, shard) == train(same, shard)
    assert train(other, shard) != train(one, shard)
    assert [len(part) for part in micro_batches(shard, 4)] == [4]


def test_one_sample_twice_is_twice_the_gradient(tiny: Weights) -> None:
    batch = rollout(tiny, None, 1.0).select([4])
    twice = batch.select([0, 0])
    one, two = opened(tiny, spec()), opened(tiny, spec())
    train(one, batch)
    train(two, twice)
    assert_close(gradients(two, 2), gradients(one))
