"""What the work of each model costs where it was measured: on a group of 4 H100, or (SmolLM2) on a CPU.

    decode forward of n sequences with S tokens of context in all:  a + b n + c S        ms
    prefill forward of T tokens:                                     a + b T              ms
    log-probs and update of M million tokens:                        fixed + slope M      s

The fits of decode and prefill, and of the 4B's training, are those of the public logs (see
calibration/README.md); R squared of the decode fits is 0.86 to 0.98. Training of the other models is fitted
here to ``step_times.csv``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, median

from scheduler.sim.measured import ROLLOUTS, StepTimes, cpu_decode_ms, step_times

#: Wall seconds of generation per second of forwards: 1.2 to 1.35 in the logs. The surplus is the host's
#: (scheduling, sampling, detokenising), and the device idles meanwhile.
HOST = 1.27
#: Tokens of one prefill forward at most: the engine's usual limit of a batch.
PREFILL_CHUNK = 8192
#: Bytes of a weight or of a cached key or value: bf16.
BF16 = 2


@dataclass(frozen=True, slots=True)
class Architecture:
    """Numbers of the public configurations. ``parameters`` counts tied embeddings once."""

    parameters: float
    layers: int
    hidden: int
    kv_heads: int
    head: int
    vocabulary: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head * BF16

    @property
    def weights_bytes(self) -> int:
        return round(self.parameters * BF16)


@dataclass(frozen=True, slots=True)
class Line:
    """``fixed + slope * x``."""

    fixed: float
    slope: float

    def at(self, x: float) -> float:
        return self.fixed + self.slope * x

    def scaled(self, fixed: float = 1.0, slope: float = 1.0) -> Line:
        return Line(self.fixed * fixed, self.slope * slope)


#: Bytes a parameter that FSDP with offload moves between host and GPU: fp32 weights there and back for the
#: actor's log-probs, bf16 weights in for the reference, fp32 weights and two moments there and back for the
#: update. With adapters: the frozen bf16 weights there and back.
MOVED = (2 * 4.0, 2.0, 2 * (4 + 8.0))
LORA_MOVED = (2 * 2.0, 2.0, 2 * 2.0)
#: What copies from pageable host memory reach on the measured machine: a quarter of PCIe 5 x16, bytes/s.
LINK_MEASURED = 64e9 / 4
#: Adapters of rank 16 on all linear layers: 41.9 million of Llama-3.1-8B's 8.03 billion parameters.
ADAPTER_PART = 0.0052
#: Sequences of a micro-batch on one GPU: what the public examples of verl for 7B models take.
MICRO_BATCH = 16


def micro_batches(sequences: int, gpus: int) -> int:
    """Of each GPU, when the sequences are spread evenly."""
    return max(1, -(-sequences // (gpus * MICRO_BATCH)))


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Costs of one model on a device of ``gpus`` GPUs. ``decode`` is (a, b, c) in ms; ``prefill`` in ms by
    tokens; ``old_logprob``, ``reference`` and ``update`` in seconds by million tokens of the step;
    ``weight_sync`` seconds.
    """

    name: str
    architecture: Architecture
    decode: tuple[float, float, float]
    prefill: Line
    old_logprob: Line
    reference: Line
    update: Line
    weight_sync: float
    gpus: int = 4
    lora: bool = False
    moved: tuple[float, float, float] = MOVED

    def prefill_seconds(self, tokens: float) -> float:
        """Wall seconds; forwards of at most ``PREFILL_CHUNK`` tokens."""
        forwards = -(-int(tokens) // PREFILL_CHUNK)
        return HOST * (forwards * self.prefill.fixed + self.prefill.slope * tokens) / 1000

    def token_seconds(self, line: Line, tokens: float, gpus: int) -> float:
        """The part that grows with the tokens, divided by the GPUs."""
        return line.slope * tokens / 1e6 * self.gpus / gpus

    @property
    def phases(self) -> tuple[tuple[Line, float], ...]:
        """Old log-probs, reference, update: the measured line, and the bytes a parameter that are moved."""
        return tuple(zip((self.old_logprob, self.reference, self.update), self.moved, strict=True))

    def link_seconds(self, line: Line, moved: float, gpus: int, link: float) -> float:
        """Loading and offloading, divided by the GPUs. ``link`` is one GPU's, in bytes/s."""
        measured = moved * self.architecture.parameters / self.gpus / LINK_MEASURED
        return min(line.fixed, measured) * self.gpus / gpus * LINK_MEASURED / link

    def launch_seconds(self, line: Line, moved: float, sequences: int, gpus: int) -> float:
        """What is left of the fixed part: launches and collectives, once for each micro-batch of a GPU."""
        measured = line.fixed - self.link_seconds(line, moved, self.gpus, LINK_MEASURED)
        return measured * micro_batches(sequences, gpus) / micro_batches(ROLLOUTS, self.gpus)


#: Of an update, forward (2 N flops a token) and gradients of activations (2 N) remain; gradients of the
#: frozen weights (2 N of 6 N) are gone.
LORA_UPDATE_WORK = 2 / 3


def lora(cost: ModelCost) -> ModelCost:
    """The same model when only adapters are trained.

    The reference is the base without its adapter: one forward, as before. Launches keep their measured
    times: an upper bound, since less is computed. Of the weights only the adapter goes to the engines.
    """
    full = cost.phases
    saved = [cost.link_seconds(*phase, cost.gpus, LINK_MEASURED) for phase in full]
    lines = [
        Line(line.fixed - link * (1 - less / moved), line.slope)
        for (line, moved), link, less in zip(full, saved, LORA_MOVED, strict=True)
    ]
    return replace(
        cost,
        old_logprob=lines[0],
        reference=lines[1],
        update=lines[2].scaled(slope=LORA_UPDATE_WORK),
        weight_sync=cost.weight_sync * ADAPTER_PART,
        moved=LORA_MOVED,
        lora=True,
    )


Points = Sequence[tuple[float, float]]


def fit(points: Points) -> Line:
    """Least squares of ``fixed + slope * x`` with both at least 0."""
    slope = least_squares(points)
    if slope < 0:
        return Line(fmean(y for _, y in points), 0.0)
    if through(points, slope).fixed == 0:
        return Line(0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points))
    return through(points, slope)


