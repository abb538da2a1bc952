from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.workers.engines.adapters import logits, random_adapter
from workers.engines.engine import TorchEngine
from workers.engines.errors import NotFinite
from workers.engines.lora import join, tensor_name
from workers.engines.sequences import Request
from workers.engines.weights import Weights, load_weights
from workers.rl.batching import Batch, Denominator, denominator, micro_batches, split_updates
from workers.spec import RLConfig
from workers.train import checkpoint
from workers.train.trainer import Sums, TorchTrainer

CPU = torch.device("cpu")
AVERAGES = ["token", "sequence", "constant"]


def config(**changes: Any) -> RLConfig:
    settings: dict[str, Any] = {"sampling": {"max_tokens": 9}, "optimizer": {"learning_rate": 1e-2}}
    return RLConfig.model_validate(settings | changes).resolved()


def rollout(
    weights: Weights, adapter: dict[str, torch.Tensor] | None, scaling: float, step: int = 0
) -> Batch:
    """Three groups of four, of different lengths, with rewards that are none of the test's business."""
    engine = TorchEngine(weights)
    engine.load_adapter("run", 0, adapter, scaling)
    engine.submit(
        [
            Request(
                "run",
                (group, sample),
                tuple(range(5, 9 + 2 * group)),
                3 + 2 * sample,
                (0, step, group, sample),
            )
            for group in range(3)
            for sample in range(4)
        ]
    )
    done = sorted(engine.decode().finished, key=lambda sequence: sequence.request.key)
    advantages = [0.5, -1.0, 1.5, -1.0, -0.2, 0.9, 0.3, -1.0, 1.0, 1.0, -1.0, -1.0]
    return Batch(
        groups=[sequence.request.key[0] for sequence in done],
        prompts=[sequence.request.prompt for sequence in done],
        completions=[tuple(sequence.tokens) for sequence in done],
        engine_logprobs=[sequence.logprobs for sequence in done],
        advantages=advantages,
        keep=[index != 6 for index in range(12)],
    )


def opened(weights: Weights, spec: RLConfig, seed: int = 0, activation_bytes: int = 2**40) -> TorchTrainer:
    """A trainer whose adapter is not the neutral start."""
    trainer = TorchTrainer(weights, activation_bytes)
    trainer.open("run", spec, seed)
    if spec.tuning.type == "lora":
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, tensor in trainer.parameters("run").items():
                if "lora_B" in name:
                    tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
    return trainer


def train(trainer: TorchTrainer, batch: Batch, size: int = 4, max_tokens: int = 9) -> Sums:
    total = Sums()
    for micro in micro_batches(batch, size):
        total += trainer.forward_backward("run", micro, denominator(batch, max_tokens))
    return total


def gradients(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.gradients("run").items()}


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-6, rtol=1e-4, msg=name)


# ---------------------------------------------------------------- log-probs and gradients


def test_engine_and_trainer_agree_in_fp32(tiny: Weights) -> None:
    spec = config()
    trainer = opened(tiny, spec)
    batch = rollout(tiny, trainer.adapter("run"), trainer.scaling("run"))
    sums = train(trainer, batch)
    assert sums.tokens == denominator(batch, 9).tokens
    assert 0 < sums.mismatch_max < 1e-3
    for ours, engines in zip(trainer.logprobs("run", batch), batch.engine_logprobs, strict=True):
        assert ours == pytest.approx(engines, abs=1e-4)


def test_engine_and_trainer_agree_in_bf16(tiny: Weights) -> None:
    half = tiny.map(lambda name, tensor: tensor.bfloat16() if tensor.ndim == 2 else tensor)
    trainer = opened(half, config())
    batch = rollout(half, trainer.adapter("run"), trainer.scaling("run"))
    assert train(trainer, batch).metrics()["mismatch"] < 0.05


