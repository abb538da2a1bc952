"""The chains of sub-stages that a step of a job is made of: what pipelines offer and schedulers predict.

A rollout worker goes through its chain once a step, or, in an environment, again after each wait for tools.
Parts that do not occur are passed over. Batches are named by their running sequences:

    DECODE   from the device's saturation batch up
    TAIL     below it; again below 32, and below 8: each time, moving what is left costs less

Training is one chain for all workers together.
"""

from __future__ import annotations

from workers.protocol import SubStageKind
from workers.spec import JobSpec

#: Running batches at which a tail passes into the next part.
TAIL_BOUNDS = (32, 8)

PREFILL, DECODE, TOOL = 0, 1, 5


def rollout_chain(spec: JobSpec) -> tuple[SubStageKind, ...]:
    """Empty where the data themselves say what is learned."""
    if not spec.rl.method.rolls_out:
        return ()
    kinds = (SubStageKind.PREFILL, SubStageKind.DECODE, *[SubStageKind.TAIL] * 3)
    return (*kinds, SubStageKind.TOOL) if spec.environment is not None else kinds


def rollout_part(running: int, saturation: int) -> int:
    """The part in which so many sequences decode."""
    if running >= saturation:
        return DECODE
    return 2 + sum(running < bound for bound in TAIL_BOUNDS)


def part_floor(part: int, saturation: int) -> int:
    """The part of DECODE or TAIL is over when so many or fewer sequences run."""
    if part == DECODE:
        return saturation - 1
    return (*(bound - 1 for bound in TAIL_BOUNDS), 0)[part - 2]


def train_chain(spec: JobSpec, streams: bool) -> tuple[SubStageKind, ...]:
    """Streaming, an early UPDATE comes first: on finished groups, while others roll out.

    Without rollouts there is nothing to grade, and no engine that takes the weights.
    """
    kinds = (SubStageKind.UPDATE,)
    if needs_logprobs(spec):
        kinds = (SubStageKind.LOGPROB, *kinds)
    if spec.rl.method.rolls_out:
        kinds = (SubStageKind.GRADE, *kinds, SubStageKind.SYNC)
    return (SubStageKind.UPDATE, *kinds) if streams else kinds


def needs_old_logprobs(spec: JobSpec) -> bool:
    """Log-probs of the weights before the step's first update: what several updates a rollout are compared
    with, and what a penalty in the reward is made of.
    """
    rl = spec.rl
    return rl.method.rolls_out and (rl.updates_per_step > 1 or rl.loss.kl_in == "reward")


def needs_values(spec: JobSpec) -> bool:
    """What the value head expects of each token, before the step's first update."""
    return spec.rl.method.baseline == "value"


def needs_logprobs(spec: JobSpec) -> bool:
    """Whether something must be computed of all of a step before its first update."""
    return needs_old_logprobs(spec) or spec.rl.needs_reference or needs_values(spec)


def may_stream(spec: JobSpec) -> bool:
    """Whether its update can be summed up from groups as they finish, and changes nothing for those that
    still roll out: no advantage depends on another group, and no group is replaced.
    """
    rl = spec.rl
    apart = rl.method.compares_in_group and (rl.method.scope == "group" or not rl.normalize_advantage)
    return (
        rl.method.rolls_out
        and apart
        and rl.sampling_rounds == 1
        and not needs_logprobs(spec)
        and not rl.asynchronous
    )
