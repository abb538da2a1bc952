"""The loss of a micro-batch by hand: averages, ratios, penalties, values, pairs; and its gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from workers.rl.averages import averaging, divisor
from workers.rl.batching import Batch, denominator, micro_batches
from workers.rl.objective import Found, objective
from workers.rl.sums import Sums
from workers.spec import ALGORITHMS, RLConfig

POLICIES = [name for name, algorithm in ALGORITHMS.items() if algorithm.rolls_out]


def config(algorithm: str = "grpo", **changes: Any) -> RLConfig:
    settings: dict[str, Any] = {"algorithm": algorithm, "sampling": {"max_tokens": 10}}
    return RLConfig.model_validate(settings | changes)


def batch(lengths: list[int], advantages: list[float], **columns: Any) -> Batch:
    """A group of two and two, the engine's log-probs all -1."""
    return Batch(
        groups=[index // 2 for index in range(len(lengths))],
        prompts=[(1,)] * len(lengths),
        completions=[tuple(range(100 * index, 100 * index + length)) for index, length in enumerate(lengths)],
        engine_logprobs=[[-1.0] * length for length in lengths],
        advantages=[[value] * length for value, length in zip(advantages, lengths, strict=True)],
        keep=[True] * len(lengths),
        **columns,
    )


def loss_of(
    spec: RLConfig, whole: Batch, logprobs: list[list[float]]
) -> tuple[float, list[list[float]], Sums]:
    """The update's loss, divided, and its gradient by token."""
    leaf = torch.tensor([value for row in logprobs for value in row], requires_grad=True)
    loss, sums = objective(spec, whole, Found(leaf, torch.zeros_like(leaf)))
    over = divisor(averaging(spec), denominator(whole, spec.sampling.max_tokens))
    (gradient,) = torch.autograd.grad(loss / over, leaf)
    flat = iter(gradient.tolist())
    return float(loss.detach()) / over, [[next(flat) for _ in row] for row in logprobs], sums


# ---------------------------------------------------------------- averages


def test_lengths_1_to_8_with_losses_of_their_length_have_a_token_mean_of_17_thirds() -> None:
    """Squares over 36 tokens: 204 / 36. At ratio 1 a token's loss is its negative advantage."""
    lengths = list(range(1, 9))
    whole = batch(lengths, [-float(length) for length in lengths])
    logprobs = [[-1.0] * length for length in lengths]
    assert loss_of(config("dapo"), whole, logprobs)[0] == pytest.approx(17 / 3)
    assert loss_of(config("grpo"), whole, logprobs)[0] == pytest.approx(36 / 8)
    assert loss_of(config("dr_grpo"), whole, logprobs)[0] == pytest.approx(204 / 80)


@pytest.mark.parametrize("average", ["token", "sequence", "constant"])
def test_only_kept_tokens_are_counted_and_none_at_all_is_a_loss_of_0(average: str) -> None:
    spec = config(loss={"average": average})
    whole = batch([2, 4], [1.0, -3.0])
    kept = replace(whole, keep=[True, False])
    alone = loss_of(spec, kept.select(kept.trained), [[-1.0] * 2])[0]
    assert denominator(kept, 10) == denominator(kept.select([0]), 10)
    assert alone == pytest.approx(-2 / 10 if average == "constant" else -1.0)
    nothing = replace(whole, keep=[False, False])
    over = denominator(nothing, spec.sampling.max_tokens)
    assert divisor(averaging(spec), over) == 0
    assert Sums().metrics(over) == {"loss": 0.0, "entropy": 0.0}


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("algorithm", POLICIES)
def test_the_gradient_does_not_depend_on_the_split(algorithm: str, size: int) -> None:
    spec = config(
        algorithm,
        updates_per_step=2,
        loss={"kl_beta": 0.3, "entropy_coef": 0.1, "importance": "cap"},
    )
    lengths = [3, 1, 4, 2, 5, 2]
    chance = torch.Generator().manual_seed(3)

    def column(scale: float) -> list[list[float]]:
        return [(scale * torch.randn(length, generator=chance) - 1).tolist() for length in lengths]

    extra = {"values": column(1), "returns": column(1)} if algorithm == "ppo" else {}
    whole = batch(
        lengths,
        [0.4, -1.0, 2.0, 0.1, -0.3, 0.7],
        old_logprobs=column(0.1),
        reference_logprobs=column(0.3),
        **extra,
    )
    logprobs = column(0.1)
    assert gradients(spec, whole, logprobs, size) == pytest.approx(
        gradients(spec, whole, logprobs, 100), rel=1e-5
    )


def gradients(spec: RLConfig, whole: Batch, logprobs: list[list[float]], size: int) -> list[float]:
    """By token of the batch, summed over its micro-batches."""
    leaves = [torch.tensor(row, requires_grad=True) for row in logprobs]
    of = dict(zip(whole.completions, leaves, strict=True))
    for micro in micro_batches(whole, size):
        flat = torch.cat([of[completion] for completion in micro.completions])
        loss, _ = objective(spec, micro, Found(flat, -flat.exp() * flat, flat * 0.5))
        loss.backward()
    return [value for leaf in leaves for value in _gradient(leaf).tolist()]


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


# ---------------------------------------------------------------- ratios


@pytest.mark.parametrize("algorithm", POLICIES)
def test_the_first_update_has_a_ratio_of_1(algorithm: str) -> None:
    """Without old log-probs the gradient is the plain policy gradient: minus advantage, by the average."""
    spec = config(algorithm, loss={"average": "token"})
    extra = {"values": [[0.0] * 2] * 2, "returns": [[0.0] * 2] * 2} if spec.value else {}
    whole = batch([2, 2], [1.5, -0.5], **extra)
    leaf = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
    loss, sums = objective(spec, whole, Found(leaf, torch.zeros(4), torch.zeros(4)))
    (gradient,) = torch.autograd.grad(loss, leaf)
    # A ratio of whole sequences has a sequence's gradient at each of its tokens: length times the mean's.
    scale = 2.0 if spec.method.ratio == "sequence" else 1.0
    assert gradient.tolist() == pytest.approx([-1.5 * scale] * 2 + [0.5 * scale] * 2)
    assert sums.clipped == 0


def test_gspo_takes_the_mean_of_a_sequence() -> None:
    """Log-ratios 0.2 and 0.4: a ratio of exp(0.3), far above the default bound."""
    spec = config("gspo", updates_per_step=2, loss={"clip_low": 0.1, "clip_high": 0.5})
    whole = batch([2, 2], [1.0, 0.0], old_logprobs=[[-1.0, -1.0]] * 2)
    loss, gradient, sums = loss_of(spec, whole, [[-0.8, -0.6], [-1.0, -1.0]])
    assert loss == pytest.approx(-math.exp(0.3) / 2)
    assert gradient[0] == pytest.approx([-math.exp(0.3) / 4] * 2)
    assert sums.clipped == 0
    tight = config("gspo", updates_per_step=2)
    loss, gradient, sums = loss_of(tight, whole, [[-0.8, -0.6], [-1.0, -1.0]])
    assert loss == pytest.approx(-1.0004 / 2, rel=1e-6)
    assert gradient[0] == [0.0, 0.0]
    assert sums.clipped == 2


def test_rloo_takes_the_whole_sequence() -> None:
    spec = config("rloo", updates_per_step=2, loss={"clip_high": 2.0})
    whole = batch([2, 2], [1.0, 0.0], old_logprobs=[[-1.0, -1.0]] * 2)
    loss, gradient, _ = loss_of(spec, whole, [[-0.8, -0.6], [-1.0, -1.0]])
    assert loss == pytest.approx(-math.exp(0.6) / 2)
    assert gradient[0] == pytest.approx([-math.exp(0.6) / 2] * 2)


def test_cispo_keeps_a_gradient_where_ppo_has_none() -> None:
    """Ratio 2 under a cut of 1.5: the loss is -1.5 A log p, its gradient -1.5 A."""
    spec = config("cispo", updates_per_step=2, loss={"clip_high": 0.5})
    old = [[-1.0 - math.log(2)], [-1.0]]
    whole = batch([1, 1], [1.0, 0.0], old_logprobs=old)
    loss, gradient, sums = loss_of(spec, whole, [[-1.0], [-1.0]])
    assert loss == pytest.approx(1.5 / 2)
    assert gradient == [[pytest.approx(-0.75)], [pytest.approx(0.0)]]
    assert sums.clipped == 1
    ppo = config("grpo", updates_per_step=2, loss={"clip_high": 0.5})
    assert loss_of(ppo, whole, [[-1.0], [-1.0]])[1][0] == [0.0]


def test_dual_clip_bounds_what_a_bad_token_costs() -> None:
    old = [[-1.0 - math.log(8)], [-1.0]]
    whole = batch([1, 1], [-1.0, 0.0], old_logprobs=old)
    plain = config(updates_per_step=2)
    assert loss_of(plain, whole, [[-1.0], [-1.0]])[0] == pytest.approx(8 / 2)
    dual = config(updates_per_step=2, loss={"dual_clip": 3.0})
    loss, gradient, sums = loss_of(dual, whole, [[-1.0], [-1.0]])
    assert loss == pytest.approx(3 / 2)
    assert gradient[0] == [0.0]
    assert sums.clipped == 1


# ---------------------------------------------------------------- who sampled


def test_importance_is_cut_or_left_out() -> None:
    """The trainer finds -1, the engine had -1 - log of 1.5, 4 and 1/4."""
    engine = [[-1 - math.log(1.5), -1 - math.log(4), -1 + math.log(4)], [-1.0] * 3]
    whole = Batch(**vars(batch([3, 3], [1.0, 0.0])) | {"engine_logprobs": engine})
    cut = config(loss={"importance": "cap", "importance_cap": 2.0, "average": "token"})
    loss, _, sums = loss_of(cut, whole, [[-1.0] * 3] * 2)
    assert loss == pytest.approx(-(1.5 + 2 + 0.25) / 6)
    assert sums.capped == 1
    masked = config(loss={"importance": "mask", "importance_cap": 2.0, "average": "token"})
    loss, _, sums = loss_of(masked, whole, [[-1.0] * 3] * 2)
    assert loss == pytest.approx(-1.5 / 6)
    assert sums.capped == 2


# ---------------------------------------------------------------- penalties, bonuses, values


def test_beta_is_the_weight_of_the_divergence() -> None:
    reference = [[-1.5, -1.0], [-1.0, -1.0]]
    whole = batch([2, 2], [0.0, 0.0], reference_logprobs=reference)
    k3 = math.exp(-0.5) - 1 + 0.5
    for beta in (0.0, 0.5):
        loss, _, sums = loss_of(config("dapo", loss={"kl_beta": beta}), whole, [[-1.0, -1.0]] * 2)
        assert loss == pytest.approx(beta * k3 / 4)
        assert sums.kl == pytest.approx(k3)


def test_a_penalty_in_the_reward_is_not_in_the_loss() -> None:
    whole = batch([2, 2], [0.0, 0.0], reference_logprobs=[[-1.5, -1.0], [-1.0, -1.0]])
    loss, _, sums = loss_of(config(loss={"kl_beta": 0.5, "kl_in": "reward"}), whole, [[-1.0, -1.0]] * 2)
    assert loss == 0
    assert sums.kl == pytest.approx(0.5)  # k1


def test_a_penalty_without_its_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="reference"):
        loss_of(config(loss={"kl_beta": 0.5}), batch([1, 1], [1.0, -1.0]), [[-1.0]] * 2)


