"""What a step brings in: sequences that end, then whole groups, then grades.

A group whose rewards teach nothing is replaced, while the step may take further rounds, by one of another
prompt in its place; it is graded only when its place has its last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from workers import batches
from workers.batches import Prompt, Sample, SampleError
from workers.calls import Bell
from workers.engines.sequences import Rollout
from workers.envs.environment import Environment
from workers.envs.problems import EpisodeFailed
from workers.graders.run import GradeInput, GradeResult
from workers.models.chat import ChatTokenizer
from workers.rl.advantages import shaped, teaches
from workers.spec import JobSpec

#: The parts of a reward that are ours to name.
GRADER, ENVIRONMENT, OVERLONG = "grader", "environment", "overlong"


class GraderFailed(Exception):
    """Too many samples of a step have no usable reward."""


@dataclass
class Episode:
    """A sequence on its way through a step; with an environment, in several turns.

    ``turn_rewards`` are by the place of the turn's last token. ``failure`` has ended it: others go on.
    """

    sequence: Rollout
    prompt: Prompt
    gathering: Gathering
    environment: Environment | None = None
    turns: int = 1
    turn_rewards: dict[int, float] = field(default_factory=dict)
    failure: EpisodeFailed | None = None
    calls: int = 0
    failed_calls: int = 0

    @property
    def key(self) -> tuple[int, ...]:
        return self.sequence.request.key

    @property
    def error(self) -> SampleError | None:
        """Why it cannot be graded."""
        if self.failure is not None:
            return SampleError("environment", str(self.failure.kind), str(self.failure.message))
        if not any(self.sequence.sampled):
            return SampleError("environment", "empty", "the model said nothing before the episode ended")
        return None

    def end(self) -> None:
        self.gathering.bring(self)


class Gathering:
    """``again(round)`` gives the prompts of a further round, one for each group."""

    def __init__(
        self,
        spec: JobSpec,
        step: int,
        prompts: Sequence[Prompt],
        tokenizer: ChatTokenizer,
        bell: Bell,
        again: Callable[[int], Sequence[Prompt]],
    ) -> None:
        self.step = step
        self._prompts = {prompt.group: prompt for prompt in prompts}
        self._spec = spec
        self._tokenizer = tokenizer
        self._bell = bell
        self._again = again
        self._ended: dict[int, list[Episode]] = {prompt.group: [] for prompt in prompts}
        self._samples: dict[int, list[Sample]] = {}
        self._replaced: list[Sample] = []

    def groups_of(self, worker: int) -> list[int]:
        """The groups whose prompts the worker samples first, and trains."""
        return [group for group in self._prompts if group % self._spec.rl.devices == worker]

    # ------------------------------------------------------------ rounds

    def prompts_of(self, worker: int, round: int) -> list[Prompt]:
        """The worker's prompts that are sampled in that round."""
        prompts = (self._prompts[group] for group in self.groups_of(worker))
        return [prompt for prompt in prompts if prompt.round == round]

    def round_over(self, worker: int, round: int) -> bool:
        """Whether each of the worker's groups is graded, or goes on in a later round."""
        return all(
            self._prompts[group].round > round or group in self._samples for group in self.groups_of(worker)
        )

    def _replace(self, group: int) -> None:
        """Sample another prompt in place of a group that teaches nothing, if there may be another round."""
        round = self._prompts[group].round + 1
        if round >= (self._spec.rl.sampling_rounds or 1) or self._teaches(group):
            return
        self._replaced += self._samples.pop(group)
        self._ended[group] = []
        self._prompts[group] = next(prompt for prompt in self._again(round) if prompt.group == group)

    def _teaches(self, group: int) -> bool:
        samples = self._samples[group]
        kept = any(sample.trained(self._spec) for sample in samples)
        return kept and teaches(self._spec.rl, [sample.shaped for sample in samples])

    # ------------------------------------------------------------ sequences

    def bring(self, episode: Episode) -> None:
        self._ended[episode.prompt.group].append(episode)
        self._bell.ring()

    def whole(self, group: int) -> bool:
        return len(self._ended[group]) == self._spec.rl.group_size

    def any_whole(self, groups: Collection[int]) -> bool:
        return any(map(self.whole, groups))

    # ------------------------------------------------------------ grades

    def ungraded(self, worker: int) -> list[int]:
        return [group for group in self.groups_of(worker) if group not in self._samples]

    def grade_inputs(self, groups: Collection[int]) -> list[GradeInput]:
        """What graders read, group by group, sample by sample: of an episode the last turn. Episodes that
        failed are left out.
        """
        return [
            GradeInput(episode.prompt.item, batches.last_turn(episode.sequence, self._tokenizer))
            for group in groups
            for episode in self._in_order(group)
            if episode.error is None
        ]

    def take_grades(self, groups: Collection[int], grades: Sequence[GradeResult]) -> None:
        """The grades of ``grade_inputs(groups)``; none where the job has no grader."""
        left = iter(grades)
        for group in groups:
            self._samples[group] = [
                self._sample(episode, next(left, None) if episode.error is None else None)
                for episode in self._in_order(group)
            ]
            self._replace(group)
        self._bell.ring()

    def _in_order(self, group: int) -> list[Episode]:
        return sorted(self._ended[group], key=lambda episode: episode.key)

    def _sample(self, episode: Episode, grade: GradeResult | None) -> Sample:
        error = episode.error or _grade_error(grade)
        parts = {} if error is not None else _parts(episode, grade)
        reward = None if error is not None else _reward(episode, grade)
        if reward is not None and not math.isfinite(reward):
            error = SampleError("environment", "bad_reward", f"the rewards of the turns sum to {reward}")
            reward, parts = None, {}
        trained_by = reward
        if reward is not None and self._spec.rl.overlong_buffer:
            trained_by = shaped(self._spec.rl, reward, len(episode.sequence.tokens))
            parts[OVERLONG] = trained_by - reward
        return Sample(
            prompt=episode.prompt,
            rollout=episode.sequence,
            text=batches.transcript(episode.sequence, self._tokenizer),
            reward=reward,
            shaped=trained_by,
            error=error,
            parts=parts,
            turn_rewards=episode.turn_rewards if reward is not None else {},
            turns=episode.turns,
            calls=episode.calls,
            failed_calls=episode.failed_calls,
            grade_seconds=None if grade is None else grade.seconds,
        )

    def graded(self, groups: Collection[int] | None = None) -> bool:
        """Whether those groups, or all of the step, have their grades and stay."""
        return all(group in self._samples for group in (self._ended if groups is None else groups))

    def samples(self, groups: Collection[int] | None = None) -> list[Sample]:
        """Of graded groups, by group and index."""
        names = sorted(self._samples if groups is None else groups)
        return [sample for group in names for sample in self._samples[group]]

    def all_samples(self) -> list[Sample]:
        """Those of replaced groups as well."""
        return [*self._replaced, *self.samples()]

    def failures(self) -> str:
        """What to say of samples without a reward; empty when there are none. Raises ``GraderFailed`` at too
        many.
        """
        graded = self.all_samples()
        failed = [sample.error for sample in graded if sample.error is not None]
        if not failed:
            return ""
        text = f"{len(failed)} of {len(graded)} samples have no reward"
        if len(failed) > self._spec.rl.max_grade_errors * len(graded):
            raise GraderFailed(f"{text} at step {self.step + 1}; the first: {failed[0]}")
        return f"Step {self.step + 1}: {text}; the first: {failed[0]}"


def _grade_error(grade: GradeResult | None) -> SampleError | None:
    if grade is None:
        return None
    if grade.score is None:
        return SampleError("grader", str(grade.error_type or "error"), grade.error or "no score")
    if not math.isfinite(grade.score):
        return SampleError("grader", "bad_score", f"the score is {grade.score}")
    return None


def _reward(episode: Episode, grade: GradeResult | None) -> float:
    """The grade, and what the environment gave for turns: nothing for none."""
    given = sum(episode.turn_rewards.values())
    return given if grade is None or grade.score is None else grade.score + given


def _parts(episode: Episode, grade: GradeResult | None) -> dict[str, float]:
    """What the reward is made of, where that is more than one number."""
    parts: Mapping[str, float] = {} if grade is None else grade.parts
    if grade is None or grade.score is None or not episode.turn_rewards:
        return dict(parts)
    return {**parts, GRADER: grade.score, ENVIRONMENT: sum(episode.turn_rewards.values())}