def test_gradient_equals_a_plain_loop(tiny: Weights, tiny_folder: Path, tmp_path: Path) -> None:
    """One sequence at a time through transformers and PEFT, the loss written out."""
    spec = config(loss={"average": "sequence", "kl_beta": 0.3})
    trainer = opened(tiny, spec)
    batch = rollout(tiny, trainer.adapter("run"), trainer.scaling("run"))
    old = [
        [value - 0.1 * (-1) ** index for value in row]
        for index, row in enumerate(trainer.logprobs("run", batch))
    ]
    batch = batch.with_logprobs(old=old, reference=trainer.logprobs("run", batch, reference=True))
    sums = train(trainer, batch)
    trainer.save_state("run", tmp_path, "tiny", tiny_folder)
    base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    kept = [index for index in range(12) if batch.keep[index]]
    total = torch.zeros(())
    for index in kept:
        prompt, completion = batch.prompts[index], batch.completions[index]
        table = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        logprobs = table.gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1)
        assert batch.old_logprobs is not None and batch.reference_logprobs is not None
        ratio = (logprobs - torch.tensor(batch.old_logprobs[index])).exp()
        advantage = batch.advantages[index]
        policy = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        difference = torch.tensor(batch.reference_logprobs[index]) - logprobs
        total = total + (-policy + 0.3 * (difference.exp() - difference - 1)).mean() / len(kept)
    total.backward()
    assert sums.loss == pytest.approx(float(total.detach()), abs=1e-5)
    theirs = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert_close(gradients(trainer), theirs)


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_gradient_is_the_same_for_every_split(average: str, tuning: str, tiny: Weights) -> None:
    spec = config(loss={"average": average}, tuning={"type": tuning})
    batch = rollout(tiny, None, 1.0)
    found = []
    for size in (12, 5, 1):
        trainer = opened(tiny, spec)
        sums = train(trainer, batch, size)
        found.append((gradients(trainer), sums.loss))
    # And over two data-parallel workers that know the common denominator.
    workers = [opened(tiny, spec) for _ in range(2)]
    total = Denominator(0, 0, 9)
    parts = split_updates(batch, 2)
    for part in parts:
        total = total + denominator(part, 9)
    for worker, part in zip(workers, parts, strict=True):
        worker.forward_backward("run", part, total)
    one, two = (gradients(worker) for worker in workers)
    workers[0].set_gradients("run", {name: one[name] + two[name] for name in one})
    found.append((gradients(workers[0]), found[0][1]))
    assert max(float(tensor.abs().max()) for tensor in found[0][0].values()) > 1e-4
    for other, loss in found[1:]:
        assert_close(other, found[0][0])
        assert loss == pytest.approx(found[0][1], abs=1e-6)


def test_recomputing_blocks_changes_no_gradient(tiny: Weights) -> None:
    batch = rollout(tiny, None, 1.0)
    kept, recomputed = opened(tiny, config()), opened(tiny, config(), activation_bytes=0)
    assert train(kept, batch) == train(recomputed, batch)
    ours, theirs = gradients(recomputed), gradients(kept)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_groups_without_advantage_teach_nothing_and_are_measured(tiny: Weights) -> None:
    trainer = opened(tiny, config())
    batch = rollout(tiny, None, 1.0)
    sums = train(trainer, Batch(**vars(batch) | {"advantages": [0.0] * 12}))
    assert sums.tokens == denominator(batch, 9).tokens
    assert sums.entropy > 0
    assert all(not tensor.any() for tensor in trainer.gradients("run").values())


def test_samples_left_out_change_nothing(tiny: Weights) -> None:
    batch = rollout(tiny, None, 1.0)
    changed = Batch(
        **vars(batch) | {"advantages": [99.0 if i == 6 else a for i, a in enumerate(batch.advantages)]}
    )
    one, two = opened(tiny, config()), opened(tiny, config())
    train(one, batch)
    train(two, changed)
    assert_close(gradients(one), gradients(two))
    nothing = Batch(**vars(batch) | {"keep": [False] * 12})
    assert one.forward_backward("run", nothing, Denominator(0, 0, 9)) == Sums()


def test_runs_on_one_base_do_not_touch_each_other(tiny: Weights) -> None:
    batch = rollout(tiny, None, 1.0)
    alone = opened(tiny, config())
    train(alone, batch)
    shared = opened(tiny, config())
    shared.open("other", config(tuning={"type": "lora", "rank": 3}), 7)
    for micro in micro_batches(batch, 4):
        shared.forward_backward("other", micro, denominator(batch, 9))
        shared.forward_backward("run", micro, denominator(batch, 9))
    shared.optim_step("other", 0.1)
    assert_close(gradients(shared), gradients(alone))
    shared.close("other")
    shared.close("other")
    with pytest.raises(ValueError, match="run other is not open"):
        shared.adapter("other")


