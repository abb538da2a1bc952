"""Loss, gradients and advantages equal TRL's on a fixed batch of the tiny model, from the rewards on.

The policy has moved from its start, which is the reference; ratios are taken to log-probs away from its own,
so that some are clipped; a reward is missing; an environment wrote some of the tokens.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.tiny import make_tiny
from workers.engines.weights import Weights, from_state_dict, load_weights
from workers.rl import kl
from workers.rl.advantages import Outcome, estimate
from workers.rl.averages import averaging, divisor
from workers.rl.batching import Batch, denominator, micro_batches
from workers.rl.sums import Sums
from workers.spec import RLConfig
from workers.train.trainer import TorchTrainer

pytestmark = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL")

MAX_TOKENS, TEMPERATURE = 12, 0.7
#: fp32, summed in another order; parts of about 1 that cancel leave the rounding of the parts.
CLOSE, CANCELLED = 1e-5, 1e-7


@dataclass(frozen=True)
class Case:
    """The same job in our words and in TRL's."""

    ours: dict[str, Any]
    trainer: str
    theirs: dict[str, Any]


def sampling(theirs: dict[str, Any], ours: dict[str, Any]) -> Case:
    """One of GRPO's family, with a penalty of 0.3 as the paper has it: TRL weighs it by the ratio if left."""
    plain = {"epsilon": 0.2, "epsilon_high": 0.2, "beta": 0.3, "use_bias_correction_kl": False}
    asked = {"updates_per_step": 2} | ours
    return Case(asked | {"loss": {"kl_beta": 0.3} | ours.get("loss", {})}, "grpo", plain | theirs)


def leave_one_out(theirs: dict[str, Any], ours: dict[str, Any]) -> Case:
    plain = {"epsilon": 0.2, "epsilon_high": 0.2, "beta": 0.0}
    return Case({"algorithm": "rloo"} | ours, "rloo", plain | theirs)


DAPO = {"loss_type": "dapo", "epsilon_high": 0.28}
CASES = {
    "grpo": sampling({"loss_type": "grpo"}, {"algorithm": "grpo"}),
    "grpo_without_kl": sampling(
        {"loss_type": "grpo", "beta": 0.0}, {"algorithm": "grpo", "loss": {"kl_beta": 0.0}}
    ),
    "grpo_dual_clip": sampling(
        {"loss_type": "grpo", "delta": 1.3}, {"algorithm": "grpo", "loss": {"dual_clip": 1.3}}
    ),
    "dr_grpo": sampling({"loss_type": "dr_grpo", "scale_rewards": "none"}, {"algorithm": "dr_grpo"}),
    "dapo": sampling(DAPO, {"algorithm": "dapo", "overlong_buffer": 0}),
    "dapo_with_entropy": sampling(
        DAPO | {"entropy_coef": 0.1},
        {"algorithm": "dapo", "overlong_buffer": 0, "loss": {"entropy_coef": 0.1}},
    ),
    "gspo": sampling(
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"algorithm": "gspo"},
    ),
    # TRL's bound is on the ratio itself, ours on what it exceeds 1 by, as everywhere.
    "cispo": sampling(
        {"loss_type": "cispo", "epsilon_high": 1.2}, {"algorithm": "cispo", "loss": {"clip_high": 0.2}}
    ),
    "rloo": leave_one_out({}, {}),
    "rloo_with_kl": leave_one_out({"beta": 0.3}, {"loss": {"kl_beta": 0.3, "kl_in": "reward"}}),
    "rloo_normalized": leave_one_out({"normalize_advantages": True}, {"normalize_advantage": True}),
    "dpo": Case({"algorithm": "dpo"}, "dpo", {"beta": 0.1}),
}