def test_the_entropy_is_a_bonus() -> None:
    spec = config("dapo", loss={"entropy_coef": 0.2})
    entropy = torch.tensor([1.0, 3.0], requires_grad=True)
    loss, _ = objective(spec, batch([1, 1], [0.0, 0.0]), Found(torch.zeros(2), entropy))
    assert float(loss.detach()) == pytest.approx(-0.8)
    assert torch.autograd.grad(loss, entropy)[0].tolist() == pytest.approx([-0.2, -0.2])


def test_the_value_loss_by_hand() -> None:
    """Values 0.5 and 2 for returns of 1 and 0, from 0 before: the second moved further than 0.2, upwards."""
    spec = config("ppo", value={"coef": 0.1, "clip": 0.2})
    whole = batch([1, 1], [0.0, 0.0], values=[[0.0], [0.0]], returns=[[1.0], [0.0]])
    values = torch.tensor([0.5, 2.0], requires_grad=True)
    loss, sums = objective(spec, whole, Found(torch.zeros(2), torch.zeros(2), values))
    # max(0.25, 0.64) / 2 for the first: its clip holds it back. max(4, 0.04) / 2 for the second.
    assert float(loss.detach()) == pytest.approx(0.1 * (0.32 + 2))
    assert torch.autograd.grad(loss, values)[0].tolist() == pytest.approx([0.0, 0.2])
    metrics = sums.metrics(denominator(whole, 10))
    assert metrics["value_loss"] == pytest.approx(2.32 / 2)
    # Returns vary by 1 / 2 about their mean, and the values before explain nothing of it: 1 - 1 / 0.5.
    assert metrics["explained_variance"] == pytest.approx(-1.0)