# ---------------------------------------------------------------- the step


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
        for name, gradient in gradients(trainer).items():
            copies[name].grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(copies.values(), 0.01)
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        assert trainer.optim_step("run", rate) == pytest.approx(float(norm), rel=1e-5)
        assert float(norm) > 0.01
    for name, tensor in trainer.parameters("run").items():
        torch.testing.assert_close(tensor.detach(), copies[name].detach(), atol=1e-6, rtol=1e-5, msg=name)
    assert all(not tensor.any() for tensor in trainer.gradients("run").values())


def test_full_fine_tuning_leaves_the_base_and_feeds_the_engine(tiny: Weights) -> None:
    before = {name: tensor.clone() for name, tensor in tiny.named().items()}
    trainer = opened(tiny, config(tuning={"type": "full"}, loss={"kl_beta": 0.1}))
    batch = rollout(tiny, None, 1.0)
    reference = trainer.logprobs("run", batch, reference=True)
    train(trainer, batch.with_logprobs(reference=reference))
    trainer.optim_step("run", 1e-2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny.named().items())
    assert trainer.logprobs("run", batch, reference=True) == reference
    engine = TorchEngine(tiny)
    engine.load_weights("run", 1, trainer.adapter("run"))
    engine.submit([Request("run", (0,), (5, 6, 7), 8, (0,))])
    (sequence,) = engine.decode().finished
    again = Batch([0], [(5, 6, 7)], [tuple(sequence.tokens)], [sequence.logprobs], [1.0], [True])
    assert trainer.logprobs("run", again)[0] == pytest.approx(sequence.logprobs, abs=1e-4)
    assert trainer.logprobs("run", again, reference=True)[0] != pytest.approx(sequence.logprobs, abs=1e-2)


def test_not_finite_is_an_error_of_its_own(tiny: Weights) -> None:
    trainer = opened(tiny, config())
    batch = rollout(tiny, None, 1.0)
    before = {name: tensor.detach().clone() for name, tensor in trainer.parameters("run").items()}
    bad = Batch(**vars(batch) | {"advantages": [float("inf")] * 12})
    with pytest.raises(NotFinite, match="run run: the loss is"):
        train(trainer, bad)
    train(trainer, batch)
    broken = gradients(trainer)
    next(iter(broken.values()))[0, 0] = float("nan")
    trainer.set_gradients("run", broken)
    with pytest.raises(NotFinite, match="gradient's norm is nan"):
        trainer.optim_step("run", 0.1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.parameters("run").items())


def test_penalty_without_reference_is_refused(tiny: Weights) -> None:
    trainer = opened(tiny, config(loss={"kl_beta": 0.1}))
    with pytest.raises(ValueError, match="needs reference log-probs"):
        train(trainer, rollout(tiny, None, 1.0))


def test_kl_is_reported_only_where_it_was_measured(tiny: Weights) -> None:
    batch = rollout(tiny, None, 1.0)
    trainer = opened(tiny, config())
    assert "kl" not in train(trainer, batch).metrics()
    reference = batch.with_logprobs(reference=trainer.logprobs("run", batch, reference=True))
    measured = train(trainer, reference).metrics()["kl"]
    assert measured > 0
    # A worker that had nothing to train adds nothing.
    assert (Sums() + Sums(tokens=4, kl=2.0) + Sums(tokens=4, kl=1.0)).metrics()["kl"] == 0.375


# ---------------------------------------------------------------- formats and resuming


def test_start_is_seeded_and_neutral(tiny: Weights) -> None:
    trainers = [TorchTrainer(tiny) for _ in range(3)]
    for trainer, seed in zip(trainers, (3, 3, 4), strict=True):
        trainer.open("run", config(), seed)
    first, same, other = (trainer.adapter("run") for trainer in trainers)
    name = tensor_name(0, "q_proj", "A")
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], other[name])
    assert first[name].abs().max() <= 1 / 128**0.5
    assert all(not tensor.any() for key, tensor in first.items() if "lora_B" in key)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), None])
