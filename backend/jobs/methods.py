"""OpenAI's fine-tuning methods, and which of our algorithms and fields they mean.

    reinforcement  a grader and hyperparameters; any algorithm that samples
    supervised     ``sft``
    dpo            ``dpo``

Said twice, by a method's name and by ours in ``rl``, they must agree. Pure.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from backend.common.errors import InvalidRequest
from workers.spec import ALGORITHMS, Strict

REINFORCEMENT, SUPERVISED, DPO = "reinforcement", "supervised", "dpo"
GRADER_PATH = "method.reinforcement.grader"

#: Methods that are an algorithm of their own.
ALGORITHM_OF = {SUPERVISED: "sft", DPO: "dpo"}
METHOD_OF = {algorithm: method for method, algorithm in ALGORITHM_OF.items()}


def _auto(value: object) -> object:
    return None if value == "auto" else value


class Hyperparameters(Strict):
    """``auto`` leaves the choice to the defaults."""

    batch_size: Annotated[PositiveInt | None, BeforeValidator(_auto)] = None
    learning_rate: Annotated[PositiveFloat | None, BeforeValidator(_auto)] = None
    learning_rate_multiplier: Annotated[PositiveFloat | None, BeforeValidator(_auto)] = None
    n_epochs: Annotated[PositiveInt | None, BeforeValidator(_auto)] = None


class PreferenceHyperparameters(Hyperparameters):
    beta: Annotated[PositiveFloat | None, BeforeValidator(_auto)] = None


class Reinforcement(Strict):
    """``grader`` null: none, for an environment that gives rewards itself. Left out: the data's own."""

    grader: dict[str, Any] | None = None
    hyperparameters: Hyperparameters = Hyperparameters()


class Supervised(Strict):
    hyperparameters: Hyperparameters = Hyperparameters()


class Preference(Strict):
    hyperparameters: PreferenceHyperparameters = PreferenceHyperparameters()


class Method(Strict):
    type: Literal["reinforcement", "supervised", "dpo"]
    reinforcement: Reinforcement | None = Field(None)
    supervised: Supervised | None = None
    dpo: Preference | None = None

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Of the method that was chosen."""
        chosen: Reinforcement | Supervised | Preference | None = getattr(self, self.type)
        return Hyperparameters() if chosen is None else chosen.hyperparameters


#: Hyperparameters of OpenAI's that name fields of ours.
SAME_AS = {
    "batch_size": ("prompts_per_step",),
    "learning_rate": ("optimizer", "learning_rate"),
    "beta": ("loss", "dpo_beta"),
}


def method_of(algorithm: str) -> str:
    """The method that the algorithm belongs to."""
    return METHOD_OF.get(algorithm, REINFORCEMENT)


def algorithm_of(method: Method | None, asked: Any) -> Any:
    """The algorithm of a request that says ``asked`` under ``rl``; None: it says nothing.

    What is no algorithm's name stays as it is, for the spec to refuse.
    """
    if method is None:
        return asked
    refuse_idle(method)
    named = ALGORITHM_OF.get(method.type)
    if asked not in ALGORITHMS:
        return asked or named
    if method_of(asked) != method.type:
        raise InvalidRequest(
            f"rl.algorithm is {asked}, but method.type is {method.type}: algorithm {asked} belongs to method "
            f"{method_of(asked)}.",
            param="rl.algorithm",
        )
    return asked


def refuse_idle(method: Method) -> None:
    """What is said of a method that was not chosen would have no effect."""
    for name in (REINFORCEMENT, SUPERVISED, DPO):
        if name != method.type and getattr(method, name) is not None:
            raise InvalidRequest(
                f"method.{name} has no effect with method.type {method.type}.", param=f"method.{name}"
            )
