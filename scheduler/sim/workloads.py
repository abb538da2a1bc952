"""The jobs of the evaluation, tasks by models with measured lengths, and what a planner may expect of them.

Every workload has 64 prompts x 4 samples a step. An outlook comes from the mean of the measured lengths,
never from what is drawn for a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from scheduler.core.interference import TAIL_BOUNDS
from scheduler.core.state import Kind, Outlook, Segment
from scheduler.sim.devices import DeviceProfile
from scheduler.sim.measured import ROLLOUTS, Sampled, StepTimes, responses, step_times, tool_latency
from scheduler.sim.truth import (
    Rollout,
    Turn,
    finished_share,
    grouped,
    step_tokens,
    training,
    turns,
)


@dataclass(frozen=True, slots=True)
class Workload:
    """A job's task and model. ``lengths`` names a run of response samples, ``tools`` one of tool latencies.

    ``observation_tokens`` come back from the tool or the environment between two turns of a sequence.
    """

    name: str
    task: str
    model: str
    lengths: str
    prompt_tokens: int
    observation_tokens: int = 0
    tools: str | None = None
    lora: bool = False
    prompts: int = 64
    samples: int = 4
    max_tokens: int = 8192

    @property
    def turns(self) -> int:
        """The most that were sampled."""
        return max(s.turns for s in responses(self.lengths))


def with_lora(workload: Workload) -> Workload:
    return replace(workload, name=f"{workload.name}-lora", lora=True)


# ---------------------------------------------------------------- the list

#: (task, model, run of response lengths, run of step times, run of tool latencies)
_MEASURED = (
    ("gsm8k", "llama3.1-8b", "gsm8k_llama3.1-8b", "gsm8k_llama3.1-8b", None),
    ("gsm8k", "qwen3-0.6b", "gsm8k_qwen3-0.6b", "gsm8k_qwen3-0.6b", None),
    ("gsm8k", "qwen3-4b", "gsm8k_qwen3-4b", "gsm8k_qwen3-4b", None),
    ("gsm8k", "qwen3-4b-instruct", "gsm8k_qwen3-4b-instruct", "gsm8k_qwen3-4b-instruct", None),
    ("gsm8k", "qwen3-8b", "gsm8k_qwen3-8b", "gsm8k_qwen3-8b", None),
    ("gsm8k", "qwen3-32b", "gsm8k_qwen3-32b-bs256", None, None),
    ("math", "llama3.1-8b", "math_llama3.1-8b", "math_llama3.1-8b", None),
    ("math", "qwen3-0.6b", "math_qwen3-0.6b", "math_qwen3-0.6b", None),
    ("math", "qwen3-4b", "math_qwen3-4b", "math_qwen3-4b", None),
    ("math", "qwen3-4b-instruct", "math_qwen3-4b-instruct", "math_qwen3-4b-instruct", None),
    ("math", "qwen3-8b", "math_qwen3-8b", "math_qwen3-8b", None),
    ("math", "deepseek-r1-distill-14b", "math_deepseek", "aime-deepseek", None),
    ("math", "qwen3-32b", "math_qwen3-32b", None, None),
    ("aime", "llama3.1-8b", "multiturn_aime_llama3.1-8b", "multiturn-aime-llama3.1-8b", None),
    ("aime", "qwen3-4b", "multiturn_aime_qwen3-4b", "multiturn-aime-qwen3-4b", None),
    (
        "aime",
        "qwen3-4b-instruct",
        "multiturn_aime_qwen3-4b-instruct",
        "multiturn-aime-qwen3-4b-instruct",
        None,
    ),
    (
        "aime",
        "deepseek-r1-distill-14b",
        "multiturn_aime_DeepSeek-R1-Distill-Qwen-14B",
        None,
        None,
    ),
    ("aime", "qwen3-32b", "multiturn_aime_qwen3-32b-bs256", None, None),
    (
        "search128",
        "llama3.1-8b",
        "search_r1_llama3.1_8b_nprobe128",
        "search_r1_llama3.1-8b_faiss128",
        "llama3.1_8b_search_r1_sync_nprobe128",
    ),
    (
        "search128",
        "qwen3-4b",
        "search_r1_qwen3_4b_nprobe128",
        "search_r1_qwen3-4b_faiss128",
        "qwen3_4b_search_r1_sync_nprobe128",
    ),
    (
        "search32",
        "qwen3-4b-instruct",
        "search_r1_qwen3_4b_instruct_nprobe32",
        "search_r1_qwen3-4b-instruct_faiss32",
        "qwen3_4b_instruct_search_r1_sync_nprobe32",
    ),
    (
        "search128",
        "qwen3-4b-instruct",
        "search_r1_qwen3_4b_instruct_nprobe128",
        "search_r1_qwen3-4b-instruct_faiss128",
        "qwen3_4b_instruct_search_r1_sync_nprobe128",
    ),
    (
        "search512",
        "qwen3-4b-instruct",
        "search_r1_qwen3_4b_instruct_nprobe512",
        "search_r1_qwen3-4b-instruct_faiss512",
        "qwen3_4b_instruct_search_r1_sync_nprobe512",
    ),
    (
        "search32",
        "qwen3-32b",
        "search_r1_qwen3_32b_nprobe32",
        None,
        "qwen3_32b_search_r1_sync_nprobe32_bs256",
    ),
)

#: Runs whose prompts those without step times share: same task, same family of tokenizers.
_LIKE = {
    "gsm8k": "gsm8k_qwen3-4b",
    "math": "math_qwen3-4b",
    "aime": "multiturn-aime-qwen3-4b",
    "search32": "search_r1_qwen3-4b-instruct_faiss32",
}


def _workload(task: str, model: str, lengths: str, run: str | None, tools: str | None) -> Workload:
    like = step_times()[run or _LIKE[task]]
    return Workload(
        name=f"{task}-{model}",
        task=task,
        model=model,
        lengths=lengths,
        prompt_tokens=prompt_tokens(like),
        observation_tokens=observation_tokens(run or _LIKE[task], lengths) if tools else 0,
        tools=tools,
        max_tokens=2048 if model == "qwen3-32b" else 8192,
    )


def prompt_tokens(row: StepTimes) -> int:
    """What the tokens of a step are more than its responses (rounded to 10 ktokens: 10 tokens a prompt)."""
    return round(row.tokens / ROLLOUTS - row.response_tokens)


def observation_tokens(run: str, lengths: str) -> int:
    """Retrieved passages for each return of the tool.

    The logs count them as response tokens; the sampled lengths do not. For the 32B, of which only the latter
    exist, those of the 4B-Instruct with the same task.
    """
    sampled = responses(_OBSERVED.get(run, lengths))
    returns = fmean(s.turns - 1 for s in sampled)
    return round((step_times()[run].response_tokens - fmean(s.tokens for s in sampled)) / returns)


#: The lengths that belong to a run of step times which stands in for a workload's own.
_OBSERVED = {"search_r1_qwen3-4b-instruct_faiss32": "search_r1_qwen3_4b_instruct_nprobe32"}

WORKLOADS = {w.name: w for w in (_workload(*row) for row in _MEASURED)}

#: For the CPU device. SmolLM2's lengths were not sampled: those of the shortest answers, cut at 48 tokens.
CPU_WORKLOAD = Workload(
    name="words-smollm2-135m",
    task="words",
    model="smollm2-135m",
    lengths="gsm8k_llama3.1-8b",
    prompt_tokens=64,
    lora=True,
    prompts=4,
    samples=8,
    max_tokens=48,
)


# ---------------------------------------------------------------- what may be expected


@dataclass(frozen=True, slots=True)
class Part:
    """A place in a rollout worker's chain. Decodes last until fewer than ``below`` sequences run."""

    turn: int
    kind: Kind
    below: int = 0


