"""What a step of a job is expected to be before one was seen: from its settings and measured rates. Pure.

Completions are taken to end evenly over their longest length, so that the batch shrinks along a line. The
parts are those of ``workers.chain``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from scheduler.core.state import Kind, Mode, Outlook, Segment, Shape
from workers.chain import DECODE, TOOL, part_floor, rollout_chain, train_chain
from workers.protocol import Rates, SubStageKind
from workers.spec import GuessingGame, JobSpec, OwnEnvironment, RemoteEnvironment, Tools

#: Upper quartile over median of a first guess.
LATE = 1.3
#: The slowest of a step's answers of a tool, or of a tenant's world, in seconds.
ANSWER_S = 1.0
#: Grading of a step, seconds.
GRADE_S = 0.1
#: The part of an update that is done while others of its step still roll out, where it streams.
EARLY_PART = 0.5


def shape(spec: JobSpec, streams: bool) -> Shape:
    workers = tuple(range(spec.rl.devices))
    if not spec.rl.method.rolls_out:
        return Shape((), workers, Mode.SYNC)
    if spec.rl.asynchronous:
        return Shape(workers, workers, Mode.ASYNC, spec.rl.max_staleness)
    return Shape(workers, workers, Mode.STREAM if streams else Mode.SYNC)


def prior(spec: JobSpec, rates: Rates, saturation: int, prompt_tokens: int, streams: bool) -> Outlook:
    """``prompt_tokens`` is the mean of the data's rows, ``saturation`` the batch from which decode is a
    DECODE.
    """
    sequences = sequences_per_worker(spec)
    rollout = tuple(_rollout(spec, rates, saturation, prompt_tokens, sequences))
    trained = _trained_tokens(spec, prompt_tokens, sequences)
    seconds = {
        SubStageKind.GRADE: GRADE_S,
        SubStageKind.LOGPROB: trained * rates.logprob_s,
        SubStageKind.UPDATE: trained * rates.update_s,
        SubStageKind.SYNC: rates.sync_s,
    }
    train = []
    for place, kind in enumerate(train_chain(spec, streams)):
        expected = seconds[kind]
        if streams and kind is SubStageKind.UPDATE:
            expected *= EARLY_PART if place == 0 else 1 - EARLY_PART
        train.append(Segment(Kind(kind.value), expected, expected * LATE, early=streams and place == 0))
    return Outlook(rollout, tuple(train))


def sequences_per_worker(spec: JobSpec) -> int:
    """Whole groups go to a worker; the most that one has."""
    return math.ceil(spec.rl.prompts_per_step / spec.rl.devices) * spec.rl.samples_per_group


def _trained_tokens(spec: JobSpec, prompt_tokens: int, sequences: int) -> float:
    """A worker's; a group's prompt is computed once. Where nothing is sampled, the data's rows hold all."""
    groups = sequences // spec.rl.samples_per_group
    sampled = sequences * length(spec) / 2 if spec.rl.method.rolls_out else 0.0
    return groups * prompt_tokens + sampled


def length(spec: JobSpec) -> int:
    """The most tokens that are sampled of one sequence."""
    longest, game = spec.rl.sampling.max_tokens, spec.environment
    return longest if game is None else min(longest, game.max_turns * game.turn_tokens)


def _rollout(
    spec: JobSpec, rates: Rates, saturation: int, prompt_tokens: int, sequences: int
) -> Iterator[Segment]:
    upper = sequences
    for part, kind in enumerate(rollout_chain(spec)):
        if kind is SubStageKind.PREFILL:
            # A group's prompt is computed once.
            tokens = sequences // spec.rl.samples_per_group * prompt_tokens
            seconds = tokens * rates.prefill_s
            yield Segment(Kind.PREFILL, seconds, seconds * LATE, sequences, tokens=tokens)
        elif part == TOOL:
            seconds = _tools_s(spec)
            yield Segment(Kind.TOOL, seconds, seconds * LATE, sequences)
        else:
            if part > DECODE:
                upper = min(upper, saturation - 1)
            floor = part_floor(part, saturation)
            yield _decode(Kind(kind.value), rates, upper, floor, length(spec) / sequences)
            upper = min(upper, floor)


def _decode(kind: Kind, rates: Rates, upper: int, floor: int, steps_each: float) -> Segment:
    """While from ``upper`` to just above ``floor`` run; each that ends takes ``steps_each`` forwards."""
    ending = max(0, upper - floor)
    if not ending:
        return Segment(kind, 0.0, batch=0)
    forward = rates.decode_floor_s + rates.decode_row_s * (upper + floor + 1) / 2
    seconds = ending * steps_each * forward
    return Segment(kind, seconds, seconds * LATE, upper, forward, min(forward, rates.decode_floor_s))


def _tools_s(spec: JobSpec) -> float:
    """Between two turns all of a worker's sequences wait for the slowest answer."""
    match spec.environment:
        case None:
            return 0.0
        case GuessingGame() as game:
            return (game.max_turns - 1) * game.delay_s[1]
        case Tools() | OwnEnvironment() | RemoteEnvironment() as world:
            return (world.max_turns - 1) * ANSWER_S
        case _:
            return 0.0
