"""One job: model, data, what rewards, and how to train."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from workers.spec.base import SEED_MAX, Strict
from workers.spec.environments import Environment, RemoteEnvironment, gives_rewards
from workers.spec.graders import Grader, secrets_of
from workers.spec.rl import RLConfig

# OpenAI's bounds of a job's metadata.
MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class JobSpec(Strict):
    """What a tenant asks for, resolved: dumped and read again it is the same job."""

    model: str = Field(min_length=1, max_length=200, description="a model of the catalog")
    training_file: str = Field(
        min_length=1, max_length=200, description="an uploaded file's id or a built-in dataset's name"
    )
    grader: Grader | None = Field(
        None, description="what scores completions; may be left out where the environment gives rewards"
    )
    environment: Environment | None = Field(None, description="left out, an episode is one completion")
    start_from: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="a checkpoint to start with, of a job over the same model with the same kind of tuning",
    )
    rl: RLConfig = RLConfig()
    seed: int = Field(0, ge=0, le=SEED_MAX)
    suffix: str | None = Field(None, min_length=1, max_length=64)
    metadata: dict[MetadataKey, MetadataValue] = Field(default_factory=dict, max_length=16)

    @model_validator(mode="after")
    def _fits_together(self) -> JobSpec:
        if not self.rl.method.rolls_out:
            for name in ("grader", "environment"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} has no effect with algorithm {self.rl.algorithm}")
        elif self.grader is None and (self.environment is None or not gives_rewards(self.environment)):
            raise ValueError("grader is missing: nothing else gives a reward")
        if self.environment is not None and self.environment.turn_tokens > self.rl.sampling.max_tokens:
            raise ValueError(
                "environment.turn_tokens exceeds rl.sampling.max_tokens, which bounds the episode"
            )
        return self

    @property
    def secrets(self) -> set[str]:
        """The names of the organization's secrets that the job needs."""
        needed = set() if self.grader is None else secrets_of(self.grader)
        if isinstance(self.environment, RemoteEnvironment):
            needed.add(self.environment.secret)
        return needed
