"""How a job trains: ``RLConfig``, every default written down or taken from the algorithm's table.

A configuration is resolved when it is made: what was left out stands in it afterwards, and what the algorithm
ignores stays at its default. Dumped and read again it is the same.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from workers.spec.algorithms import ALGORITHMS, Algorithm, AlgorithmName, Average
from workers.spec.base import Strict

#: Completions stored per step, at most.
MAX_SAMPLES = 512


class Sampling(Strict):
    temperature: float = Field(
        1.0, ge=0.01, le=2, description="also the temperature of the trained log-probs"
    )
    max_tokens: int = Field(64, ge=1, le=32_768, description="longest completion, in tokens")
    stop: tuple[str, ...] = Field((), max_length=4, description="texts that end a completion")

    @field_validator("stop")
    @classmethod
    def _stop_not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(text == "" for text in value):
            raise ValueError("an empty stop text would end every completion at once")
        return value


class LoRA(Strict):
    type: Literal["lora"] = "lora"
    rank: int = Field(16, ge=1, le=256)
    alpha: float = Field(32.0, gt=0, le=1024, description="the adapter is scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of the adapter's inputs dropped in training")
    targets: tuple[
        Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], ...
    ] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="the linear layers that get an adapter",
    )

    @field_validator("targets")
    @classmethod
    def _targets_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError("a target is named twice")
        return value


class FullFineTuning(Strict):
    type: Literal["full"] = "full"


Tuning = Annotated[LoRA | FullFineTuning, Field(discriminator="type")]

#: By what is trained: of reinforcement learning, and of the algorithms that have rates of their own.
LEARNING_RATES: dict[str, dict[str, float]] = {
    "rl": {"lora": 1e-3, "full": 1e-5},
    "sft": {"lora": 2e-4, "full": 1e-5},
    "dpo": {"lora": 5e-5, "full": 1e-6},
}


def default_learning_rate(algorithm: str, tuning: str) -> float:
    return LEARNING_RATES.get(algorithm, LEARNING_RATES["rl"])[tuning]


class Optimizer(Strict):
    """AdamW with a warm-up and a schedule over the job's optimizer steps."""

    learning_rate: float | None = Field(
        None, gt=0, le=1, description="peak rate; left out, 1e-3 for LoRA and 1e-5 for full fine-tuning"
    )
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0, le=10_000, description="optimizer steps of linear warm-up")
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0, le=1e-2)
    weight_decay: float = Field(0.0, ge=0, le=1)
    max_grad_norm: float = Field(1.0, gt=0, description="the gradient is clipped to this norm")


class Loss(Strict):
    """The policy loss and what is added to it. What is left out is the algorithm's default."""

    clip_low: float | None = Field(None, gt=0, lt=1, description="a ratio is clipped below 1 minus this")
    clip_high: float | None = Field(None, gt=0, le=100, description="a ratio is clipped above 1 plus this")
    dual_clip: float | None = Field(
        None,
        gt=1,
        le=100,
        description="where the advantage is negative, a ratio counts as this at most "
        "(https://arxiv.org/abs/1912.09729); left out, as it is",
    )
    average: Average | None = Field(
        None,
        description=(
            "token: mean over all trained tokens of the update (DAPO); sequence: mean over tokens, then over "
            "sequences (GRPO); constant: sum over tokens divided by sequences x max_tokens (Dr. GRPO)"
        ),
    )
    kl_beta: float = Field(0.0, ge=0, le=10, description="weight of the penalty to the starting weights")
    kl_in: Literal["loss", "reward"] | None = Field(
        None, description="where the penalty is taken: added to the loss (default), or off the reward"
    )
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        None,
        description="of the divergence, per token (http://joschu.net/blog/kl-approx.html); "
        "left out, k3 in the loss and k1 in the reward",
    )
    entropy_coef: float = Field(
        0.0, ge=0, le=1, description="weight of the sampling distribution's entropy, a bonus"
    )
    importance: Literal["off", "cap", "mask"] | None = Field(
        None,
        description=(
            "what corrects for weights, or an engine, that sampled with other probabilities than the trainer "
            "computes before the update: nothing, their ratio cut at importance_cap, or leaving out tokens "
            "whose ratio is beyond it either way; left out, cap when asynchronous, else off"
        ),
    )
    importance_cap: float | None = Field(None, ge=1, le=100, description="largest such ratio; left out, 2")
    dpo_beta: float | None = Field(None, gt=0, le=10, description="how closely DPO holds to the start")


class Value(Strict):
    """PPO's value head: one number per token on the policy's last hidden states."""

    gamma: float = Field(1.0, gt=0, le=1, description="what a token later counts")
    lam: float = Field(0.95, ge=0, le=1, description="lambda of generalized advantage estimation")
    coef: float = Field(0.1, gt=0, le=10, description="weight of the value's loss")
    clip: float = Field(0.2, gt=0, le=100, description="a value moves by this much in an update, at most")


