"""Kinds of devices: their speed, memory, price, and how their sub-stages slow each other down.

One device of a GPU pool is a tensor-parallel group of 4 GPUs, because decode and training were measured on
that. From H100 to another GPU: launch latency stays, work bound by compute goes with the bf16 peak, work
bound by memory with the bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from statistics import fmean

from scheduler.core.interference import Character, Interference
from scheduler.sim.measured import slowdowns
from scheduler.sim.models import (
    ADAPTER_PART,
    CPU_COMPUTE_GAIN,
    CPU_DECODE_GAIN,
    HOST,
    LINK_MEASURED,
    ModelCost,
    cost,
    lora,
)

GPUS_PER_DEVICE = 4


@dataclass(frozen=True)
class DeviceProfile:
    """A kind of device. ``bandwidth``, ``link`` (to the host; both bytes/s) and ``flops`` (bf16) are one
    GPU's, ``memory_bytes`` and ``price_per_hour`` (dollars) the whole device's. ``compute_scale`` and
    ``memory_scale`` multiply the times, measured elsewhere, of work bound by compute and by memory.
    """

    name: str
    gpus: int
    memory_bytes: int
    bandwidth: float
    flops: float
    price_per_hour: float
    price_source: str
    interference: Interference
    link: float = LINK_MEASURED
    compute_scale: float = 1.0
    memory_scale: float = 1.0

    def cost(self, model: str, adapters: bool = False) -> ModelCost:
        """What a model's work costs on this device; with ``adapters`` only those are trained."""
        return _cost(model, adapters, self.compute_scale, self.memory_scale)


@cache
def _cost(model: str, adapters: bool, compute: float, memory: float) -> ModelCost:
    base = cost(model)
    if adapters and not base.lora:
        base = lora(base)
    a, b, c = base.decode
    return replace(
        base,
        decode=(a, b * compute, c * memory),
        prefill=base.prefill.scaled(slope=compute),
        old_logprob=base.old_logprob.scaled(slope=compute),
        reference=base.reference.scaled(slope=compute),
        update=base.update.scaled(slope=compute),
    )


# ---------------------------------------------------------------- how sub-stages slow each other down

COMPUTE = (Character.PREFILL, Character.LOGPROB, Character.UPDATE)
SMALL = (Character.TAIL, Character.THIN)
DECODES = (Character.DECODE, *SMALL)

SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

#: Co-run factors are not public. They are what a partner costs beyond the part of the device it takes and
#: beyond the memory bus, which is counted apart. Two small batches share launch queues and caches: 5 %.
#: Beside work that keeps its part of the device busy (or a saturated decode) clocks and caches suffer more:
#: 10 %.
BESIDE_SMALL = 1.05
BESIDE_BUSY = 1.10
#: Two transfers share one link.
BESIDE_LINK = 2.0


def falling(values: Sequence[float]) -> tuple[float, ...]:
    """The nearest non-increasing row by least squares (what rises is pooled), divided by its last value."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and fmean(pools[-2]) < fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    row = [fmean(pool) for pool in pools for _ in pool]
    return tuple(value / row[-1] for value in row)


def _row(*kinds: str) -> tuple[float, ...]:
    """Mean of rows of the table at each share, and 1 for the whole device.

    1.94 for batch 64 at 90 % stands between 0.90 at 80 % and 1: a disturbed measurement, left out.
    """
    columns = zip(*(slowdowns()[kind] for kind in kinds), strict=True)
    kept = [[value for value in column if value != 1.94] for column in columns]
    return falling((*(fmean(column) for column in kept), 1.0))


def with_host(row: Iterable[float]) -> tuple[float, ...]:
    """Only the forward slows down with its share; the host's part of a decode step does not."""
    return tuple((slow + HOST - 1) / HOST for slow in row)


@cache
def gpu_interference() -> Interference:
    """Alone: the 30B model with tensor parallelism 4 of MuxServe's profile, the size of our devices.

    One table for all GPUs: these are ratios, and no profile of the newer ones is public.
    """
    prefill = _row("prefill 30b TP4 bs8")
    alone = {
        Character.THIN: with_host(_row("decode 30b TP4 bs1", "decode 30b TP4 bs8")),
        Character.TAIL: with_host(_row("decode 30b TP4 bs32", "decode 30b TP4 bs64")),
        Character.DECODE: with_host(_row("decode 30b TP4 bs128", "decode 30b TP4 bs256")),
        **dict.fromkeys(COMPUTE, prefill),
        Character.SYNC: (1.0,) * len(SHARES),
    }
    half = SHARES.index(0.5)
    # Alike and saturated: two at half the device each gain exactly nothing.
    nothing = {c: 2 / alone[c][half] for c in (Character.DECODE, *COMPUTE)}
    beside = {
        **dict.fromkeys(product(SMALL, SMALL), BESIDE_SMALL),
        **_both(SMALL, (Character.DECODE,), BESIDE_BUSY),
        **_both(DECODES, COMPUTE, BESIDE_BUSY),
        (Character.DECODE, Character.DECODE): nothing[Character.DECODE],
        **{(own, partner): nothing[own] for own, partner in product(COMPUTE, COMPUTE)},
        (Character.SYNC, Character.SYNC): BESIDE_LINK,
    }
    source = "alone: MuxServe's public profile, 30B, TP4; beside: by reasoning, see scheduler/sim/devices.py"
    return Interference(SHARES, alone, beside, saturation=128, source=source)