@dataclass(frozen=True)
class World:
    """``episodes`` were sampled with the policy, and answered by an environment; ``pairs`` are for DPO."""

    start: Weights
    policy: Weights
    rewards: list[float | None]
    episodes: Batch
    pairs: Batch
    theirs: dict[str, Tensor]

    def batch(self, case: Case) -> Batch:
        """TRL's RLOO knows no tokens of an environment."""
        if case.trainer == "dpo":
            return self.pairs
        return self.episodes if case.trainer == "grpo" else replace(self.episodes, sampled=[])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("parity")
    start = _weights(make_tiny(folder / "start", seed=0))
    policy = _weights(make_tiny(folder / "policy", seed=1))
    chance = torch.Generator().manual_seed(7)
    episodes = _batch(chance, groups=2, size=4, answered=True)
    made = World(
        start=start,
        policy=policy,
        rewards=[1.0, 0.0, 0.25, 0.5, None, 1.0, 0.5, 0.0],
        episodes=episodes.with_logprobs(old=_drifted(policy, episodes, chance)),
        pairs=_batch(chance, groups=4, size=2, answered=False),
        theirs={},
    )
    files = {
        "start": str(folder / "start"),
        "policy": str(folder / "policy"),
        "batch": _columns(made.episodes) | {"rewards": made.rewards},
        "pairs": _columns(made.pairs),
        "cases": {name: _in_their_words(case) for name, case in CASES.items()},
    }
    (folder / "cases.json").write_text(json.dumps(files))
    script = Path(__file__).with_name("trl_numbers.py")
    command = [sys.executable, script, folder / "cases.json", folder / "numbers.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return replace(made, theirs=load_file(folder / "numbers.safetensors"))


def _weights(folder: Path) -> Weights:
    return load_weights(folder, torch.float32, torch.device("cpu"))


def _batch(chance: torch.Generator, groups: int, size: int, answered: bool) -> Batch:
    """Random ids of different lengths."""

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, 60, (length,), generator=chance).tolist())

    prompts = [ids(3 + 2 * group) for group in range(groups)]
    completions = [ids(3 + (5 * index) % 9) for index in range(groups * size)]
    sampled = [
        [not (answered and index % 2 and place == 1) for place in range(len(tokens))]
        for index, tokens in enumerate(completions)
    ]
    nothing = [[0.0] * len(tokens) for tokens in completions]
    return Batch(
        groups=[index // size for index in range(groups * size)],
        prompts=[prompts[index // size] for index in range(groups * size)],
        completions=completions,
        engine_logprobs=nothing,
        advantages=nothing,
        keep=[True] * len(completions),
        sampled=sampled,
    )


def _drifted(policy: Weights, batch: Batch, chance: torch.Generator) -> list[list[float]]:
    """Log-probs of all tokens as weights not far from the policy's would find them."""
    trainer = _opened(_spec({"algorithm": "grpo"}), policy, policy)
    found = trainer.logprobs("run", replace(batch, sampled=[]))
    return [(torch.tensor(row) + 0.2 * torch.randn(len(row), generator=chance)).tolist() for row in found]


def _spec(asked: dict[str, Any]) -> RLConfig:
    # DPO reads whole sequences at temperature 1.
    warm = {} if asked["algorithm"] == "dpo" else {"temperature": TEMPERATURE}
    tuning = {"type": "full"}
    return RLConfig.model_validate(asked | {"sampling": {"max_tokens": MAX_TOKENS} | warm, "tuning": tuning})


def _opened(spec: RLConfig, start: Weights, policy: Weights) -> TorchTrainer:
    """A run that began with ``start`` and has come to ``policy``."""
    trainer = TorchTrainer(start)
    trainer.open("run", spec, 0)
    moved = policy.named()
    with torch.no_grad():
        for name, tensor in trainer.parameters("run").items():
            tensor.copy_(moved[name])
    return trainer


def _columns(batch: Batch) -> dict[str, Any]:
    return {
        "groups": batch.groups,
        "prompts": batch.prompts,
        "completions": batch.completions,
        "sampled": batch.sampled,
        "old": batch.old_logprobs,
    }


def _in_their_words(case: Case) -> dict[str, Any]:
    return {
        "trainer": case.trainer,
        "max_tokens": MAX_TOKENS,
        "temperature": TEMPERATURE,
        "settings": case.theirs,
    }


# ---------------------------------------------------------------- ours


def _prepared(case: Case, world: World, spec: RLConfig, trainer: TorchTrainer) -> Batch:
    """With reference log-probs where they are needed, and our advantages."""
    batch = world.batch(case)
    if spec.needs_reference:
        batch = batch.with_logprobs(reference=trainer.logprobs("run", batch, reference=True))
    if case.trainer == "dpo":
        return batch
    divergence = _divergence(spec, batch, trainer.logprobs("run", batch))
    rows = zip(batch.groups, world.rewards, batch.sampled, divergence, strict=True)
    outcomes = [Outcome(group, reward, sampled, kl=row) for group, reward, sampled, row in rows]
    return replace(batch, advantages=estimate(spec, outcomes).advantages)


def _divergence(spec: RLConfig, batch: Batch, logprobs: list[list[float]]) -> list[list[float] | None]:
    """What the reward pays for, by token; None where it does not."""
    if spec.loss.kl_in != "reward":
        return [None] * len(batch)
    assert batch.reference_logprobs is not None
    return [
        kl.estimate(torch.tensor(now), torch.tensor(then), spec.loss.kl_estimator or "k1").tolist()
        for now, then in zip(logprobs, batch.reference_logprobs, strict=True)
    ]


def _trained(
    spec: RLConfig, trainer: TorchTrainer, batch: Batch, size: int
) -> tuple[float, Sums, dict[str, Tensor]]:
    """The update's loss, what it measured, and its gradients, over micro-batches of ``size``."""
    parts = micro_batches(batch, size, pairs=spec.algorithm == "dpo")
    sums = sum((trainer.forward_backward("run", micro) for micro in parts), Sums())
    over = divisor(averaging(spec), denominator(batch, MAX_TOKENS))
    found = {name: tensor / over for name, tensor in trainer.gradients("run").items()}
    return sums.loss / over, sums, found


def _their_gradients(world: World, name: str) -> dict[str, Tensor]:
    prefix = f"{name}/gradient/"
    found = {key.removeprefix(prefix): value for key, value in world.theirs.items() if key.startswith(prefix)}
    return from_state_dict(world.start.config, found, torch.float32, torch.device("cpu")).named()


@pytest.mark.parametrize("size", [8, 3])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_trls(name: str, size: int, world: World) -> None:
    case, theirs = CASES[name], world.theirs
    spec = _spec(case.ours)
    trainer = _opened(spec, world.start, world.policy)
    batch = _prepared(case, world, spec, trainer)
    advantages = torch.tensor([row[0] for row in batch.advantages])
    torch.testing.assert_close(advantages, theirs[f"{name}/advantages"], rtol=CLOSE, atol=CANCELLED)
    loss, sums, found = _trained(spec, trainer, batch, size)
    assert loss == pytest.approx(float(theirs[f"{name}/loss"]), rel=CLOSE, abs=CANCELLED)
    expected = _their_gradients(world, name)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert gradient.norm() > 0
        assert (found[key] - gradient).norm() <= CLOSE * gradient.norm(), key
    if case.trainer != "dpo":
        assert sums.clipped is not None
        assert 0 < sums.clipped < sums.tokens
