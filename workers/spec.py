"""The job's contract: what a tenant may ask for, with every default written down.

Web, scheduler and workers import this module; it imports pydantic only. ``JobSpec`` is what a tenant
sends; the same object, dumped, is the resolved configuration that is stored, shown, and sufficient to
run the job again. A field that would have no effect is refused rather than ignored.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

TEMPLATE = re.compile(r"\{\{\s*([a-zA-Z0-9_.\[\]]+)\s*\}\}")
SEED_MAX = 2**31 - 1
#: Completions stored per step, at most.
MAX_SAMPLES = 512


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class StringCheckGrader(Strict):
    """1.0 when ``input`` stands in the relation ``operation`` to ``reference``, else 0.0."""

    type: Literal["string_check"]
    name: str = Field("string_check", min_length=1, max_length=64)
    input: str = "{{sample.output_text}}"
    reference: str
    operation: Literal["eq", "ne", "like", "ilike"] = "eq"


class TextSimilarityGrader(Strict):
    """Similarity of ``input`` to ``reference`` in [0, 1] (``fuzzy_match``: normalized edit similarity)."""

    type: Literal["text_similarity"]
    name: str = Field("text_similarity", min_length=1, max_length=64)
    input: str = "{{sample.output_text}}"
    reference: str
    evaluation_metric: Literal["fuzzy_match"] = "fuzzy_match"


class MathGrader(Strict):
    """1.0 when the answer in ``input`` equals ``reference`` as mathematics (math-verify), else 0.0."""

    type: Literal["math"]
    name: str = Field("math", min_length=1, max_length=64)
    input: str = "{{sample.output_text}}"
    reference: str


class PythonGrader(Strict):
    """A tenant's ``def grade(sample, item) -> float``, run in a sandboxed process with a time limit."""

    type: Literal["python"]
    name: str = Field("python", min_length=1, max_length=64)
    source: str = Field(min_length=1, max_length=256 * 1024)
    timeout_s: float = Field(10.0, gt=0, le=60, description="wall-clock limit of one grade, in seconds")


Grader = Annotated[
    StringCheckGrader | TextSimilarityGrader | MathGrader | PythonGrader, Field(discriminator="type")
]


def template_fields(grader: Grader) -> set[str]:
    """The names under ``item.`` that the grader's templates read: ``{{item.answer}}`` gives ``answer``."""
    texts = [] if isinstance(grader, PythonGrader) else [grader.input, grader.reference]
    paths = (path for text in texts for path in TEMPLATE.findall(text))
    return {re.split(r"[.\[]", path.removeprefix("item."))[0] for path in paths if path.startswith("item.")}


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

DEFAULT_LEARNING_RATE = {"lora": 1e-3, "full": 1e-5}


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
    """The clipped policy-gradient loss (PPO, https://arxiv.org/abs/1707.06347) and its KL penalty."""

    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0, le=10)
    kl_beta: float = Field(0.0, ge=0, le=10, description="weight of the k3 penalty to the starting weights")

    average: Literal["token", "sequence", "constant"] = Field(
        "token",
        description=(
            "token: mean over all trained tokens of the update (DAPO); sequence: mean over tokens, then over "
            "sequences (GRPO); constant: sum over tokens divided by sequences x max_tokens (Dr. GRPO)"
        ),
    )

    importance_cap: float = Field(
        2.0,
        ge=1,
        le=100,
        description=(
            "asynchronous: the ratio of a token's probability when trained to that when sampled is cut here"
        ),
    )

    @property
    def clips_otherwise(self) -> bool:
        """Whether a clip range was asked for that is not the default."""
        return (self.clip_low, self.clip_high) != (0.2, 0.2)


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