def _both(
    some: Iterable[Character], others: Iterable[Character], factor: float
) -> dict[tuple[Character, Character], float]:
    pairs = list(product(some, others))
    return dict.fromkeys([*pairs, *((b, a) for a, b in pairs)], factor)


def scaled(interference: Interference, factor: float) -> Interference:
    """Every co-run factor times ``factor``, not below 1: to see how much results depend on them."""
    beside = {pair: max(1.0, value * factor) for pair, value in interference.beside.items()}
    return Interference(
        interference.shares, interference.alone, beside, interference.saturation, interference.source
    )


@cache
def cpu_interference() -> Interference:
    """Two threads, or one each.

    Measured with one thread for each of two processes, against the best run of one after the other: decode
    beside training has 1.36 times the speed in sum, two pipelines that decode and train in turns 1.34 times.
    With d and u the slow-downs of decode and of update, and pipelines that spend half of their time on each,

        1/d + 1/u = 1.36      2 / ((d + u) / 2) = 1.34      =>      d = 1.31, u = 1.67

    (decode is the one that gains less from a second thread). Divided by what a busy partner costs (1.10) that
    is 1.19 and 1.52 alone.
    """
    alone = {
        **dict.fromkeys(DECODES, (CPU_DECODE_GAIN, 1.0)),
        **dict.fromkeys(COMPUTE, (CPU_COMPUTE_GAIN, 1.0)),
        Character.SYNC: (1.0, 1.0),
    }
    busy = (*DECODES, *COMPUTE)
    beside = {
        **dict.fromkeys(product(busy, busy), BESIDE_BUSY),
        (Character.SYNC, Character.SYNC): BESIDE_LINK,
    }
    # At batch 64 a step takes twice what it takes at 1 to 16.
    source = "measured on a 2-core x86 server, see scheduler/sim/devices.py"
    return Interference((0.5, 1.0), alone, beside, saturation=64, source=source)


# ---------------------------------------------------------------- the devices

_H100_FLOPS, _H100_BANDWIDTH = 989e12, 3.35e12
_BLOCKS = "EC2 Capacity Blocks for ML, list of 2024-12, effective accelerator rate"


def _gpu(
    name: str, memory: float, bandwidth: float, flops: float, gpu_hour: float, link: float = LINK_MEASURED
) -> DeviceProfile:
    return DeviceProfile(
        name=name,
        gpus=GPUS_PER_DEVICE,
        memory_bytes=round(GPUS_PER_DEVICE * memory),
        bandwidth=bandwidth,
        flops=flops,
        price_per_hour=GPUS_PER_DEVICE * gpu_hour,
        price_source=f"{_BLOCKS}: ${gpu_hour}",
        interference=gpu_interference(),
        link=link,
        compute_scale=_H100_FLOPS / flops,
        memory_scale=_H100_BANDWIDTH / bandwidth,
    )


H100 = _gpu("H100", 80e9, _H100_BANDWIDTH, _H100_FLOPS, 4.916)
H200 = _gpu("H200", 141e9, 4.8e12, 989e12, 5.408)
#: 80 GB; the price is that of the only A100 in the list, which has 40 GB.
A100 = _gpu("A100", 80e9, 2.04e12, 312e12, 1.844, link=LINK_MEASURED / 2)  # PCIe 4
#: The peak of the matrix units was measured (2,200 GFLOP/s for two threads). The bandwidth is one channel of
#: DDR5-4800, an assumption: decode here reads 4.4 GB/s and never comes near.
CPU = DeviceProfile(
    name="CPU",
    gpus=1,
    memory_bytes=24 * 2**30,
    bandwidth=38.4e9,
    flops=2.2e12,
    price_per_hour=0.067,
    price_source="Hugging Face Inference Endpoints, intel-spr x2 (2 vCPUs)",
    interference=cpu_interference(),
)

DEVICES = {profile.name: profile for profile in (H100, H200, A100, CPU)}


# ---------------------------------------------------------------- memory

#: Bytes a parameter beside the bf16 weights: fp32 gradients, masters, two moments.
TRAINED_BYTES = 4 + 4 + 4 + 4
#: Tokens of one micro-batch on one GPU: one longest sequence with its prompt.
MICRO_TOKENS = 8192 + 512


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on each of a job's devices. ``weights_bytes`` are there once for all with the same weights."""

    weights_bytes: int
    run_bytes: int


def footprint(cost: ModelCost, devices: int, kv_tokens: float) -> Footprint:
    """Of a job whose workers, one on each of ``devices``, roll out and train there.

    weights:  the engine's copy (2 bytes a parameter) and the trainer's, sharded over the devices
    run:      KV cache of ``kv_tokens`` tokens on a device
              + gradients, masters and moments of what is trained, sharded (adapters: and their weights)
              + the peak of an update: for each token of a micro-batch on each GPU, the inputs of the layers
                (the rest is computed again) and the logits with their gradients, in bf16
    """
    own = cost.architecture
    trained = own.parameters * (ADAPTER_PART * (TRAINED_BYTES + 2) if cost.lora else TRAINED_BYTES)
    token_bytes = 2 * own.layers * own.hidden + 2 * 2 * own.vocabulary
    run = kv_tokens * own.kv_bytes_per_token + trained / devices + cost.gpus * MICRO_TOKENS * token_bytes
    return Footprint(round(own.weights_bytes * (1 + 1 / devices)), round(run))
