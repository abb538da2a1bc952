"""Every algorithm takes a task that the tiny model cannot do to one that it can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.workers.train.learning import LENGTH, Loop, learner
from workers.engines.weights import Weights

STEPS = 40


def mostly_a(text: str) -> float:
    """ "aaaa" is worth 1: a random model writes it once in 65 ** 4 times."""
    return text.count("a") / LENGTH


def risen(loop: Loop, rate: float) -> tuple[float, float]:
    """The first step's mean reward, and that of five steps together as soon as it is above 0.8."""
    history = [loop.step(rate)]
    while len(history) < STEPS and sum(history[-5:]) / 5 <= 0.8:
        history.append(loop.step(rate))
    return history[0], sum(history[-5:]) / 5


CASES: list[tuple[str, dict[str, Any], float]] = [
    ("grpo", {}, 1e-2),
    ("grpo", {"tuning": {"type": "full"}}, 3e-3),
    (
        "grpo",
        {"loss": {"kl_beta": 0.01, "entropy_coef": 0.001}, "tuning": {"type": "lora", "dropout": 0.1}},
        1e-2,
    ),
    ("dr_grpo", {}, 1e-2),
    ("dapo", {}, 1e-2),
    ("rloo", {}, 1e-2),
    ("reinforce_pp", {}, 1e-2),
    ("reinforce_pp", {"group_baseline": True, "loss": {"kl_beta": 0.01, "kl_in": "reward"}}, 1e-2),
    ("gspo", {"updates_per_step": 2}, 1e-2),
    ("cispo", {"updates_per_step": 2}, 1e-2),
    ("ppo", {}, 1e-2),
]


@pytest.mark.parametrize(("algorithm", "changes", "rate"), CASES)
def test_reward_rises(
    algorithm: str, changes: dict[str, Any], rate: float, tiny: Weights, tiny_folder: Path
) -> None:
    loop = Loop(tiny, tiny_folder, learner(algorithm=algorithm, **changes), mostly_a)
    first, last = risen(loop, rate)
    assert first < 0.3
    assert last > 0.8


@pytest.mark.parametrize(("tuning", "rate"), [("lora", 1e-2), ("full", 3e-3)])
def test_examples_are_learned(tuning: str, rate: float, tiny: Weights, tiny_folder: Path) -> None:
    loop = Loop(tiny, tiny_folder, learner(algorithm="sft", tuning={"type": tuning}), mostly_a)
    assert loop.mean_reward() < 0.3
    for _ in range(STEPS):
        loop.learn(loop.answers("aaaa"), rate)
    assert loop.mean_reward() > 0.8


def test_preferences_are_learned(tiny: Weights, tiny_folder: Path) -> None:
    loop = Loop(tiny, tiny_folder, learner(algorithm="dpo"), mostly_a)
    assert loop.mean_reward() < 0.3
    for _ in range(STEPS):
        # What the model writes by itself against what is wanted.
        own = loop.tokenizer.decode(loop.sample()[0].tokens)
        loop.learn(loop.answers("aaaa", own), 1e-2)
    assert loop.mean_reward() > 0.8


def test_a_warm_start_makes_a_task_learnable(tiny: Weights, tiny_folder: Path, tmp_path: Path) -> None:
    """A reward that chance never finds: a few looks at an example, and reinforcement does the rest."""

    def exact(text: str) -> float:
        return float(text == "b2c!")

    # At 1 the tiny model's largest logits still leave a tenth to all other tokens.
    reinforced = learner(sampling={"temperature": 0.6}, loss={"kl_beta": 0.001})
    cold = Loop(tiny, tiny_folder, reinforced, exact)
    assert [cold.step(1e-3) for _ in range(5)] == [0.0] * 5
    warm = Loop(tiny, tiny_folder, learner(algorithm="sft"), exact)
    for _ in range(8):
        warm.learn(warm.answers("b2c!"), 1e-3)
    warm.trainer.save_state("run", tmp_path, "tiny", tiny_folder)
    first, last = risen(Loop(tiny, tiny_folder, reinforced, exact, start=tmp_path), 1e-3)
    assert 0.0 < first < 0.3
    assert last > 0.8
