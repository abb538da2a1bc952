"""The torch rollout engine: continuous batching of several runs over one base model.

    submit ─► waiting ──prefill──► running ──decode step──► finished
                 ▲                    │
                 └──── import_ ◄── export (tokens only; keys and values are computed again)

Every decode step advances all rows of the asked runs by one token in one forward pass, each row with its own
run's adapter. Prompts shared by a group are computed once. The engine is driven from outside: it computes
only inside ``prefill`` and ``decode``, which return as soon as their boundary is reached or the caller says
stop.

Memory: the base weights (on a CPU in bf16 a blocked copy of them, for speed) and at most ``kv_tokens`` tokens
of KV cache of ``cache.bytes_per_token`` each. A sequence reserves its prompt and ``max_tokens``, so a running
sequence never has to be thrown out. Not thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.engines.cache import Pool, decode_attention, prefill_attention, rounded
from workers.engines.decoder import Adapters, head_logits, hidden_states
from workers.engines.errors import NotFinite
from workers.engines.lora import check, join, side_by_side
from workers.engines.packed import PaddedArea, pack
from workers.engines.sampling import sample, stream_state, uniforms
from workers.engines.sequences import Progress, Request, Rollout
from workers.engines.weights import Weights, blocked, from_state_dict
from workers.models.chat import ChatTokenizer, StopText
from workers.models.limits import KV_TOKENS, longest_sequence


@dataclass
class _Row:
    sequence: Rollout
    stream: int
    stop: StopText | None


@dataclass
class _Run:
    key: str
    version: int
    adapter: Adapters | None
    pool: Pool
    waiting: deque[_Row] = field(default_factory=deque)
    running: list[_Row] = field(default_factory=list)  # row i of the pool is running[i]
    finished: list[Rollout] = field(default_factory=list)  # not handed out yet

    def rows(self) -> list[_Row]:
        return [*self.running, *self.waiting]


class TorchEngine:
    def __init__(
        self,
        weights: Weights,
        tokenizer: ChatTokenizer | None = None,
        *,
        max_batch: int = 256,
        kv_tokens: int = KV_TOKENS,
    ) -> None:
        """``tokenizer`` is needed for stop texts only."""
        self._weights = blocked(weights)
        self._tokenizer = tokenizer
        self._max_batch = max_batch
        self._kv_tokens = kv_tokens
        self._runs: dict[str, _Run] = {}
        self._stacked: tuple[tuple[object, ...], Adapters | None] | None = None

    # ------------------------------------------------------------ runs and their weights

    def open(self, run_key: str, version: int = 0) -> None:
        """A run on the base model, without an adapter; opening it again changes only the version."""
        self._set(run_key, version, None)

    def load_adapter(
        self, run_key: str, version: int, tensors: Mapping[str, Tensor] | None, scaling: float = 1.0
    ) -> None:
        """New weights of a run, in PEFT's names, from the next token on.

        Sequences under way keep their keys and values and record the version of each token.
        """
        if tensors is None:
            return self.open(run_key, version)
        config, device = self._weights.config, self._weights.device
        check(config, tensors)
        with torch.inference_mode():
            moved = {name: tensor.detach().to(device) for name, tensor in tensors.items()}
            self._set(run_key, version, join(config, moved, scaling, self._weights.dtype))
        return None

    def load_weights(self, run_key: str, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Full fine-tuning: new base weights under Hugging Face's names. The engine then serves this run
        only.
        """
        others = [key for key in self._runs if key != run_key]
        if others:
            raise ValueError(f"run {run_key} cannot replace the weights: run {others[0]} computes with them")
        old = self._weights
        self._weights = blocked(from_state_dict(old.config, tensors, old.dtype, old.device))
        self._set(run_key, version, None)

    def drop_adapter(self, run_key: str) -> None:
        """Close the run; its sequences are cancelled. Closing an unknown run does nothing."""
        self._runs.pop(run_key, None)
        self._stacked = None

    def _set(self, run_key: str, version: int, adapter: Adapters | None) -> None:
        run = self._runs.get(run_key)
        if run is None:
            self._runs[run_key] = _Run(run_key, version, adapter, self._new_pool())
        else:
            run.version, run.adapter = version, adapter
        self._stacked = None

    def _new_pool(self) -> Pool:
        return Pool(self._weights.config, self._weights.dtype, self._weights.device)

    # ------------------------------------------------------------ sequences in and out

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue sequences. ``ValueError`` names the first bad request, and then none is queued."""
        self.import_([Rollout(request) for request in requests])

    def import_(self, sequences: Sequence[Rollout]) -> None:
        """Queue unfinished sequences; what they have sampled is replayed by the next prefill."""
        taken = {(key, row.sequence.request.key) for key, run in self._runs.items() for row in run.rows()}
        for sequence in sequences:
            self._check(sequence, taken)
            taken.add((sequence.request.run_key, sequence.request.key))
        for sequence in sequences:
            request = sequence.request
            stop = StopText(self._tokenizer, request.stop) if request.stop and self._tokenizer else None
            row = _Row(sequence, stream_state(request.stream), stop)
            self._runs[request.run_key].waiting.append(row)

    def _check(self, sequence: Rollout, taken: set[tuple[str, tuple[int, ...]]]) -> None:
        request, config = sequence.request, self._weights.config
        name = f"sequence {request.key} of run {request.run_key}"
        limit = longest_sequence(config.context, self._kv_tokens)
        if request.run_key not in self._runs:
            raise ValueError(f"{name}: the run is not open")
        if (request.run_key, request.key) in taken:
            raise ValueError(f"{name}: the key is taken")
        if not request.prompt:
            raise ValueError(f"{name}: the prompt is empty")
        if min(request.prompt) < 0 or max(request.prompt) >= config.vocab:
            raise ValueError(f"{name}: the prompt holds a token id outside the vocabulary of {config.vocab}")
        if request.max_tokens < 1:
            raise ValueError(f"{name}: max_tokens must be at least 1")
        if sequence.longest > limit:
            raise ValueError(
                f"{name}: prompt of {len(request.prompt)} tokens and max_tokens {request.max_tokens} "
                f"exceed the {limit} tokens of context"
            )
        if request.temperature < 0 or not 0 < request.top_p <= 1:
            raise ValueError(f"{name}: temperature must be 0 or more and top_p above 0, at most 1")
        if request.stop and self._tokenizer is None:
            raise ValueError(f"{name}: stop texts need a tokenizer")
        if sequence.finish is not None or len(sequence.tokens) >= request.max_tokens:
            raise ValueError(f"{name}: is finished already")

    def export(self, run_key: str) -> list[Rollout]:
        """Take the run's unfinished sequences out, for ``import_`` here or in another engine."""
        run = self._run(run_key)
        sequences = [row.sequence for row in run.rows()]
        self.drop(run_key)
        return sequences

    def drop(self, run_key: str) -> None:
        """Cancel the run's sequences; the run stays open."""
        run = self._run(run_key)
        run.waiting.clear()
        run.running.clear()
        run.finished.clear()
        run.pool = self._new_pool()

    def counts(self, run_key: str) -> tuple[int, int]:
        """(running, waiting)."""
        run = self._run(run_key)
        return len(run.running), len(run.waiting)

    @property
    def cached_tokens(self) -> int:
        """Tokens of KV cache held now; never above ``kv_tokens``."""
        return sum(run.pool.tokens for run in self._runs.values())

    def _run(self, run_key: str) -> _Run:
        if run_key not in self._runs:
            raise ValueError(f"run {run_key} is not open")
        return self._runs[run_key]

    # ------------------------------------------------------------ computing

    def prefill(
        self,
        run_key: str,
        max_tokens_per_forward: int = 2048,
        should_stop: Callable[[], bool] | None = None,
    ) -> Progress:
        """Compute waiting prompts and sample each sequence's next token, as far as rows and memory allow.

        Padding counts towards ``max_tokens_per_forward``; a longer sequence is computed alone in one pass.
        """
        run = self._run(run_key)
        progress = Progress()
        while run.waiting and not (should_stop is not None and should_stop()):
            if not self._prefill_some(run, max_tokens_per_forward, progress):
                break
        return self._counted(progress, [run])

    def decode(
        self,
        run_keys: Iterable[str] | None = None,
        min_running: int = 0,
        max_steps: int | None = None,
        should_stop: Callable[[], bool] | None = None,
        max_tokens_per_forward: int = 2048,
    ) -> Progress:
        """Sample one token per running sequence and step, until ``min_running`` or fewer are unfinished.

        Waiting sequences join as soon as rows and memory allow; the call returns when nothing runs and
        nothing can join because runs that were not asked for hold everything. ``should_stop`` is asked before
        every step.
        """
        runs = list(self._runs.values()) if run_keys is None else [self._run(key) for key in run_keys]
        progress = Progress()
        steps = 0
        while sum(len(run.running) + len(run.waiting) for run in runs) > min_running:
            if steps == max_steps or (should_stop is not None and should_stop()):
                break
            for run in sorted(runs, key=lambda run: len(run.running)):
                if run.waiting:
                    self._prefill_some(run, max_tokens_per_forward, progress)
            active = [run for run in runs if run.running]
            if not active and not any(run.finished for run in runs):
                break  # runs that were not asked for hold all rows or memory
            if active:
                self._step(active, progress)
            steps += 1
        return self._counted(progress, runs)

    def _counted(self, progress: Progress, runs: Sequence[_Run]) -> Progress:
        for run in runs:
            progress.finished += run.finished
            run.finished = []
        progress.running = sum(len(run.running) for run in runs)
        progress.waiting = sum(len(run.waiting) for run in runs)
        return progress

    @torch.inference_mode()
    def _prefill_some(self, run: _Run, max_tokens: int, progress: Progress) -> bool:
        """One forward pass over the next waiting sequences; False when none could be admitted."""
        rows = self._admit(run, max_tokens)
        if not rows:
            return False
        first = len(run.running) - len(rows)
        try:
            self._compute_prompts(run, rows, first, progress)
        except BaseException:
            # Out of memory, or interrupted: what was not computed waits again.
            if len(run.running) == first + len(rows):
                del run.running[first:]
                run.waiting.extendleft(reversed(rows))
            raise
        return True

    def _compute_prompts(self, run: _Run, rows: Sequence[_Row], first: int, progress: Progress) -> None:
        prompts: dict[tuple[int, ...], int] = {}
        for row in rows:
            prompts.setdefault(row.sequence.request.prompt, len(prompts))
        replays = [(prompts[row.sequence.request.prompt], row.sequence.tokens) for row in rows]
        device = self._weights.device
        batch = pack(list(prompts), replays, device)
        ends, cells = _cache_cells(list(prompts), replays, first)
        source, targets, places = (torch.tensor(column, device=device) for column in zip(*cells, strict=True))
        hidden = hidden_states(
            self._weights,
            batch.tokens_T,
            batch.positions_T,
            prefill_attention(batch, run.pool, source, targets, places),
            run.adapter,
        )
        progress.prompt_tokens += len(batch.tokens_T)
        self._emit([(run, row) for row in rows], hidden[torch.tensor(ends, device=device)], progress)

    def _admit(self, run: _Run, max_tokens: int) -> list[_Row]:
        """Move waiting sequences, oldest first, to the run's rows, and make room for them."""
        free_rows = self._max_batch - sum(len(other.running) for other in self._runs.values())
        length = max((rounded(row.sequence.longest) for row in run.running), default=0)
        others = sum(other.pool.tokens for other in self._runs.values() if other is not run)
        taken: list[_Row] = []
        area = PaddedArea()
        for row in list(run.waiting)[: max(0, free_rows)]:
            area_with = area.plus(row.sequence.request.prompt, len(row.sequence.tokens))
            length_with = max(length, rounded(row.sequence.longest))
            needed = (len(run.running) + len(taken) + 1) * length_with
            if others + needed > self._kv_tokens and others:
                others = self._trim(run)
            if others + needed > self._kv_tokens or (taken and area_with.tokens > max_tokens):
                break
            taken.append(row)
            area, length = area_with, length_with
        if taken:
            count = len(run.running) + len(taken)
            if (
                count > run.pool.rows
                or length > run.pool.length
                or others + run.pool.tokens > self._kv_tokens
            ):
                run.pool.resize(count, length, len(run.running))
            run.running.extend(taken)
            for _ in taken:
                run.waiting.popleft()
        return taken

    def _trim(self, keep: _Run) -> int:
        """Give back the rows other runs no longer use; the tokens their pools still hold."""
        held = 0
        for run in self._runs.values():
            if run is not keep:
                if run.pool.rows > len(run.running):
                    run.pool.resize(len(run.running), run.pool.length, len(run.running))
                held += run.pool.tokens
        return held

    @torch.inference_mode()
    def _step(self, runs: Sequence[_Run], progress: Progress) -> None:
        device = self._weights.device
        rows = [(run, row) for run in runs for row in run.running]
        tokens = torch.tensor([row.sequence.tokens[-1] for _, row in rows], device=device)
        places = torch.tensor([row.sequence.context - 1 for _, row in rows], device=device)
        parts = list(
            zip([run.pool for run in runs], places.split([len(run.running) for run in runs]), strict=True)
        )
        hidden = hidden_states(self._weights, tokens, places, decode_attention(parts), self._adapters(runs))
        self._emit(rows, hidden, progress)

    def _adapters(self, runs: Sequence[_Run]) -> Adapters | None:
        key = tuple((run.key, len(run.running)) for run in runs)
        if self._stacked is None or self._stacked[0] != key:
            counts = [len(run.running) for run in runs]
            joined = side_by_side([run.adapter for run in runs], counts, self._weights.config.layers)
            self._stacked = (key, joined)
        return self._stacked[1]

    def _emit(self, rows: Sequence[tuple[_Run, _Row]], hidden: Tensor, progress: Progress) -> None:
        """Sample a token for each row from its last hidden state, and take finished rows out."""
        device = self._weights.device
        requests = [row.sequence.request for _, row in rows]
        numbers = uniforms([row.stream for _, row in rows], [len(row.sequence.tokens) for _, row in rows])
        tokens, logprobs = sample(
            head_logits(self._weights, hidden),
            torch.tensor([request.temperature for request in requests], device=device),
            torch.tensor([request.top_p for request in requests], device=device),
            torch.from_numpy(numbers).to(device),
        )
        self._refuse_not_finite(rows, logprobs)
        for (run, row), token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.sequence.tokens.append(token)
            row.sequence.logprobs.append(logprob)
            row.sequence.versions.append(run.version)
            row.sequence.finish = _finish(row)
        progress.sampled_tokens += len(rows)
        for run in {id(run): run for run, _ in rows}.values():
            self._retire(run)

    def _refuse_not_finite(self, rows: Sequence[tuple[_Run, _Row]], logprobs: Tensor) -> None:
        """Drop the sequences of a run that diverged and raise; this step of the others is computed again."""
        good = torch.isfinite(logprobs)
        if not bool(good.all()):
            key = rows[int((~good).nonzero()[0])][0].key
            self.drop(key)
            raise NotFinite(key, "the model's outputs are not finite")

    def _retire(self, run: _Run) -> None:
        run.finished += [row.sequence for row in run.running if row.sequence.finish is not None]
        for index in range(len(run.running) - 1, -1, -1):
            if run.running[index].sequence.finish is not None:
                last = run.running.pop()
                if index < len(run.running):
                    run.pool.move(len(run.running), index)
                    run.running[index] = last
        if not run.running:
            run.pool = self._new_pool()


def _finish(row: _Row) -> str | None:
    sequence = row.sequence
    if sequence.tokens[-1] in sequence.request.stop_ids:
        return "stop"
    if row.stop is not None and row.stop.found(sequence.tokens) is not None:
        return "stop"
    return "length" if len(sequence.tokens) == sequence.request.max_tokens else None


def _cache_cells(
    prompts: Sequence[tuple[int, ...]], replays: Sequence[tuple[int, Sequence[int]]], first: int
) -> tuple[list[int], list[tuple[int, int, int]]]:
    """For sequences in rows ``first``, ``first + 1``, …: the flat index of each one's last token, and for
    every
    token it has (flat index, row, place)."""
    starts = [0]
    for prompt in prompts:
        starts.append(starts[-1] + len(prompt))
    cursor = starts[-1]
    ends: list[int] = []
    cells: list[tuple[int, int, int]] = []
    for row, (prompt, tokens) in enumerate(replays, start=first):
        length = len(prompts[prompt])
        cells.extend((starts[prompt] + place, row, place) for place in range(length))
        cells.extend((cursor + place, row, length + place) for place in range(len(tokens)))
        cursor += len(tokens)
        ends.append(cursor - 1 if tokens else starts[prompt] + length - 1)
    return ends, cells