def least_squares(points: Points) -> float:
    """The slope."""
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def through(points: Points, slope: float) -> Line:
    """The line with this slope through the mean of the points; its fixed part is at least 0."""
    return Line(max(0.0, fmean(y for _, y in points) - slope * fmean(x for x, _ in points)), slope)


@cache
def cost(model: str) -> ModelCost:
    """Raises ``KeyError`` for models that were not measured."""
    return _COSTS[model]()


# ---------------------------------------------------------------- the models

ARCHITECTURES = {
    "qwen3-0.6b": Architecture(0.596e9, 28, 1024, 8, 128, 151_936),
    "qwen3-4b": Architecture(4.02e9, 36, 2560, 8, 128, 151_936),
    "qwen3-4b-instruct": Architecture(4.02e9, 36, 2560, 8, 128, 151_936),
    "qwen3-8b": Architecture(8.19e9, 36, 4096, 8, 128, 151_936),
    "llama3.1-8b": Architecture(8.03e9, 32, 4096, 8, 128, 128_256),
    "deepseek-r1-distill-14b": Architecture(14.77e9, 48, 5120, 8, 128, 152_064),
    "qwen3-32b": Architecture(32.76e9, 64, 5120, 8, 128, 151_936),
    "smollm2-135m": Architecture(0.135e9, 30, 576, 3, 64, 49_152),
}