class Asynchronous(Strict):
    """Rollouts go on while the update of earlier ones is computed (https://arxiv.org/abs/2505.24298).

    Step k samples with weights that have seen at least the update of step ``k - 1 - max_staleness``; new
    weights are taken up in the middle of a completion.
    """

    type: Literal["async"] = "async"
    max_staleness: int = Field(1, ge=1, le=16, description="updates that sampled weights may lag behind")


class Synchronous(Strict):
    """Every step samples with the weights that all earlier updates made."""

    type: Literal["sync"] = "sync"


Mode = Annotated[Synchronous | Asynchronous, Field(discriminator="type")]


class RLConfig(Strict):
    """Everything about the run itself; each field has an effect or is refused."""

    algorithm: AlgorithmName = "grpo"
    mode: Mode = Synchronous()
    steps: int = Field(30, ge=1, le=100_000)
    prompts_per_step: int = Field(4, ge=1, le=4096, description="rows of the data per step")
    group_size: int = Field(8, ge=1, le=1024, description="samples per prompt")
    updates_per_step: int = Field(
        1, ge=1, le=64, description="optimizer steps a rollout batch is split into, by groups"
    )
    normalize_advantage: bool | None = Field(
        None,
        description="divide by the standard deviation: of the group (GRPO), or of the batch (RLOO, "
        "REINFORCE++, PPO); left out, as the algorithm's paper does",
    )
    group_baseline: bool | None = Field(
        None, description="subtract the group's mean before the batch is normalized (REINFORCE++)"
    )
    sampling_rounds: int | None = Field(
        None,
        ge=1,
        le=16,
        description="rounds of rollouts a step may take: groups that teach nothing, all their rewards being "
        "equal, are replaced by groups of other prompts (dynamic sampling, DAPO)",
    )
    mask_truncated: bool = Field(False, description="leave completions that hit max_tokens out of the loss")
    overlong_buffer: int | None = Field(
        None,
        ge=0,
        le=32_768,
        description="last tokens before max_tokens over which the reward falls (DAPO); 0: it does not",
    )
    overlong_penalty: float | None = Field(
        None, gt=0, le=100, description="by how much it has fallen at max_tokens; left out, 1"
    )
    max_grade_errors: float = Field(
        0.5, ge=0, le=1, description="the job fails when a larger part of a step's samples have no reward"
    )
    max_idle_steps: int | None = Field(
        None, ge=1, le=10_000, description="steps in a row that teach nothing after which the job is stopped"
    )
    shuffle: bool = Field(True, description="draw prompts in a seeded order instead of the file's")
    sampling: Sampling = Sampling()
    tuning: Tuning = LoRA()
    optimizer: Optimizer = Optimizer()
    loss: Loss = Loss()
    value: Value | None = Field(None, description="PPO's value head")
    micro_batch_size: int = Field(8, ge=1, le=1024, description="sequences per forward-backward pass")
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="auto: bf16 where the device computes it natively, fp32 elsewhere"
    )
    devices: int = Field(1, ge=1, le=1024, description="data-parallel workers, one device each")
    checkpoint_every: int = Field(5, ge=1, le=100_000, description="steps between checkpoints")
    keep_checkpoints: int = Field(2, ge=1, le=100, description="newest checkpoints kept; the last always is")
    sample_groups: int = Field(1, ge=0, le=64, description="groups per step whose completions are stored")

    @model_validator(mode="after")
    def _resolve(self) -> RLConfig:
        self._refuse_ignored()
        self._refuse_misfits()
        _fill(self)
        return self

    def _refuse_ignored(self) -> None:
        for path in sorted(self.method.ignores):
            if path in JOB_FIELDS:
                continue
            if _get(self, path) != _default(path):
                raise ValueError(f"{path} has no effect with algorithm {self.algorithm}")

    def _refuse_misfits(self) -> None:
        if self.updates_per_step > self.prompts_per_step:
            raise ValueError("updates_per_step exceeds prompts_per_step: an update needs at least one group")
        if self.devices > self.prompts_per_step:
            raise ValueError("devices exceeds prompts_per_step: each device needs at least one group")
        if self.method.compares_in_group and self.group_size < 2:
            raise ValueError(
                f"group_size must be at least 2 with algorithm {self.algorithm}: "
                "it compares a sample with others of its group"
            )
        if self.group_baseline and self.group_size < 2:
            raise ValueError("group_size must be at least 2 with group_baseline")
        self._refuse_idle_clips()
        self._refuse_idle_loss()
        self._refuse_idle_rounds()
        if (
            self.overlong_penalty is not None
            and _or(self.overlong_buffer, self._table("overlong_buffer")) == 0
        ):
            raise ValueError("overlong_penalty needs an overlong_buffer above 0")
        if _or(self.overlong_buffer, 0) >= self.sampling.max_tokens:
            raise ValueError("overlong_buffer must be below sampling.max_tokens")
        if self.sample_groups * self.samples_per_group > MAX_SAMPLES:
            raise ValueError(f"sample_groups x group_size exceeds {MAX_SAMPLES} stored completions a step")

    def _refuse_idle_clips(self) -> None:
        if self.updates_per_step > 1:
            return
        for name in ("clip_low", "clip_high", "dual_clip"):
            asked = getattr(self.loss, name)
            if asked is not None and asked != self._table(f"loss.{name}"):
                raise ValueError(
                    f"loss.{name} needs updates_per_step above 1: "
                    "with one update per rollout the ratio is always 1 and nothing is clipped"
                )

    def _refuse_idle_loss(self) -> None:
        loss = self.loss
        if not loss.kl_beta:
            for name in ("kl_in", "kl_estimator"):
                if getattr(loss, name) is not None:
                    raise ValueError(f"loss.{name} needs loss.kl_beta above 0")
        if self.asynchronous and loss.importance == "off":
            raise ValueError(
                "loss.importance may not be off with mode async: its samples are of older weights"
            )
        if loss.importance_cap is not None and _or(loss.importance, self._importance) == "off":
            raise ValueError("loss.importance_cap needs loss.importance cap or mask, or mode async")

    def _refuse_idle_rounds(self) -> None:
        if _or(self.sampling_rounds, 1) == 1:
            return
        if not self.method.compares_in_group:
            raise ValueError(f"sampling_rounds above 1 has no effect with algorithm {self.algorithm}")
        if self.asynchronous:
            raise ValueError("sampling_rounds above 1 needs mode sync: later steps roll out already")

    def _table(self, path: str) -> Any:
        return self.method.defaults.get(path)

    @property
    def _importance(self) -> Literal["off", "cap"]:
        return "cap" if self.asynchronous else "off"

    # ------------------------------------------------------------ reading

    @property
    def method(self) -> Algorithm:
        """What the algorithm's name stands for."""
        return ALGORITHMS[self.algorithm]

    @property
    def samples_per_group(self) -> int:
        """Trained sequences of a row: samples; of data, its one completion or its pair."""
        return {"sft": 1, "dpo": 2}.get(self.algorithm, self.group_size)

    @property
    def asynchronous(self) -> bool:
        return isinstance(self.mode, Asynchronous)

    @property
    def max_staleness(self) -> int:
        return self.mode.max_staleness if isinstance(self.mode, Asynchronous) else 0

    @property
    def learning_rate(self) -> float:
        assert self.optimizer.learning_rate is not None
        return self.optimizer.learning_rate

    @property
    def optimizer_steps(self) -> int:
        return self.steps * self.updates_per_step

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of the starting weights are needed."""
        return self.loss.kl_beta > 0 or self.algorithm == "dpo"


#: Fields of the job, not of ``RLConfig``, that an algorithm may ignore.
JOB_FIELDS = frozenset({"environment", "grader"})


def _or(value: Any, other: Any) -> Any:
    return other if value is None else value


def _get(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def _default(path: str) -> Any:
    """What a field is when it is left out, before it is resolved."""
    *outer, name = path.split(".")
    model: Any = {"loss": Loss, "sampling": Sampling}[outer[0]] if outer else RLConfig
    return model.model_fields[name].default


def _fill(config: RLConfig) -> None:
    """Write what was left out. The configuration is new: nobody has read it yet."""
    table, loss = config.method.defaults, config.loss
    top = {name: table.get(name) for name in ("normalize_advantage", "group_baseline", "sampling_rounds")}
    if config.asynchronous and config.method.rolls_out:
        # Later steps roll out already: a step cannot be made longer.
        top["sampling_rounds"] = 1
    buffer = table.get("overlong_buffer", 0 if config.method.rolls_out else None)
    if config.algorithm == "dapo" and buffer is None:
        # A fifth, as in the paper: 4,096 of 20,480 tokens.
        buffer = config.sampling.max_tokens // 5
    top["overlong_buffer"] = buffer
    if _or(config.overlong_buffer, buffer):
        top["overlong_penalty"] = 1.0
    if config.method.baseline == "value":
        top["value"] = Value()
    inner: dict[str, Any] = {
        name: table.get(f"loss.{name}") for name in ("clip_low", "clip_high", "average", "dpo_beta")
    }
    if config.method.rolls_out:
        inner["importance"] = config._importance
        if _or(loss.importance, config._importance) != "off":
            inner["importance_cap"] = 2.0
    if loss.kl_beta:
        inner["kl_in"] = "loss"
        inner["kl_estimator"] = "k1" if loss.kl_in == "reward" else "k3"
    rate = default_learning_rate(config.algorithm, config.tuning.type)
    filled: dict[str, Any] = {
        **_left_out(config, top),
        "loss": loss.model_copy(update=_left_out(loss, inner)),
        "optimizer": config.optimizer.model_copy(update=_left_out(config.optimizer, {"learning_rate": rate})),
    }
    for name, value in filled.items():
        object.__setattr__(config, name, value)


def _left_out(model: Strict, defaults: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in defaults.items() if getattr(model, name) is None}


def warmup_factor(spec: RLConfig, step: int) -> float:
    """Multiplier of the peak learning rate at 0-based optimizer step ``step``."""
    optimizer = spec.optimizer
    if step < optimizer.warmup_steps:
        return (step + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return 1.0
    done = (step - optimizer.warmup_steps) / max(1, spec.optimizer_steps - optimizer.warmup_steps)
    if optimizer.schedule == "linear":
        return max(0.0, 1.0 - done)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
