"""One process of a measurement: an engine and a trainer over one base, each piece of work timed by itself.

What is computed is fixed by a seed: prompts, completions and the adapter are the same on every device.
Nothing ends early: no token stops a sequence. Set-up (new sequences in the batch) is outside of the times.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from workers.calibrate.derive import CALM
from workers.calibrate.waiting import Piece, counts, waited
from workers.calibrate.work import STEPS, Case, Character, Effort, Work, units
from workers.engines.engine import TorchEngine
from workers.engines.precision import choose_dtype
from workers.engines.sequences import Request
from workers.engines.weights import load_weights
from workers.models.describe import describe
from workers.protocol import DeviceRef
from workers.residents.shares import limit_of
from workers.rl.batching import Batch
from workers.spec import RLConfig
from workers.train.trainer import TorchTrainer

SEED = 0
RUN = "calibration"
#: Lengths as in a small job; shorter where the model's context is.
PROMPT_TOKENS = 48
COMPLETION_TOKENS = 32
DECODE_TOKENS = 96
#: Samples of a training pass that have their prompt in common.
GROUP = 4


class Bench:
    def __init__(self, device: DeviceRef, model_path: str, largest_batch: int) -> None:
        gpu = device.kind == "gpu"
        self._where = torch.device("cuda", device.index) if gpu else torch.device("cpu")
        self._limit = limit_of(device)
        self._path = Path(model_path)
        self._largest_batch = largest_batch
        self._version = 0
        self._decoding = (0, 0)  # running sequences, and tokens that each has to go

    def load(self) -> tuple[int, str]:
        """(parameters, number format) of the model; ``ValueError`` or ``OSError`` where it cannot be read."""
        rl = RLConfig()
        parameters = describe(self._path).parameters
        weights = load_weights(self._path, choose_dtype(rl.precision, self._where), self._where)
        self._vocab = weights.config.vocab
        # Prompt and completion together stay within the context of any model.
        self._scale = min(1.0, weights.config.context / (PROMPT_TOKENS + DECODE_TOKENS))
        self._trainer = TorchTrainer(weights)
        self._trainer.open(RUN, rl, SEED)
        self._engine = TorchEngine(weights, max_batch=self._largest_batch)
        self._sync()
        return parameters, str(weights.dtype).removeprefix("torch.")

    # ------------------------------------------------------------ measuring

    def alone(self, cases: Sequence[Case], effort: Effort, spare_s: float) -> list[list[Piece]]:
        """Pieces of each case, as many as the effort asks for. What was disturbed does not count, and is
        computed again while less than ``spare_s`` have gone by since the call.

        In turn, so that what disturbs the machine for a while disturbs all cases alike.
        """
        until = time.monotonic() + spare_s
        for work in {case.work.character: case.work for case in cases}.values():
            self.warm(Case(work, share=1.0))
        found: list[list[Piece]] = [[] for _ in cases]
        for turn in range(effort.repetitions * effort.attempts):
            again = turn >= effort.repetitions
            for case, row in zip(cases, found, strict=True):
                if again and time.monotonic() >= until:
                    return found
                counted = [piece for piece in row if piece.disturbed <= CALM] if again else row
                if not _enough(case, counted, effort):
                    row.append(self._timed(case))
        return found

    def warm(self, case: Case) -> None:
        """Compute the case once."""
        self._timed(case)

    def clock(self) -> float:
        """Epoch seconds here, which is what windows are told in."""
        return time.time()

    def repeat(self, case: Case, begins: float, ends: float) -> list[Piece] | None:
        """Compute from ``begins`` until ``ends`` (by ``clock``); the pieces that ended in time.
        None when it came too late to begin then, or had no processor in all that time.

        A first piece that does not end in time counts with the interval: it is at least that slow.
        """
        ahead = begins - time.time()
        if ahead < 0:
            return None
        time.sleep(ahead)
        found: list[Piece] = []
        last: Piece | None = None
        while time.time() < ends:
            last = self._timed(case)
            if time.time() <= ends:
                found.append(last)
        if last is None:
            return None
        return found or [last.per(last.seconds * units(case.work) / (ends - begins))]

    def tokens(self, work: Work) -> int:
        """Tokens that a piece computes; a prompt that several samples have in common counts once."""
        if work.character is Character.PREFILL:
            return work.size * self._length(PROMPT_TOKENS)
        batch = self._batch(work.size)
        return sum(map(len, set(batch.prompts))) + sum(map(len, batch.completions))

    def _timed(self, case: Case) -> Piece:
        """One piece; one step of a decode."""
        with self._limit(case.share):
            run = self._prepared(case.work)
            self._wait()
            before = counts()
            started = time.perf_counter()
            run()
            self._wait()
            seconds = time.perf_counter() - started
            idle = waited(before, counts(), seconds)
        return Piece(seconds, idle).per(units(case.work))

    def _wait(self) -> None:
        if self._where.type == "cuda":
            torch.cuda.current_stream(self._where).synchronize()

    # ------------------------------------------------------------ pieces

    def _prepared(self, work: Work) -> Callable[[], object]:
        match work.character:
            case Character.PREFILL:
                self._submit([self._tokens(seed, PROMPT_TOKENS) for seed in range(work.size)], 1)
                return lambda: self._engine.prefill(RUN)
            case Character.LOGPROB:
                batch = self._batch(work.size)
                return lambda: self._trainer.logprobs(RUN, batch)
            case Character.UPDATE:
                batch = self._batch(work.size)
                return lambda: self._trainer.forward_backward(RUN, batch)
            case Character.SYNC:
                return self._sync
        return self._prepared_decode(work.size)

    def _prepared_decode(self, batch: int) -> Callable[[], object]:
        """Keep the batch that runs, as long as its sequences have so many tokens to go."""
        size, left = self._decoding
        if size != batch or left < STEPS:
            longest = self._length(DECODE_TOKENS)
            self._submit([self._tokens(0, PROMPT_TOKENS)] * batch, longest)
            self._engine.prefill(RUN)
            left = longest - 2  # the prefill sampled one, and the last would end the batch
        self._decoding = (batch, left - STEPS)
        return lambda: self._engine.decode([RUN], max_steps=STEPS)

    def _submit(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> None:
        self._engine.drop(RUN)
        self._decoding = (0, 0)
        self._engine.submit(
            [
                Request(run_key=RUN, key=(row,), prompt=prompt, max_tokens=max_tokens, stream=(SEED, row))
                for row, prompt in enumerate(prompts)
            ]
        )

    def _batch(self, samples: int) -> Batch:
        groups = [sample // GROUP for sample in range(samples)]
        completions = [self._tokens(1000 + sample, COMPLETION_TOKENS) for sample in range(samples)]
        return Batch(
            groups=groups,
            prompts=[self._tokens(group, PROMPT_TOKENS) for group in groups],
            completions=completions,
            engine_logprobs=[[-1.0] * len(completion) for completion in completions],
            advantages=[
                [1.0 if sample % 2 else -1.0] * len(completion)
                for sample, completion in enumerate(completions)
            ],
            keep=[True] * samples,
        )

    def _sync(self) -> None:
        """The adapter from the trainer to the engine."""
        self._version += 1
        tensors, scaling = self._trainer.adapter(RUN), self._trainer.scaling(RUN)
        self._engine.load_adapter(RUN, self._version, tensors, scaling)

    def _tokens(self, seed: int, count: int) -> tuple[int, ...]:
        numbers = random.Random(seed)
        return tuple(numbers.randrange(self._vocab) for _ in range(self._length(count)))

    def _length(self, tokens: int) -> int:
        return max(1, int(tokens * self._scale))


def _enough(case: Case, pieces: Sequence[Piece], effort: Effort) -> bool:
    spent = sum(piece.seconds for piece in pieces) * units(case.work)
    return len(pieces) >= effort.repetitions or (len(pieces) >= 2 and spent >= effort.case_s)
