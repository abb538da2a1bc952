"""Tokens that an environment wrote are read, and neither trained nor counted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.workers.train.runs import assert_close, config, gradients, masked, opened, rollout, train
from workers.engines.weights import Weights
from workers.rl.averages import Denominator
from workers.rl.batching import Batch, denominator
from workers.rl.sums import Sums

PROMPT = (5, 6, 7)


def episodes(**changes: Any) -> Batch:
    """Two sampled tokens of three, one of four, none of two; the same token stands for both kinds."""
    content: dict[str, Any] = {
        "groups": [0, 0, 0],
        "prompts": [PROMPT] * 3,
        "completions": [(7, 7, 7), (9, 7, 7, 9), (7, 7)],
        "engine_logprobs": [[-1.0, 0.0, -2.0], [0.0, 0.0, -3.0, 0.0], [0.0, 0.0]],
        "advantages": [[1.0, 0.0, 1.0], [0.0, 0.0, -3.0, 0.0], [0.0, 0.0]],
        "keep": [True] * 3,
        "sampled": [[True, False, True], [False, False, True, False], [False, False]],
    }
    return Batch(**content | changes)


@pytest.mark.parametrize(
    ("average", "loss"),
    # The ratio is 1, so that each token's loss is minus its advantage: -1, -1 and 3.
    [("token", 1 / 3), ("sequence", (-1 + 3) / 2), ("constant", 1 / (2 * 10))],
)
def test_averages_by_hand(average: str, loss: float, tiny: Weights) -> None:
    batch = episodes()
    over = denominator(batch, max_tokens=10)
    assert over == Denominator(tokens=3, sequences=2, max_tokens=10)
    sums = opened(tiny, config(loss={"average": average})).forward_backward("run", batch)
    assert sums.tokens == 3
    assert sums.metrics(over)["loss"] == pytest.approx(loss)


def test_mismatch_entropy_clips_and_kl_count_sampled_tokens_only(tiny: Weights) -> None:
    trainer = opened(tiny, config())
    plain = trainer.logprobs("run", episodes(sampled=[]))
    # The first token doubled its probability, the second fell to half: only the first has outrun its clip.
    old = [
        [plain[0][0] - math.log(2), 0.0, plain[0][2] + math.log(2)],
        [0.0, 0.0, plain[1][2], 0.0],
        [0.0] * 2,
    ]
    batch = episodes(advantages=[[1.0, 0.0, 1.0], [0.0] * 4, [0.0] * 2]).with_logprobs(old=old, reference=old)
    metrics = trainer.forward_backward("run", batch).metrics(denominator(batch, 10))
    two = math.log(2)
    assert metrics["clip_fraction"] == pytest.approx(1 / 3)
    assert metrics["kl"] == pytest.approx(((0.5 + two - 1) + (2 - two - 1) + 0) / 3, rel=1e-4)
    gaps = [abs(-1.0 - old[0][0]), abs(-2.0 - old[0][2]), abs(-3.0 - old[1][2])]
    assert metrics["mismatch"] == pytest.approx(sum(gaps) / 3, rel=1e-5)
    assert metrics["mismatch_max"] == pytest.approx(max(gaps), rel=1e-5)

    def alone(*before: int) -> float:
        batch = Batch([0], [(*PROMPT, *before)], [(7,)], [[0.0]], [[1.0]], [True])
        return trainer.forward_backward("run", batch).entropy

    entropy = alone() + alone(7, 7) + alone(9, 7)
    assert metrics["entropy"] == pytest.approx(entropy / 3, rel=1e-4)


def test_importance_is_capped_by_hand(tiny: Weights) -> None:
    """Sampled at 1/1.5, 1/4 and twice of what they are likely now: weights 1.5, 2 (cut) and 0.5."""
    trainer = opened(tiny, config(mode={"type": "async"}))
    now = trainer.logprobs("run", episodes())
    engine = [
        [now[0][0] - math.log(1.5), 0.0, now[0][2] - math.log(4)],
        [0.0, 0.0, now[1][2] + math.log(2), 0.0],
        [0.0, 0.0],
    ]
    batch = episodes(engine_logprobs=engine)
    metrics = trainer.forward_backward("run", batch).metrics(denominator(batch, 10))
    assert metrics["loss"] == pytest.approx((-1.5 - 2.0 + 0.5 * 3.0) / 3, rel=1e-4)
    assert metrics["importance_capped"] == pytest.approx(1 / 3)


def test_fresh_samples_weigh_one_and_are_trained_as_in_step(tiny: Weights) -> None:
    batch = masked(rollout(tiny, None, 1.0))
    synchronous, asynchronous = opened(tiny, config()), opened(tiny, config(mode={"type": "async"}))
    fresh = replace(batch, engine_logprobs=synchronous.logprobs("run", batch))
    assert train(synchronous, fresh).capped is None
    assert train(asynchronous, fresh).capped == 0
    tokens = denominator(batch, 9).tokens
    assert_close(gradients(asynchronous, tokens), gradients(synchronous, tokens))


def test_logprobs_keep_their_places(tiny: Weights) -> None:
    trainer = opened(tiny, config())
    plain, marked = trainer.logprobs("run", episodes(sampled=[])), trainer.logprobs("run", episodes())
    for index, marks in enumerate(episodes().sampled):
        expected = [value if mark else 0.0 for value, mark in zip(plain[index], marks, strict=True)]
        assert marked[index] == pytest.approx(expected, abs=1e-5)


def test_what_is_not_sampled_has_no_numbers_of_its_own(tiny: Weights) -> None:
    batch = masked(rollout(tiny, None, 1.0))
    nonsense = [
        [value if mark else float("nan") for value, mark in zip(row, marks, strict=True)]
        for row, marks in zip(batch.engine_logprobs, batch.sampled, strict=True)
    ]
    one, two = opened(tiny, config()), opened(tiny, config())
    assert train(one, batch) == train(two, replace(batch, engine_logprobs=nonsense))
    ours, theirs = gradients(one), gradients(two)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_sequence_without_a_sampled_token_is_not_trained(tiny: Weights) -> None:
    trainer = opened(tiny, config())
    assert episodes().trained == [0, 1]
    assert trainer.forward_backward("run", episodes().select([2])) == Sums()
    assert all(not tensor.any() for tensor in trainer.gradients("run").values())
    assert trainer.logprobs("run", episodes().select([2])) == [[0.0, 0.0]]
