"""The whole loop without a cluster: sample, grade, estimate, train, sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from workers.engines.engine import TorchEngine
from workers.engines.sequences import Request, Rollout
from workers.engines.weights import Weights
from workers.models.chat import ChatTokenizer
from workers.rl.advantages import Outcome, estimate
from workers.rl.batching import Batch, denominator, micro_batches, split_updates
from workers.spec import RLConfig
from workers.train.trainer import TorchTrainer

GROUPS, SAMPLES, LENGTH = 4, 16, 4


def learner(**changes: Any) -> RLConfig:
    settings: dict[str, Any] = {"prompts_per_step": GROUPS}
    changes["sampling"] = {"max_tokens": LENGTH} | changes.get("sampling", {})
    if changes.get("algorithm") not in ("sft", "dpo"):
        settings["group_size"] = SAMPLES
    return RLConfig.model_validate(settings | changes)


class Loop:
    """A run on the tiny model; ``reward`` takes a completion's text."""

    def __init__(
        self,
        weights: Weights,
        folder: Path,
        spec: RLConfig,
        reward: Callable[[str], float],
        start: Path | None = None,
    ) -> None:
        self.spec, self.reward = spec, reward
        self.tokenizer = ChatTokenizer(folder)
        self.engine, self.trainer = TorchEngine(weights, self.tokenizer), TorchTrainer(weights)
        self.trainer.open("run", spec, 0, start)
        self.engine.open("run")
        self.prompts = [
            tuple(self.tokenizer.encode_chat([{"role": "user", "content": f"answer {group}"}]))
            for group in range(GROUPS)
        ]
        self.version = 0

    # ------------------------------------------------------------ sampling

    def sample(self) -> list[Rollout]:
        tensors = self.trainer.adapter("run")
        if self.spec.tuning.type == "lora":
            self.engine.load_adapter("run", self.version, tensors, self.trainer.scaling("run"))
        else:
            self.engine.load_weights("run", self.version, tensors)
        self.version += 1
        self.engine.submit(
            [
                Request(
                    "run",
                    (group, sample),
                    prompt,
                    LENGTH,
                    (0, self.version, group, sample),
                    temperature=self.spec.sampling.temperature,
                )
                for group, prompt in enumerate(self.prompts)
                for sample in range(SAMPLES)
            ]
        )
        return sorted(self.engine.decode().finished, key=lambda rollout: rollout.request.key)

    def rewards(self, rollouts: Sequence[Rollout]) -> list[float]:
        return [self.reward(self.tokenizer.decode(rollout.tokens)) for rollout in rollouts]

    def mean_reward(self) -> float:
        rewards = self.rewards(self.sample())
        return sum(rewards) / len(rewards)

    # ------------------------------------------------------------ learning from samples

    def step(self, rate: float) -> float:
        """One step of reinforcement learning; the mean reward that it learned from."""
        rollouts = self.sample()
        rewards = self.rewards(rollouts)
        self.update(self._with_advantages(self._batch(rollouts), rewards), rate)
        return sum(rewards) / len(rewards)

    def _batch(self, rollouts: Sequence[Rollout]) -> Batch:
        return Batch(
            groups=[rollout.request.key[0] for rollout in rollouts],
            prompts=[rollout.request.prompt for rollout in rollouts],
            completions=[tuple(rollout.tokens) for rollout in rollouts],
            engine_logprobs=[rollout.logprobs for rollout in rollouts],
            advantages=[[0.0] * len(rollout.tokens) for rollout in rollouts],
            keep=[True] * len(rollouts),
        )

    def _with_advantages(self, batch: Batch, rewards: Sequence[float]) -> Batch:
        spec, trainer = self.spec, self.trainer
        batch = batch.with_logprobs(
            old=trainer.logprobs("run", batch),
            reference=trainer.logprobs("run", batch, reference=True) if spec.needs_reference else None,
        )
        values = trainer.values("run", batch) if spec.value is not None else None
        found = estimate(
            spec,
            [
                Outcome(
                    group,
                    rewards[index],
                    batch.sampled[index],
                    kl=self._divergence(batch, index),
                    values=None if values is None else values[index],
                )
                for index, group in enumerate(batch.groups)
            ],
        )
        return replace(batch, advantages=found.advantages, values=values, returns=found.returns)

    def _divergence(self, batch: Batch, index: int) -> list[float] | None:
        if self.spec.loss.kl_in != "reward":
            return None
        assert batch.old_logprobs is not None and batch.reference_logprobs is not None
        pairs = zip(batch.old_logprobs[index], batch.reference_logprobs[index], strict=True)
        return [old - reference for old, reference in pairs]

    # ------------------------------------------------------------ learning from data

    def answers(self, *texts: str) -> Batch:
        """Each prompt with each of the completions."""
        completions = [tuple(self.tokenizer.encode(text)) for text in texts]
        rows = [(group, tokens) for group in range(GROUPS) for tokens in completions]
        numbers = [[0.0] * len(tokens) for _, tokens in rows]
        return Batch(
            groups=[group for group, _ in rows],
            prompts=[self.prompts[group] for group, _ in rows],
            completions=[tokens for _, tokens in rows],
            engine_logprobs=numbers,
            advantages=numbers,
            keep=[True] * len(rows),
        )

    def learn(self, batch: Batch, rate: float) -> None:
        if self.spec.needs_reference:
            batch = batch.with_logprobs(reference=self.trainer.logprobs("run", batch, reference=True))
        self.update(batch, rate)

    def update(self, batch: Batch, rate: float) -> None:
        for part in split_updates(batch, self.spec.updates_per_step):
            for micro in micro_batches(part, 64, pairs=self.spec.algorithm == "dpo"):
                self.trainer.forward_backward("run", micro)
            self.trainer.optim_step("run", rate, denominator(part, LENGTH))
