"""How much of a device's memory a job needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from scheduler.core.graph import staleness
from scheduler.core.interference import THIN_BATCH
from scheduler.core.state import Mode
from scheduler.sim.devices import Footprint, footprint
from scheduler.sim.measured import Sampled
from scheduler.sim.models import ModelCost
from scheduler.sim.scenario import SimJob
from scheduler.sim.truth import turn_tokens
from scheduler.sim.workloads import Workload, representative

#: Room in the KV cache above what is expected: adjacent steps of the logs differ by up to a fifth.
HEADROOM = 1.2


def memory(job: SimJob, cost: ModelCost) -> Footprint:
    """Bytes on each of the job's devices: what the fullest of them needs at once.

    Synchronous and colocated jobs were measured with offload: the cache is gone while they train, and
    gradients, masters and moments are on the host while they roll out. With streaming the last sequences are
    still there when training begins. Rollouts that run ahead of the weights need all of both on the same
    device; disaggregated, no device has both.
    """
    own = cost.architecture
    cache_bytes = kv_tokens(job.workload, job.workers) * own.kv_bytes_per_token
    training = footprint(cost, len(job.shape.train_workers), 0)
    run = max(cache_bytes, training.run_bytes)
    if job.layout == "disaggregated":
        return Footprint(own.weights_bytes, run)
    if staleness(job.shape) > 0:
        return replace(training, run_bytes=cache_bytes + training.run_bytes)
    if job.mode is Mode.STREAM:
        last = min(cache_bytes, last_tokens(job.workload) * own.kv_bytes_per_token)
        run = max(run, last + training.run_bytes)
    return replace(training, run_bytes=run)


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
    return THIN_BATCH * longest


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
