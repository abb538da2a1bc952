"""The data of a job, step by step; which rows they are depends on the seed and the position alone."""

from __future__ import annotations

from pathlib import Path

from workers.batches import Prompt
from workers.data import supervised
from workers.data.cursor import rows_of
from workers.data.rows import RowError, RowIndex, RowProblem
from workers.envs.episodes import opening
from workers.models.chat import ChatTokenizer
from workers.protocol import Launch
from workers.residents.errors import ModelLoad
from workers.rl.batching import Batch
from workers.spec import JobSpec


class Material:
    def __init__(self, launch: Launch) -> None:
        """``ModelLoad`` for a model without a tokenizer or a chat template."""
        self._spec: JobSpec = launch.spec
        try:
            self.tokenizer = ChatTokenizer(Path(launch.model_path))
        except ValueError as error:
            raise ModelLoad(str(error)) from error
        self._rows = RowIndex(launch.dataset_path)

    def _rows_of(self, step: int, round: int) -> list[int]:
        rl = self._spec.rl
        return rows_of(
            self._spec.seed, step, round, rl.prompts_per_step, rl.steps, len(self._rows), rl.shuffle
        )

    def prompts(self, step: int, round: int = 0) -> list[Prompt]:
        """A group of the step for each row of the round."""
        made = []
        for group, row in enumerate(self._rows_of(step, round)):
            item = self._rows[row]
            messages = opening(self._spec.environment, item["messages"])
            tokens = tuple(self.tokenizer.encode_chat(messages))
            made.append(Prompt(group, row, item, messages, tokens, round))
        return made

    def examples(self, step: int) -> Batch:
        """The step's own completions, or pairs of them; ``RowProblem`` names a row that has none."""
        pairs = self._spec.rl.method.objective == "preference"
        read = supervised.pair_of if pairs else supervised.completion_of
        longest = self._spec.rl.sampling.max_tokens
        found = []
        for row in self._rows_of(step, 0):
            try:
                found.append(read(self.tokenizer, self._rows[row], longest))
            except (ValueError, KeyError, TypeError) as error:
                message = f"row {row + 1}: {error}"
                raise RowProblem(RowError(row + 1, None, "messages", message)) from None
        return supervised.batch_of(found)
