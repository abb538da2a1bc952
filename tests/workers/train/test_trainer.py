from __future__ import annotations

import pytest
import torch

from tests.workers.train.runs import MAX_TOKENS, advantaged, config, gradients, opened, rollout, step, train
from workers.engines.engine import TorchEngine
from workers.engines.errors import NotFinite
from workers.engines.sequences import Request
from workers.engines.weights import Weights
from workers.rl.averages import Denominator
from workers.rl.batching import Batch, denominator


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_step_is_adamw_with_clipping(tuning: str, tiny: Weights) -> None:
    optimizer = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.01, "beta2": 0.95}
    trainer = opened(tiny, config(tuning={"type": tuning}, optimizer=optimizer))
    batch = rollout(tiny, None, 1.0)
    copies = {
        name: tensor.detach().clone().requires_grad_() for name, tensor in trainer.parameters("run").items()
    }
    still = [copy for name, copy in copies.items() if name.endswith(("norm", "_bias"))]
    decaying = [copy for name, copy in copies.items() if not name.endswith(("norm", "_bias"))]
    assert bool(still) == (tuning == "full")
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": still, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for rate in (1e-2, 3e-3):
        train(trainer, batch)
        over = denominator(batch, MAX_TOKENS)
        for name, gradient in gradients(trainer, over.tokens).items():
            copies[name].grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(copies.values(), 0.01)
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        assert trainer.optim_step("run", rate, over) == pytest.approx(float(norm), rel=1e-5)
        assert float(norm) > 0.01
    for name, tensor in trainer.parameters("run").items():
        torch.testing.assert_close(tensor.detach(), copies[name].detach(), atol=1e-6, rtol=1e-5, msg=name)
    assert all(not tensor.any() for tensor in trainer.gradients("run").values())


def test_full_fine_tuning_leaves_the_base_and_feeds_the_engine(tiny: Weights) -> None:
    before = {name: tensor.clone() for name, tensor in tiny.named().items()}
    trainer = opened(tiny, config(tuning={"type": "full"}, loss={"kl_beta": 0.1}))
    batch = rollout(tiny, None, 1.0)
    reference = trainer.logprobs("run", batch, reference=True)
    step(trainer, batch.with_logprobs(reference=reference))
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny.named().items())
    assert trainer.logprobs("run", batch, reference=True) == reference
    engine = TorchEngine(tiny)
    engine.load_weights("run", 1, trainer.adapter("run"))
    engine.submit([Request("run", (0,), (5, 6, 7), 8, (0,))])
    (sequence,) = engine.decode().finished
    again = Batch([0], [(5, 6, 7)], [tuple(sequence.tokens)], [sequence.logprobs], [[1.0] * 8], [True])
    assert trainer.logprobs("run", again)[0] == pytest.approx(sequence.logprobs, abs=1e-4)
    assert trainer.logprobs("run", again, reference=True)[0] != pytest.approx(sequence.logprobs, abs=1e-2)


def test_not_finite_is_an_error_of_its_own(tiny: Weights) -> None:
    trainer = opened(tiny, config())
    batch = rollout(tiny, None, 1.0)
    before = {name: tensor.detach().clone() for name, tensor in trainer.parameters("run").items()}
    bad = advantaged(batch, [float("inf")] * 12)
    with pytest.raises(NotFinite, match="run run: the loss is"):
        train(trainer, bad)
    train(trainer, batch)
    broken = gradients(trainer)
    next(iter(broken.values()))[0, 0] = float("nan")
    trainer.set_gradients("run", broken)
    with pytest.raises(NotFinite, match="gradient's norm is nan"):
        trainer.optim_step("run", 0.1, denominator(batch, MAX_TOKENS))
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.parameters("run").items())


def test_penalty_without_reference_is_refused(tiny: Weights) -> None:
    trainer = opened(tiny, config(loss={"kl_beta": 0.1}))
    with pytest.raises(ValueError, match="needs reference log-probs"):
        train(trainer, rollout(tiny, None, 1.0))


def test_a_step_over_nothing_is_refused(tiny: Weights) -> None:
    trainer = opened(tiny, config())
    with pytest.raises(ValueError, match="trains no token"):
        trainer.optim_step("run", 0.1, Denominator(0, 0, MAX_TOKENS))


@pytest.mark.parametrize("average", ["token", "sequence", "constant"])
def test_division_in_the_step_equals_division_before(average: str, tiny: Weights) -> None:
    batch = rollout(tiny, None, 1.0)
    over = denominator(batch, MAX_TOKENS)
    parts = {"token": 65, "sequence": 11, "constant": 99}[average]
    later, before = (opened(tiny, config(loss={"average": average})) for _ in range(2))
    train(later, batch)
    train(before, batch)
    before.set_gradients("run", gradients(before, parts))
    # Nothing is left to divide by: one token, one sequence, of one token at most.
    expected = before.optim_step("run", 1e-2, Denominator(1, 1, 1))
    assert later.optim_step("run", 1e-2, over) == pytest.approx(expected, rel=1e-6)
    theirs = before.parameters("run")
    for name, tensor in later.parameters("run").items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-7, rtol=1e-6, msg=name)


def test_kl_is_reported_only_where_it_was_measured(tiny: Weights) -> None:
    batch = rollout(tiny, None, 1.0)
    over = denominator(batch, MAX_TOKENS)
    trainer = opened(tiny, config())
    assert "kl" not in train(trainer, batch).metrics(over)
    reference = batch.with_logprobs(reference=trainer.logprobs("run", batch, reference=True))
    assert train(trainer, reference).metrics(over)["kl"] > 0