#: The 4B's prefill: middles of the ranges of the logs, 25-31 and 0.002-0.005 ms.
_PREFILL_4B = Line(28.0, 0.0035)
#: Llama's: 15-22 and 0.007-0.008 ms. The slope of Qwen3-8B in the logs, 0.003-0.005, would be above 80 % of
#: the peak (prompts of a group share their prefix there), so it has Llama's, whose size it has.
_PREFILL_LLAMA = Line(18.5, 0.0075)
_PREFILL_8B = Line(23.0, _PREFILL_LLAMA.slope)
#: 20-30 and 0.025-0.032 ms.
_PREFILL_32B = Line(25.0, 0.0285)


def _between(low: str, high: str, model: str) -> float:
    """Where a model lies between two others, by parameters."""
    least, most, own = (ARCHITECTURES[name].parameters for name in (low, high, model))
    return (own - least) / (most - least)


def _ratio(model: str, to: str) -> float:
    return ARCHITECTURES[model].parameters / ARCHITECTURES[to].parameters


def _rows(model: str) -> list[StepTimes]:
    """The runs of a model."""
    found = [row for row in step_times().values() if model in row.run]
    return [row for row in found if model != "qwen3-4b" or "instruct" not in row.run]


@dataclass(frozen=True, slots=True)
class _Runs:
    """Seconds of the phases of a model's runs, by million tokens."""

    old_logprob: Points
    reference: Points
    update: Points

    @staticmethod
    def of(model: str) -> _Runs:
        rows = _rows(model)
        return _Runs(
            [(row.tokens / 1e6, row.old_logprob) for row in rows],
            [(row.tokens / 1e6, row.reference) for row in rows],
            [(row.tokens / 1e6, row.update) for row in rows],
        )


def _fitted(model: str, decode: tuple[float, float, float], prefill: Line) -> ModelCost:
    """Training fitted to the model's own runs.

    Old log-probs and reference are the same forward, so they share a slope (that of the 4B differs by 2 %).
    """
    runs = _Runs.of(model)
    forward = fmean((least_squares(runs.old_logprob), least_squares(runs.reference)))
    return ModelCost(
        name=model,
        architecture=ARCHITECTURES[model],
        decode=decode,
        prefill=prefill,
        old_logprob=through(runs.old_logprob, forward),
        reference=through(runs.reference, forward),
        update=fit(runs.update),
        weight_sync=_weight_sync(model),
    )


def _weight_sync(model: str) -> float:
    return median(row.weight_sync for row in _rows(model))


def _qwen_06b() -> ModelCost:
    """No prefill was fitted: the 4B's, its launches as those of decode, its tokens by parameters."""
    prefill = _PREFILL_4B.scaled(2.86 / 3.74, _ratio("qwen3-0.6b", "qwen3-4b"))
    return _fitted("qwen3-0.6b", (2.86, 0.0093, 8.7e-6), prefill)


def _qwen_4b(model: str, decode: tuple[float, float, float]) -> ModelCost:
    """Both 4B models train alike; the fit of the logs is of all their runs."""
    return ModelCost(
        name=model,
        architecture=ARCHITECTURES[model],
        decode=decode,
        prefill=_PREFILL_4B,
        old_logprob=Line(5.5, 9.1),
        reference=Line(5.3, 9.3),
        update=Line(10.5, 34.3),
        weight_sync=_weight_sync(model),
    )


def _qwen_8b() -> ModelCost:
    return _fitted("qwen3-8b", (4.62, 0.0095, 1.37e-5), _PREFILL_8B)


def _llama_8b() -> ModelCost:
    """Its runs are short, 0.25 to 1.25 Mtokens: their own slopes are noise (one is negative, and the update's
    would need more than the peak of 4 H100). It has those of Qwen3-8B by parameters, and its own fixed parts.
    """
    alike, runs, times = _qwen_8b(), _Runs.of("llama3.1-8b"), _ratio("llama3.1-8b", "qwen3-8b")
    return replace(
        alike,
        name="llama3.1-8b",
        architecture=ARCHITECTURES["llama3.1-8b"],
        decode=(4.27, 0.0067, 1.30e-5),
        prefill=_PREFILL_LLAMA,
        old_logprob=through(runs.old_logprob, alike.old_logprob.slope * times),
        reference=through(runs.reference, alike.reference.slope * times),
        update=through(runs.update, alike.update.slope * times),
        weight_sync=_weight_sync("llama3.1-8b"),
    )