class GuessingGame(Strict):
    """A secret number in several turns: each guess is answered by "higher" or "lower".

    A row of the data names the number (``number_field``). The grader reads the last turn. ``delay_s`` makes
    the game answer after so many seconds, drawn anew for each turn: tools of the world take their time.
    """

    type: Literal["guessing_game"] = "guessing_game"
    number_field: str = Field("number", min_length=1, max_length=64)
    max_turns: int = Field(4, ge=1, le=32)
    turn_tokens: int = Field(16, ge=1, le=4096, description="longest turn of the model, in tokens")
    delay_s: tuple[float, float] = Field((0.0, 0.0), description="shortest and longest wait for an answer")

    @field_validator("delay_s")
    @classmethod
    def _delay_in_order(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 <= value[0] <= value[1] <= 60:
            raise ValueError("needs 0 <= shortest <= longest <= 60 seconds")
        return value


Environment = Annotated[GuessingGame, Field()]


class RLConfig(Strict):
    """Everything about the run itself; each field has an effect."""

    algorithm: Literal["grpo"] = "grpo"
    mode: Mode = Synchronous()
    steps: int = Field(30, ge=1, le=100_000)
    prompts_per_step: int = Field(4, ge=1, le=4096)
    group_size: int = Field(
        8, ge=2, le=1024, description="samples per prompt; a group of one has no baseline"
    )
    updates_per_step: int = Field(
        1, ge=1, le=64, description="optimizer steps a rollout batch is split into, by groups"
    )
    normalize_advantage: bool = Field(
        True, description="divide by the group's standard deviation (GRPO); off, only subtract its mean"
    )
    mask_truncated: bool = Field(False, description="leave completions that hit max_tokens out of the loss")
    shuffle: bool = Field(True, description="draw prompts in a seeded order instead of the file's")
    sampling: Sampling = Sampling()
    tuning: Tuning = LoRA()
    optimizer: Optimizer = Optimizer()
    loss: Loss = Loss()
    micro_batch_size: int = Field(8, ge=1, le=1024, description="sequences per forward-backward pass")
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="auto: bf16 where the device computes it natively, fp32 elsewhere"
    )
    devices: int = Field(1, ge=1, le=1024, description="data-parallel workers, one device each")
    checkpoint_every: int = Field(5, ge=1, le=100_000, description="steps between checkpoints")
    keep_checkpoints: int = Field(2, ge=1, le=100, description="newest checkpoints kept; the last always is")
    sample_groups: int = Field(1, ge=0, le=64, description="groups per step whose completions are stored")

    @model_validator(mode="after")
    def _fits_together(self) -> RLConfig:
        if self.updates_per_step > self.prompts_per_step:
            raise ValueError("updates_per_step exceeds prompts_per_step: an update needs at least one group")
        if self.devices > self.prompts_per_step:
            raise ValueError("devices exceeds prompts_per_step: each device needs at least one group")
        if self.updates_per_step == 1 and self.loss.clips_otherwise:
            raise ValueError(
                "loss.clip_low and loss.clip_high need updates_per_step above 1: "
                "with one update per rollout the ratio is always 1 and nothing is clipped"
            )
        if not self.asynchronous and self.loss.importance_cap != 2.0:
            raise ValueError(
                "loss.importance_cap needs mode async: synchronous steps train what the same weights sampled"
            )
        if self.sample_groups * self.group_size > MAX_SAMPLES:
            raise ValueError(f"sample_groups x group_size exceeds {MAX_SAMPLES} stored completions a step")
        return self

    def resolved(self) -> RLConfig:
        """The same configuration with the defaults that depend on other fields filled in."""
        if self.optimizer.learning_rate is not None:
            return self
        rate = DEFAULT_LEARNING_RATE[self.tuning.type]
        return self.model_copy(
            update={"optimizer": self.optimizer.model_copy(update={"learning_rate": rate})}
        )

    @property
    def asynchronous(self) -> bool:
        return isinstance(self.mode, Asynchronous)

    @property
    def max_staleness(self) -> int:
        return self.mode.max_staleness if isinstance(self.mode, Asynchronous) else 0

    @property
    def learning_rate(self) -> float:
        rate = self.resolved().optimizer.learning_rate
        assert rate is not None
        return rate

    @property
    def optimizer_steps(self) -> int:
        return self.steps * self.updates_per_step


# OpenAI's bounds of a job's metadata.
MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class JobSpec(Strict):
    """One job: model, data, grader, and how to train."""

    model: str = Field(min_length=1, max_length=200, description="a model of the catalog")
    training_file: str = Field(
        min_length=1, max_length=200, description="an uploaded file's id or a built-in dataset's name"
    )
    grader: Grader
    environment: Environment | None = Field(None, description="left out, an episode is one completion")
    rl: RLConfig = RLConfig()
    seed: int = Field(0, ge=0, le=SEED_MAX)
    suffix: str | None = Field(None, min_length=1, max_length=64)
    metadata: dict[MetadataKey, MetadataValue] = Field(default_factory=dict, max_length=16)

    @model_validator(mode="after")
    def _episode_fits(self) -> JobSpec:
        if self.environment is not None and self.environment.turn_tokens > self.rl.sampling.max_tokens:
            raise ValueError(
                "environment.turn_tokens exceeds rl.sampling.max_tokens, which bounds the episode"
            )
        return self

    def resolved(self) -> JobSpec:
        return self.model_copy(update={"rl": self.rl.resolved()})


def first_error(error: Any) -> tuple[str, str]:
    """The dotted field path and the reason of a pydantic ``ValidationError``'s first entry."""
    entry = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in entry["loc"] if not _is_union_tag(part))
    return path, entry["msg"].removeprefix("Value error, ")


def _is_union_tag(part: object) -> bool:
    """Pydantic puts the discriminator's value into the path; a reader looks for fields only."""
    return part in {"string_check", "text_similarity", "math", "python", "lora", "full", "sync", "async"}


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
