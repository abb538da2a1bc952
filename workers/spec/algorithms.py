"""The algorithms, as a table: how each estimates advantages, what its loss is, and its defaults.

A field of ``RLConfig`` that is left out takes the algorithm's default. One that the algorithm would ignore is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

AlgorithmName = Literal[
    "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "cispo", "ppo", "sft", "dpo"
]
Average = Literal["token", "sequence", "constant"]

#: By what a sample is compared: its group's mean, the others of its group, nothing, a learned value.
Baseline = Literal["group", "leave_one_out", "none", "value"]
#: Over what the deviation is taken where advantages are normalized.
Scope = Literal["group", "batch"]
#: Of what the probability ratio is: a token; a sequence's geometric mean over tokens; a whole sequence.
Ratio = Literal["token", "sequence_mean", "sequence"]
#: clip: PPO's pessimistic minimum. cut: the ratio is cut and not differentiated (CISPO).
Objective = Literal["clip", "cut", "likelihood", "preference"]


@dataclass(frozen=True)
class Algorithm:
    """``defaults`` and ``ignores`` are dotted fields of ``RLConfig``; ``papers`` are links."""

    name: AlgorithmName
    title: str
    papers: tuple[str, ...]
    objective: Objective
    baseline: Baseline = "group"
    scope: Scope = "group"
    ratio: Ratio = "token"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ignores: frozenset[str] = frozenset()

    @property
    def rolls_out(self) -> bool:
        """Whether it samples from the model; others learn from what the data say."""
        return self.objective in ("clip", "cut")

    @property
    def compares_in_group(self) -> bool:
        return self.baseline in ("group", "leave_one_out")


#: What most share; PPO's clip range is that of https://arxiv.org/abs/1707.06347.
_CLIP = {"loss.clip_low": 0.2, "loss.clip_high": 0.2}
_PLAIN = {
    "sampling_rounds": 1,
    "overlong_buffer": 0,
    "normalize_advantage": True,
    "loss.average": "token",
}
_VALUE = frozenset({"value"})
_BASELINE = frozenset({"group_baseline"})
_PAIRS = frozenset({"loss.dpo_beta"})
#: What only algorithms that sample have.
_SAMPLING = frozenset(
    {"mode", "environment", "grader", "normalize_advantage", "group_baseline", "mask_truncated"}
    | {"overlong_buffer", "overlong_penalty", "sampling_rounds", "max_grade_errors", "max_idle_steps"}
    | {"sampling.temperature", "sampling.stop", "sample_groups", "value", "group_size"}
    | {"loss.clip_low", "loss.clip_high", "loss.dual_clip", "loss.kl_beta", "loss.kl_estimator"}
    | {"loss.kl_in", "loss.entropy_coef", "loss.importance", "loss.importance_cap"}
)

ALGORITHMS: Mapping[AlgorithmName, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(
            name="grpo",
            title="GRPO: group relative policy optimization",
            papers=("https://arxiv.org/abs/2402.03300",),
            objective="clip",
            defaults=_PLAIN | _CLIP | {"loss.average": "sequence"},
            ignores=_PAIRS | _VALUE | _BASELINE,
        ),
        Algorithm(
            name="dr_grpo",
            title="Dr. GRPO: GRPO without its biases of length and difficulty",
            papers=("https://arxiv.org/abs/2503.20783",),
            objective="clip",
            defaults=_PLAIN | _CLIP | {"normalize_advantage": False, "loss.average": "constant"},
            ignores=_PAIRS | _VALUE | _BASELINE,
        ),
        Algorithm(
            name="dapo",
            title="DAPO: clip-higher, dynamic sampling, token mean, soft overlong penalty",
            papers=("https://arxiv.org/abs/2503.14476",),
            objective="clip",
            defaults=_PLAIN
            | {"sampling_rounds": 3, "overlong_buffer": None, "loss.clip_low": 0.2, "loss.clip_high": 0.28},
            ignores=_PAIRS | _VALUE | _BASELINE,
        ),
        Algorithm(
            name="rloo",
            title="RLOO: REINFORCE with a leave-one-out baseline",
            papers=("https://arxiv.org/abs/2402.14740",),
            objective="clip",
            baseline="leave_one_out",
            scope="batch",
            ratio="sequence",
            defaults=_PLAIN | _CLIP | {"normalize_advantage": False, "loss.average": "sequence"},
            ignores=_PAIRS | _VALUE | _BASELINE,
        ),
        Algorithm(
            name="reinforce_pp",
            title="REINFORCE++: advantages normalized over the whole batch",
            papers=("https://arxiv.org/abs/2501.03262",),
            objective="clip",
            baseline="none",
            scope="batch",
            defaults=_PLAIN | _CLIP | {"group_baseline": False},
            ignores=_PAIRS | _VALUE,
        ),
        Algorithm(
            name="gspo",
            title="GSPO: ratio and clip of whole sequences",
            papers=("https://arxiv.org/abs/2507.18071",),
            objective="clip",
            ratio="sequence_mean",
            defaults=_PLAIN | {"loss.clip_low": 3e-4, "loss.clip_high": 4e-4, "loss.average": "sequence"},
            ignores=_PAIRS | _VALUE | _BASELINE,
        ),
        Algorithm(
            name="cispo",
            title="CISPO: the cut importance ratio as a weight",
            papers=("https://arxiv.org/abs/2506.13585",),
            objective="cut",
            # A ratio of 5 at most, as in https://arxiv.org/abs/2510.13786.
            defaults=_PLAIN | {"loss.clip_high": 4.0},
            ignores=_PAIRS | _VALUE | _BASELINE | {"loss.clip_low", "loss.dual_clip"},
        ),
        Algorithm(
            name="ppo",
            title="PPO: a learned value and generalized advantage estimation",
            papers=("https://arxiv.org/abs/1707.06347", "https://arxiv.org/abs/1506.02438"),
            objective="clip",
            baseline="value",
            scope="batch",
            defaults=_PLAIN | _CLIP,
            ignores=_PAIRS | _BASELINE,
        ),
        Algorithm(
            name="sft",
            title="SFT: supervised fine-tuning on the data's own completions",
            papers=("https://arxiv.org/abs/2203.02155",),
            objective="likelihood",
            defaults={"loss.average": "token"},
            ignores=_SAMPLING | _PAIRS,
        ),
        Algorithm(
            name="dpo",
            title="DPO: preferred completions against others",
            papers=("https://arxiv.org/abs/2305.18290",),
            objective="preference",
            defaults={"loss.dpo_beta": 0.1},
            ignores=_SAMPLING | {"loss.average"},
        ),
    )
}