def _grown(model: str, decode: tuple[float, float, float], prefill: Line, weight_sync: float) -> ModelCost:
    """Training of Qwen3-8B by parameters: the 14B has one run (1.4 times as long), the 32B none."""
    small, times = _qwen_8b(), _ratio(model, "qwen3-8b")
    return replace(
        small,
        name=model,
        architecture=ARCHITECTURES[model],
        decode=decode,
        prefill=prefill,
        old_logprob=small.old_logprob.scaled(times, times),
        reference=small.reference.scaled(times, times),
        update=small.update.scaled(times, times),
        weight_sync=weight_sync,
    )


def _deepseek_14b() -> ModelCost:
    """Decode and prefill lie between those of Qwen3-8B and Qwen3-32B, by parameters."""
    part = _between("qwen3-8b", "qwen3-32b", "deepseek-r1-distill-14b")
    small, large = _qwen_8b(), _qwen_32b()
    decode = tuple(low + part * (high - low) for low, high in zip(small.decode, large.decode, strict=True))
    prefill = Line(
        small.prefill.fixed + part * (large.prefill.fixed - small.prefill.fixed),
        small.prefill.slope + part * (large.prefill.slope - small.prefill.slope),
    )
    seconds = step_times()["aime-deepseek"].weight_sync
    return _grown("deepseek-r1-distill-14b", (decode[0], decode[1], decode[2]), prefill, seconds)


def _qwen_32b() -> ModelCost:
    seconds = _weight_sync("qwen3-8b") * _ratio("qwen3-32b", "qwen3-8b")
    return _grown("qwen3-32b", (10.3, 0.018, 2.5e-5), _PREFILL_32B, seconds)


#: What a second thread is worth to SmolLM2 on the CPU; derived in ``devices.CPU_ALONE``.
CPU_DECODE_GAIN = 1.19
CPU_COMPUTE_GAIN = 1.52
#: Of forward and backward together, a forward alone takes 5.5 of 22.5 s (7,168 tokens, two threads).
_CPU_FORWARD = 5.5 / 22.5


def _smollm2() -> ModelCost:
    """On a CPU device of two threads, with adapters. One thread was measured, two are faster by the gains
    above.

    The step at batches of 1 to 16 does not grow with the batch, so the line is 19 % too fast at batch 1.
    """
    line = fit(cpu_decode_ms())
    update = Line(0.0, 5.2 / 1024 * 1e6 / CPU_COMPUTE_GAIN)
    forward = update.scaled(1.0, _CPU_FORWARD)
    own = ARCHITECTURES["smollm2-135m"]
    a, b = (ms / CPU_DECODE_GAIN / HOST for ms in (line.fixed, line.slope))
    return ModelCost(
        name="smollm2-135m",
        architecture=own,
        decode=(a, b, 0.0),
        prefill=Line(a, forward.slope * 1e-3),
        old_logprob=forward,
        reference=forward,
        update=update,
        weight_sync=0.1,
        gpus=1,
        lora=True,
    )


_COSTS: dict[str, Callable[[], ModelCost]] = {
    "qwen3-0.6b": _qwen_06b,
    "qwen3-4b": lambda: _qwen_4b("qwen3-4b", (3.74, 0.0088, 1.35e-5)),
    "qwen3-4b-instruct": lambda: _qwen_4b("qwen3-4b-instruct", (3.95, 0.0087, 1.31e-5)),
    "qwen3-8b": _qwen_8b,
    "llama3.1-8b": _llama_8b,
    "deepseek-r1-distill-14b": _deepseek_14b,
    "qwen3-32b": _qwen_32b,
    "smollm2-135m": _smollm2,
}