# ---------------------------------------------------------------- from the data


def test_sft_is_the_mean_negative_log_likelihood() -> None:
    loss, gradient, sums = loss_of(config("sft"), batch([1, 3], [0.0, 0.0]), [[-2.0], [-1.0, -3.0, -2.0]])
    assert loss == pytest.approx(2.0)
    assert gradient == [[-0.25], [-0.25] * 3]
    assert {"mismatch", "clip_fraction"}.isdisjoint(sums.metrics(denominator(batch([1, 3], [0, 0]), 10)))


def test_dpo_by_hand() -> None:
    """Margin 0.1 ((-2 + 3) - (-4 + 3)) = 0.2 of the first pair, -0.1 of the second."""
    spec = config("dpo")
    whole = batch(
        [2, 1, 1, 1],
        [0.0] * 4,
        reference_logprobs=[[-1.5, -1.5], [-3.0], [-1.0], [-2.0]],
    )
    loss, gradient, sums = loss_of(spec, whole, [[-1.0, -1.0], [-4.0], [-2.0], [-2.0]])

    def softplus(margin: float) -> float:
        return math.log(1 + math.exp(-margin))

    assert loss == pytest.approx((softplus(0.2) + softplus(-0.1)) / 2)
    push = 0.1 / (1 + math.exp(0.2)) / 2
    assert gradient[0] == pytest.approx([-push] * 2)
    assert gradient[1] == pytest.approx([push])
    metrics = sums.metrics(denominator(whole, 10))
    assert metrics["accuracy"] == 0.5
    assert metrics["margin"] == pytest.approx(0.05)


def test_pairs_are_never_split_and_keep_their_order() -> None:
    whole = batch([1, 5, 4, 2], [0.0] * 4)
    parts = micro_batches(whole, 3, pairs=True)
    assert [part.completions for part in parts] == [whole.completions[:2], whole.completions[2:]]
    with pytest.raises(ValueError, match="both samples"):
        objective(
            config("dpo"),
            whole.select([0]).with_logprobs(reference=[[-1.0]]),
            Found(torch.zeros(1), torch.zeros(1)),
        )
