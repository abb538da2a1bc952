"""Every completion that a request may rightly come to, where rounding decides.

A token is the one in whose stretch of the cumulative mass a random number falls, and the number hangs on the
request alone. The mass is a sum in floating point: computed in a batch of another size it differs in its last
bits. A number that falls so near to the border of two stretches may give either token, and both are right;
elsewhere only one is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.workers.engines.adapters import logits
from workers.engines.engine import TorchEngine
from workers.engines.lora import join
from workers.engines.rows import Row
from workers.engines.sampling import stream_state, uniforms
from workers.engines.sequences import Request, Rollout
from workers.engines.weights import Weights
from workers.models.chat import ChatTokenizer


class Oracle:
    """Computes completions anew, one alone, with a base and (unless it is None) an adapter's tensors."""

    def __init__(
        self,
        weights: Weights,
        tokenizer: ChatTokenizer,
        adapter: Mapping[str, torch.Tensor] | None = None,
        scaling: float = 1.0,
    ) -> None:
        self._weights, self._tokenizer = weights, tokenizer
        self._adapter, self._scaling = adapter, scaling
        self._joined = None
        if adapter is not None:
            self._joined = join(weights.config, adapter, scaling, weights.dtype)

    def completions(self, request: Request, tolerance: float) -> Iterator[Rollout]:
        """The request's completion, then those that begin like one of these and take the other token where
        the random number is within ``tolerance`` of the border between both.
        """
        prefixes: list[list[int]] = [[]]
        while prefixes:
            prefix = prefixes.pop()
            rollout = self._complete(request, prefix)
            yield rollout
            for place, others in self._ties(rollout, tolerance):
                if place >= len(prefix):
                    prefixes += [[*rollout.tokens[:place], token] for token in others]

    def _complete(self, request: Request, prefix: list[int]) -> Rollout:
        rollout = Rollout(request, list(prefix), [0.0] * len(prefix), [0] * len(prefix))
        if prefix:
            rollout.finish = Row.of(rollout, self._tokenizer).ending()
        if rollout.finish is not None:
            return rollout
        engine = TorchEngine(self._weights, self._tokenizer)
        engine.load_adapter(request.run_key, 0, self._adapter, self._scaling)
        engine.import_([rollout])
        (done,) = engine.decode().finished
        return done

    def _ties(self, rollout: Rollout, tolerance: float) -> Iterator[tuple[int, list[int]]]:
        """Places, and the tokens other than the one taken that could stand there."""
        request, count = rollout.request, len(rollout.tokens)
        context = [*request.prompt, *rollout.tokens[:-1]]
        table = logits(self._weights, context, self._joined)[-count:].double() / request.temperature
        upper = table.softmax(-1).cumsum(-1)
        lower = upper - table.softmax(-1)
        numbers = torch.from_numpy(uniforms([stream_state(request.stream)] * count, range(count)))
        near = (lower - tolerance <= numbers.unsqueeze(1)) & (numbers.unsqueeze(1) < upper + tolerance)
        for place, token in enumerate(rollout.tokens):
            others = [other for other in near[place].nonzero().flatten().tolist() if other != token]
            if others:
                yield place, others


def load_adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")