def test_adapter_loads_in_peft(targets: Any, tiny: Weights, tiny_folder: Path, tmp_path: Path) -> None:
    tuning = {"type": "lora", "rank": 6, "alpha": 20.0} | ({"targets": targets} if targets else {})
    trainer = opened(tiny, config(tuning=tuning))
    trainer.save_state("run", tmp_path, "tiny", tiny_folder)
    base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path)
    tokens = [3, 9, 22, 7, 31, 40, 5]
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0]
    ours = logits(
        tiny, tokens, join(tiny.config, trainer.adapter("run"), trainer.scaling("run"), torch.float32)
    )
    assert (ours - logits(tiny, tokens)).abs().max() > 0.05
    assert (ours - theirs).abs().max() < 1e-4


def test_adapter_written_by_peft_loads_here(tiny: Weights, tiny_folder: Path, tmp_path: Path) -> None:
    trainer = opened(tiny, config())
    (tmp_path / "ours").mkdir()
    trainer.save_state("run", tmp_path / "ours", str(tiny_folder), tiny_folder)
    base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    PeftModel.from_pretrained(base, tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    (tmp_path / "ours/optimizer.safetensors").rename(tmp_path / "theirs/optimizer.safetensors")
    other = TorchTrainer(tiny)
    other.open("run", config(), 9)
    other.load_state("run", tmp_path / "theirs")
    assert_close(other.adapter("run"), trainer.adapter("run"))


def test_full_model_is_a_hugging_face_folder(tiny: Weights, tiny_folder: Path, tmp_path: Path) -> None:
    trainer = opened(tiny, config(tuning={"type": "full"}))
    train(trainer, rollout(tiny, None, 1.0))
    trainer.optim_step("run", 1e-2)
    trainer.save_state("run", tmp_path, "tiny", tiny_folder)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([[3, 9, 22, 7]])).logits[0]
    found = logits(load_weights(tmp_path, torch.float32, CPU), [3, 9, 22, 7])
    assert (found - expected).abs().max() < 1e-4
    assert (found - logits(tiny, [3, 9, 22, 7])).abs().max() > 0.01
    assert (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_six_steps_equal_three_reload_three(
    tuning: str, tiny: Weights, tiny_folder: Path, tmp_path: Path
) -> None:
    spec = config(tuning={"type": tuning})

    def steps(trainer: TorchTrainer, first: int, last: int) -> None:
        for step in range(first, last):
            train(trainer, rollout(tiny, None, 1.0, step))
            trainer.optim_step("run", 1e-2)

    through = TorchTrainer(tiny)
    through.open("run", spec, 0)
    steps(through, 0, 6)
    stopped = TorchTrainer(tiny)
    stopped.open("run", spec, 0)
    steps(stopped, 0, 3)
    folder = checkpoint.write(
        tmp_path, 3, {"step": 3}, lambda to: stopped.save_state("run", to, "tiny", tiny_folder)
    )
    resumed = TorchTrainer(tiny)
    resumed.open("run", spec, 1)
    resumed.load_state("run", folder)
    steps(resumed, 3, 6)
    ours, theirs = resumed.adapter("run"), through.adapter("run")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_state_of_another_run_is_refused(tiny: Weights, tiny_folder: Path, tmp_path: Path) -> None:
    trainer = opened(tiny, config())
    trainer.save_state("run", tmp_path, "tiny", tiny_folder)
    other = TorchTrainer(tiny)
    other.open("rank", config(tuning={"type": "lora", "rank": 4}), 0)
    other.open("targets", config(tuning={"type": "lora", "targets": ["q_proj"]}), 0)
    other.open("full", config(tuning={"type": "full"}), 0)
    for run, reason in (("rank", "has shape"), ("targets", "other parameters"), ("full", "is missing")):
        with pytest.raises(ValueError, match=reason):
            other.load_state(run, tmp_path)


def test_adapter_of_the_engine_is_a_copy(tiny: Weights) -> None:
    trainer = opened(tiny, config())
    adapter = trainer.adapter("run")
    before = {name: tensor.clone() for name, tensor in adapter.items()}
    train(trainer, rollout(tiny, None, 1.0))
    trainer.optim_step("run", 0.1)
    assert_close(adapter, before)
    assert random_adapter(tiny.config, 1, rank=16).keys() == adapter.keys()
