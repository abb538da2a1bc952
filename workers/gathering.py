"""What a step brings in: sequences that end, then whole groups, then grades."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from workers import batches
from workers.batches import Prompt, Sample
from workers.calls import Bell
from workers.engines.sequences import Rollout
from workers.envs.environment import Environment
from workers.graders.run import GradeInput, GradeResult
from workers.models.chat import ChatTokenizer
from workers.spec import JobSpec

#: Above this share of failed grades a step's rewards say nothing, and the job fails.
MAX_GRADE_ERRORS = 0.5


class GraderFailed(Exception):
    """Too many grades of a step failed."""


@dataclass
class Episode:
    """A sequence on its way through a step; with an environment, in several turns."""

    sequence: Rollout
    prompt: Prompt
    gathering: Gathering
    environment: Environment | None = None
    turns: int = 1

    @property
    def key(self) -> tuple[int, ...]:
        return self.sequence.request.key

    def end(self) -> None:
        self.gathering.bring(self)


class Gathering:
    def __init__(
        self,
        spec: JobSpec,
        step: int,
        prompts: Sequence[Prompt],
        tokenizer: ChatTokenizer,
        bell: Bell,
    ) -> None:
        self.step = step
        self.prompts = list(prompts)
        self._spec = spec
        self._tokenizer = tokenizer
        self._bell = bell
        self._ended: dict[int, list[Episode]] = {prompt.group: [] for prompt in prompts}
        self._samples: dict[int, list[Sample]] = {}

    def groups_of(self, worker: int) -> list[int]:
        """The groups whose prompts the worker samples first, and trains."""
        return [prompt.group for prompt in self.prompts if prompt.group % self._spec.rl.devices == worker]

    # ------------------------------------------------------------ sequences

    def bring(self, episode: Episode) -> None:
        self._ended[episode.prompt.group].append(episode)
        self._bell.ring()

    def whole(self, group: int) -> bool:
        return len(self._ended[group]) == self._spec.rl.group_size

    def any_whole(self, groups: Collection[int]) -> bool:
        return any(map(self.whole, groups))

    # ------------------------------------------------------------ grades

    def grade_inputs(self, groups: Collection[int]) -> list[GradeInput]:
        """What graders read, group by group, sample by sample: of an episode the last turn."""
        return [
            GradeInput(episode.prompt.item, batches.last_turn(episode.sequence, self._tokenizer))
            for group in groups
            for episode in self._in_order(group)
        ]

    def take_grades(self, groups: Collection[int], grades: Sequence[GradeResult]) -> None:
        """The grades of ``grade_inputs(groups)``."""
        left = iter(grades)
        for group in groups:
            episodes = self._in_order(group)
            self._samples[group] = self._samples_of(episodes, [next(left) for _ in episodes])
        self._bell.ring()

    def _in_order(self, group: int) -> list[Episode]:
        return sorted(self._ended[group], key=lambda episode: episode.key)

    def _samples_of(self, episodes: Sequence[Episode], grades: Sequence[GradeResult]) -> list[Sample]:
        advantages = batches.advantages(self._spec, grades)
        return [
            Sample(
                prompt=episode.prompt,
                rollout=episode.sequence,
                turns=episode.turns,
                text=batches.transcript(episode.sequence, self._tokenizer),
                grade=grade,
                advantage=advantage,
            )
            for episode, grade, advantage in zip(episodes, grades, advantages, strict=True)
        ]

    def graded(self, groups: Collection[int] | None = None) -> bool:
        """Whether those groups, or all of the step, have their grades."""
        return all(group in self._samples for group in (self._ended if groups is None else groups))

    def samples(self, groups: Collection[int] | None = None) -> list[Sample]:
        """Of graded groups, by group and index."""
        names = sorted(self._samples if groups is None else groups)
        return [sample for group in names for sample in self._samples[group]]

    def failures(self) -> str:
        """What to say of failed grades; empty when there were none. Raises ``GraderFailed`` at too many."""
        graded = self.samples()
        failed = [sample.grade.error for sample in graded if sample.grade.score is None]
        count = f"{len(failed)} of {len(graded)} grades failed"
        if len(failed) > MAX_GRADE_ERRORS * len(graded):
            raise GraderFailed(f"{count} at step {self.step + 1}; the first: {failed[0]}")
        return f"Step {self.step + 1}: {count}; the first: {failed[0]}" if failed else ""
