"""The torch rollout engine: continuous batching of several runs over one base model.

    submit ─► waiting ──prefill──► running ──decode step──► finished ──(answer)──┐
                 ▲                    │                                          │
                 └───── import_ ◄── export (tokens only)                         │
                           ▲─────────────────────────────────────────────────────┘

Every decode step advances all rows of the asked runs by one token in one forward pass, each row with its own
run's adapter. Prompts shared by a group are computed once. The engine is driven from outside: it computes
only inside ``prefill`` and ``decode``, which return as soon as their boundary is reached or the caller says
stop.

A sequence that comes in with tokens is computed the cheaper way. If its cache was kept, only what is missing
is fed, beside the next decode step of all rows: that costs those tokens and no pass of its own. If not, its
prompt and tokens are computed by a prefill. Both cost less than any other order of the same work: a token
costs the same in every pass, and a pass has a fixed price.

Memory: the base weights (on a CPU in bf16 a blocked copy of them, for speed) and at most ``kv_tokens`` tokens
of KV cache of ``cache.bytes_per_token`` each (``room.py``). Not thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from workers.engines.attention import Cell, prefill_attention, step_attention
from workers.engines.cache import Seat
from workers.engines.decoder import Adapters, Addition, head_logits, hidden_states
from workers.engines.errors import NotFinite
from workers.engines.lora import check, join, side_by_side
from workers.engines.packed import pack
from workers.engines.room import Room
from workers.engines.rows import Key, Row, Run
from workers.engines.sampling import sample, uniforms
from workers.engines.sequences import Progress, Request, Rollout, refusal
from workers.engines.stack import Stack
from workers.engines.step import Step
from workers.engines.weights import Weights, blocked, from_state_dict
from workers.models.chat import ChatTokenizer
from workers.models.limits import KV_TOKENS, longest_sequence

#: Runs whose adapters are stacked although they compute nothing now: each takes its adapter's memory again.
STACKED = 16


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
        self._runs: dict[str, Run] = {}
        self._room = Room(
            self._runs,
            weights.config,
            weights.dtype,
            weights.device,
            max_batch=max_batch,
            kv_tokens=kv_tokens,
        )
        self._additions: tuple[object, Sequence[Mapping[str, Addition]] | None] | None = None
        self._stack: Stack | None = None

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
        if run_key in self._runs:
            self.drop(run_key)
            del self._runs[run_key]
        self._additions = None

    def _set(self, run_key: str, version: int, adapter: Adapters | None) -> None:
        run = self._runs.get(run_key)
        if run is None:
            self._runs[run_key] = Run(run_key, version, adapter)
        else:
            run.version, run.adapter = version, adapter
        self._additions = None

    # ------------------------------------------------------------ sequences in and out

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue sequences. ``ValueError`` names the first bad request, and then none is queued."""
        self.import_([Rollout(request) for request in requests])

    def import_(self, sequences: Sequence[Rollout]) -> None:
        """Queue unfinished sequences: new, moved, or gone on with after an answer."""
        taken = {(key, row.key) for key, run in self._runs.items() for row in run.rows()}
        for sequence in sequences:
            self._check(sequence, taken)
            taken.add((sequence.request.run_key, sequence.request.key))
        for sequence in sequences:
            run = self._runs[sequence.request.run_key]
            run.forget_unless_of(sequence)
            run.waiting.append(Row.of(sequence, self._tokenizer))

    def _check(self, sequence: Rollout, taken: set[tuple[str, Key]]) -> None:
        request, config = sequence.request, self._weights.config
        if request.run_key not in self._runs:
            reason: str | None = "the run is not open"
        elif (request.run_key, request.key) in taken:
            reason = "the key is taken"
        elif request.stop and self._tokenizer is None:
            reason = "stop texts need a tokenizer"
        else:
            reason = refusal(sequence, config.vocab, longest_sequence(config.context, self._room.kv_tokens))
        if reason is not None:
            raise ValueError(f"sequence {request.key} of run {request.run_key}: {reason}")

    @torch.inference_mode()
    def export(self, run_key: str, keys: Collection[Key] | None = None) -> list[Rollout]:
        """Take unfinished sequences of the run out, for ``import_`` here or in another engine.

        ``keys`` names some, and those of them that are not here are passed over; None takes all.
        """
        run = self._run(run_key)
        leaving = [row for row in run.rows() if keys is None or row.key in keys]
        run.leave([row for row in leaving if row.seat is not None])
        run.waiting = deque(row for row in run.waiting if row not in leaving)
        for row in leaving:
            run.kept.pop(row.key, None)
        return [row.sequence for row in leaving]

    def forget(self, run_key: str) -> None:
        """Drop the caches kept for sequences that may go on; they are then computed again."""
        self._run(run_key).kept.clear()

    @torch.inference_mode()
    def drop(self, run_key: str) -> None:
        """Cancel the run's sequences; the run stays open."""
        run = self._run(run_key)
        run.waiting.clear()
        run.leave(list(run.running))
        run.finished.clear()
        run.kept.clear()

    def counts(self, run_key: str) -> tuple[int, int]:
        """(running, waiting)."""
        run = self._run(run_key)
        return len(run.running), len(run.waiting)

    @property
    def cached_tokens(self) -> int:
        """Tokens of KV cache held now; never above ``kv_tokens``."""
        return self._room.held

    def _run(self, run_key: str) -> Run:
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

        Sequences that go on from a kept cache only take their rows; ``decode`` feeds them what they miss.
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
        runs = list(self._runs.values())
        if run_keys is not None:
            # In the order in which they were opened: that of the stacked adapters.
            asked = {self._run(key).key for key in run_keys}
            runs = [run for run in runs if run.key in asked]
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
                self._step(active, max_tokens_per_forward, progress)
            steps += 1
        return self._counted(progress, runs)

    def _counted(self, progress: Progress, runs: Sequence[Run]) -> Progress:
        for run in runs:
            progress.finished += run.finished
            run.finished = []
        progress.running = sum(len(run.running) for run in runs)
        progress.waiting = sum(len(run.waiting) for run in runs)
        return progress

    @torch.inference_mode()
    def _prefill_some(self, run: Run, max_tokens: int, progress: Progress) -> bool:
        """Seat the next waiting sequences and compute their prompts, in one pass; False when none could be
        admitted.
        """
        kept, rows = self._room.admit(run, max_tokens)
        if rows:
            try:
                self._compute_prompts(run, rows, progress)
            except BaseException:
                # Out of memory, or interrupted: what was not computed waits again.
                if rows[0].seat is not None:
                    run.leave(rows)
                    run.waiting.extendleft(reversed(rows))
                raise
        return bool(kept or rows)

    def _compute_prompts(self, run: Run, rows: Sequence[Row], progress: Progress) -> None:
        prompts: dict[tuple[int, ...], int] = {}
        for row in rows:
            prompts.setdefault(row.sequence.request.prompt, len(prompts))
        replays = [(prompts[row.sequence.request.prompt], row.sequence.tokens) for row in rows]
        device = self._weights.device
        batch = pack(list(prompts), replays, device)
        ends, cells = _cache_cells(list(prompts), replays, [row.held for row in rows])
        hidden = hidden_states(
            self._weights,
            batch.tokens_T,
            batch.positions_T,
            prefill_attention(batch, cells),
            run.adapter,
        )
        progress.forwards += 1
        seated = [(run, row) for row in rows]
        drawn = self._draw(seated, hidden[torch.tensor(ends, device=device)])
        progress.computed(run.key, len(batch.tokens_T))
        for row in rows:
            row.cached = row.sequence.context
        self._settle(seated, drawn, progress)

    @torch.inference_mode()
    def _step(self, runs: Sequence[Run], max_tokens: int, progress: Progress) -> None:
        device = self._weights.device
        step = Step.of(runs, max_tokens)
        hidden = hidden_states(
            self._weights,
            torch.tensor(step.tokens, device=device),
            torch.tensor(step.places, device=device),
            step_attention(step.fed, device),
            self._adapters(runs, step.counts),
        )
        progress.forwards += 1
        ready = step.ready
        if len(ready) < len(step.tokens):
            indexes = [index for index, _, _ in ready]
            hidden = hidden[torch.tensor(indexes, dtype=torch.int64, device=device)]
        sampling = [(run, row) for _, run, row in ready]
        drawn = self._draw(sampling, hidden)
        for (run, row), one in zip(step.rows, step.fed, strict=True):
            # The token that a row is fed to sample from counts as the one it samples.
            progress.computed(run.key, len(one.places) - (len(one.places) == row.missing))
            row.cached += len(one.places)
        self._settle(sampling, drawn, progress)

    def _adapters(
        self, runs: Sequence[Run], counts: Sequence[int]
    ) -> Sequence[Mapping[str, Addition]] | None:
        """Of a step's batch: ``counts`` tokens of each run."""
        adapters = [run.adapter for run in runs]
        if all(adapter is None for adapter in adapters):
            return None
        if len(runs) == 1:
            return adapters[0]
        key = tuple(zip((run.key for run in runs), counts, strict=True))
        if self._additions is None or self._additions[0] != key:
            self._additions = key, self._side_by_side(adapters, counts)
        return self._additions[1]

    def _side_by_side(
        self, adapters: Sequence[Adapters | None], counts: Sequence[int]
    ) -> Sequence[Mapping[str, Addition]] | None:
        config = self._weights.config
        if self._weights.device.type != "cpu":
            return side_by_side(adapters, counts, config.layers)
        if self._stack is not None:
            additions = self._stack.additions(adapters, counts)
            if additions is not None:
                return additions
        # Of all runs: whose sequences wait for a tool now will be back.
        stacked = [run.adapter for run in self._runs.values()]
        if len(stacked) > STACKED:
            stacked = list(adapters)
        if self._stack is None or not self._stack.renew(stacked):
            self._stack = Stack(config, stacked)
        return self._stack.additions(adapters, counts) or Stack(config, adapters).additions(adapters, counts)

    def _draw(self, rows: Sequence[tuple[Run, Row]], hidden: Tensor) -> list[tuple[int, float]]:
        """Each row's next token and its log-prob from its last hidden state.

        A run that diverged loses its sequences and raises; this step of the others is computed again.
        """
        if not rows:
            return []
        device = self._weights.device
        requests = [row.sequence.request for _, row in rows]
        numbers = uniforms([row.stream for _, row in rows], [len(row.sequence.tokens) for _, row in rows])
        tokens, logprobs = sample(
            head_logits(self._weights, hidden),
            torch.tensor([request.temperature for request in requests], device=device),
            torch.tensor([request.top_p for request in requests], device=device),
            torch.from_numpy(numbers).to(device),
        )
        good = torch.isfinite(logprobs)
        if not bool(good.all()):
            key = rows[int((~good).nonzero()[0])][0].key
            self.drop(key)
            raise NotFinite(key, "the model's outputs are not finite")
        return list(zip(tokens.tolist(), logprobs.tolist(), strict=True))

    def _settle(
        self, rows: Sequence[tuple[Run, Row]], drawn: Sequence[tuple[int, float]], progress: Progress
    ) -> None:
        """Write down what was drawn and take rows that ended their turn out."""
        for (run, row), (token, logprob) in zip(rows, drawn, strict=True):
            row.sequence.sample(token, logprob, run.version)
            row.sequence.finish = row.ending()
            progress.sampled(run.key)
        for run in {id(run): run for run, _ in rows}.values():
            self._retire(run)

    def _retire(self, run: Run) -> None:
        over = [row for row in run.running if row.sequence.finish is not None]
        run.finished += [row.sequence for row in over]
        for row in over:
            if row.sequence.request.keep and row.sequence.left:
                run.kept[row.key] = row.keep()
        run.leave(over)
        self._room.fit()


def _cache_cells(
    prompts: Sequence[tuple[int, ...]], replays: Sequence[tuple[int, Sequence[int]]], seats: Sequence[Seat]
) -> tuple[list[int], list[Cell]]:
    """For sequences in ``seats``: the flat index of each one's last token, and where all its tokens go."""
    starts = [0]
    for prompt in prompts:
        starts.append(starts[-1] + len(prompt))
    cursor = starts[-1]
    ends: list[int] = []
    cells: list[Cell] = []
    for seat, (prompt, tokens) in zip(seats, replays, strict=True):
        length = len(prompts[prompt])
        cells.extend(Cell(starts[prompt] + place, seat, place) for place in range(length))
        cells.extend(Cell(cursor + place, seat, length + place) for place in range(len(tokens)))
        cursor += len(tokens)
        ends.append(cursor - 1 if tokens else starts[prompt] + length - 1)
    return ends, cells
