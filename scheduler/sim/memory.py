"""How much of a device's memory a job needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from scheduler.core.graph import staleness
from scheduler.core.interference import LAST_BATCH
from scheduler.core.state import Mode
from scheduler.sim.devices import footprint
from scheduler.sim.measured import Sampled
from scheduler.sim.models import ModelCost
from scheduler.sim.scenario import SimJob
from scheduler.sim.truth import turn_tokens
from scheduler.sim.workloads import Workload, representative

#: Room in the KV cache above what is expected: adjacent steps of the logs differ by up to a fifth.
HEADROOM = 1.2


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes on each of a job's devices: the weights, the KV cache, what training needs beside them, and what
    more while sequences still run.
    """

    weights_bytes: int
    run_bytes: int
    peak_bytes: int
    overlap_bytes: int = 0


def memory(job: SimJob, cost: ModelCost) -> Needs:
    """What the fullest of the job's devices needs.

    Synchronous and colocated jobs were measured with offload: the cache is gone while they train, and
    gradients, masters and moments are on the host while they roll out. With streaming the last sequences are
    still there when training begins. Rollouts that run ahead of the weights need all of both on the same
    device; disaggregated, no device has both.
    """
    own = cost.architecture
    cache_bytes = kv_tokens(job.workload, job.workers) * own.kv_bytes_per_token
    training = footprint(cost, len(job.shape.train_workers), 0)
    weights = own.weights_bytes if job.layout == "disaggregated" else training.weights_bytes
    beside = max(0, training.run_bytes - cache_bytes)
    if job.layout == "colocated" and staleness(job.shape) > 0:
        return Needs(weights, cache_bytes, training.run_bytes)
    if job.layout == "colocated" and job.mode is Mode.STREAM:
        last = min(cache_bytes, last_tokens(job.workload) * own.kv_bytes_per_token)
        return Needs(weights, cache_bytes, beside, max(0, training.run_bytes + last - cache_bytes) - beside)
    return Needs(weights, cache_bytes, beside)


@cache
def kv_tokens(workload: Workload, workers: int) -> int:
    """What the KV cache of one of so many workers must hold: the most that is expected at once, and headroom.

    Sequences that end make room; those that only end a turn stay.
    """
    own = representative(workload, -(-workload.prompts // workers) * workload.samples)
    turns = max(s.turns for s in own)
    return round(HEADROOM * max(most_in_turn(workload, own, turn) for turn in range(turns)))


def last_tokens(workload: Workload) -> int:
    """The most that a worker's last sequences hold: as many as make a thin tail, all of the most tokens."""
    longest = max(
        _context(workload, s, s.turns - 1) + turn_tokens(s, s.turns - 1)
        for s in representative(workload, workload.prompts * workload.samples)
    )
    return LAST_BATCH * longest


def most_in_turn(workload: Workload, own: Sequence[Sampled], turn: int) -> int:
    """The most tokens at once: when a sequence ends, all that run have grown by as many as it."""
    present = [s for s in own if s.turns > turn]
    rows = [(_context(workload, s, turn), turn_tokens(s, turn), s.turns > turn + 1) for s in present]
    return max(
        sum(context + min(grown, tokens) for context, tokens, stays in rows if stays or tokens >= grown)
        for grown in {tokens for _, tokens, _ in rows}
    )


def _context(workload: Workload, response: Sampled, turn: int) -> int:
    """Tokens of a sequence in the cache when its turn begins."""
    before = sum(turn_tokens(response, earlier) for earlier in range(turn))
    return workload.prompt_tokens + turn * workload.observation_tokens + before