def layout(workload: Workload, profile: DeviceProfile, workers: int) -> tuple[Part, ...]:
    """The parts of ``Outlook.rollout``. Those that no batch of a worker can reach are left out."""
    most = -(-workload.prompts // workers) * workload.samples
    saturation = profile.interference.saturation
    decodes = [
        (kind, below)
        for kind, above, below in (
            (Kind.DECODE, saturation, saturation),
            *((Kind.TAIL, bound, bound) for bound in TAIL_BOUNDS),
        )
        if most >= above
    ]
    parts = []
    for turn in range(workload.turns):
        parts.append(Part(turn, Kind.PREFILL))
        parts += [Part(turn, kind, below) for kind, below in decodes]
        if workload.tools and turn + 1 < workload.turns:
            parts.append(Part(turn, Kind.TOOL))
    return tuple(parts)


#: Upper quartile over median of what is expected. Adjacent steps of the logs predict each other within 7 to
#: 19 % (batches of 128 and more) and 18 to 40 % (below): the middles of both ranges.
_LATE_DECODE = 1.13
_LATE_TAIL = 1.29


def outlook(
    workload: Workload, profile: DeviceProfile, workers: int, gpus: int, stream: bool = False
) -> Outlook:
    """What a planner may expect before the first step: evenly spaced quantiles of the measured lengths."""
    own = representative(workload, -(-workload.prompts // workers) * workload.samples)
    chain = turns(workload, profile, own, _mean_latencies(workload))
    rollout = tuple(_segments(chain, layout(workload, profile, workers), profile.bandwidth))
    groups = grouped(workload)
    tokens = fmean(step_tokens(workload, [group]) for group in groups) * workload.prompts
    finished = _mean_finished(workload, workers) if stream else None
    train = tuple(
        Segment(s.kind, s.seconds, s.seconds, early=s.early)
        for s in training(workload, profile, gpus, tokens, finished)
    )
    return Outlook(rollout, train)


def cached_tokens(workload: Workload, profile: DeviceProfile, workers: int) -> int:
    """What a worker's KV cache is expected to hold at its fullest.

    That is less than all of its sequences at full length: short ones are gone before long ones have grown.
    """
    own = representative(workload, -(-workload.prompts // workers) * workload.samples)
    sent = [workload.prompt_tokens + (s.turns - 1) * workload.observation_tokens for s in own]
    return Rollout(profile.cost(workload.model), [s.tokens for s in own], sent).peak_tokens


def representative(workload: Workload, count: int) -> list[Sampled]:
    """Evenly spaced quantiles of the measured responses, by turns, then tokens: their survival curve."""
    pool = sorted((s for group in grouped(workload) for s in group), key=lambda s: (s.turns, s.tokens))
    return [pool[(2 * place + 1) * len(pool) // (2 * count)] for place in range(count)]


def _segments(chain: Sequence[Turn], parts: Sequence[Part], peak: float) -> Iterator[Segment]:
    """The chain cut where the batch falls below a bound; what is not expected to occur has 0 seconds."""
    for part in parts:
        if part.turn >= len(chain):
            yield Segment(part.kind, 0.0, batch=0)
            continue
        turn = chain[part.turn]
        running = turn.rollout.running
        if part.kind is Kind.PREFILL:
            seconds = turn.prefill_seconds
            yield Segment(part.kind, seconds, seconds, running, tokens=turn.prefill_tokens)
        elif part.kind is Kind.TOOL:
            yield Segment(part.kind, turn.tool_seconds, turn.tool_seconds, running)
        else:
            yield _decoded(turn.rollout, part, peak)


def _decoded(rollout: Rollout, part: Part, peak: float) -> Segment:
    """Advances the rollout to the end of the part. The bandwidth is that half-way."""
    batch, steps = rollout.running, rollout.steps_until(part.below)
    seconds = rollout.seconds(steps)
    forward = seconds / steps if steps else 0.0
    late = seconds * (_LATE_DECODE if part.kind is Kind.DECODE else _LATE_TAIL)
    rollout.advance(steps // 2)
    bandwidth = rollout.bandwidth(peak) if steps else 0.0
    rollout.advance(steps - steps // 2)
    floor = rollout.floor_seconds if batch else 0.0
    return Segment(part.kind, seconds, late, batch, forward, floor, bandwidth)


def _mean_latencies(workload: Workload) -> list[float]:
    """Expected seconds of the step's batched tool call after each turn."""
    if workload.tools is None:
        return []
    sampled, latency = responses(workload.lengths), tool_latency(workload.tools)
    rollouts = workload.prompts * workload.samples
    return [
        latency.mean * rollouts / ROLLOUTS * fmean(s.turns > turn + 1 for s in sampled)
        for turn in range(workload.turns)
    ]


def _mean_finished(workload: Workload, workers: int) -> float:
    pool, size = grouped(workload), workload.prompts
    return fmean(finished_share(pool[at : at + size], workers) for at in range(0, len(pool) - size + 1, size))
