"""Rollouts: a worker's sequences of a step, from their prompts to their ends.

    offer ─► grant ─► ┌ on the device ────────────────────────┐    all ended
      ▲               │ PREFILL → DECODE → TAIL → TAIL → TAIL │ ─► over
      │               └──────────────────┬────────────────────┘
      └─── an answer has come ◄── TOOL ◄─┘ all wait for their environments

Crossing from one part into the next stops nothing: sequences are computed by the engine until they end, and
the roller hears the news of them. A turn that ended goes to the environment; an answer that comes while
others still run joins them. In a merge the source's sequences, running and waiting, go over to the target's
roller, and the source is over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from workers import batches
from workers.calls import CALL_LIMIT_S, Bell, Stuck, call
from workers.chain import PREFILL, TOOL, part_floor, rollout_chain, rollout_part
from workers.envs.conversation import observation_tokens
from workers.envs.environment import Observation
from workers.envs.problems import EpisodeFailed, EpisodeFailure
from workers.fleet import Fleet
from workers.gathering import Episode
from workers.grants import Desk, Lease
from workers.models.chat import ChatTokenizer
from workers.protocol import Merge, SubStageKind
from workers.residents.mailbox import News
from workers.spec import JobSpec

#: Longest time an environment may take over an answer; a backstop, above any ``environment.episode_s``.
ANSWER_LIMIT_S = 4000.0
#: The last part of a tail: from here on, most groups of the step are whole.
THIN = 4
#: A batch that has grown so many times since it was last told of is told of again.
GROWN = 2


@dataclass(frozen=True)
class Tools:
    """What all rollers of a run share."""

    spec: JobSpec
    run_key: str
    desk: Desk
    fleet: Fleet
    bell: Bell
    tokenizer: ChatTokenizer


class Visit:
    """A stay on a device: the news that is awaited from its engine, and what left it before its end."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.news: asyncio.Task[News] | None = None
        self.exported: list[Episode] | None = None
        self._heard = time.monotonic()

    @property
    def told(self) -> bool:
        return self.news is not None and self.news.done()

    @property
    def must_export(self) -> bool:
        return self.lease.leaving and self.exported is None

    def listen(self, news: Coroutine[Any, Any, News], bell: Bell) -> None:
        self.news = asyncio.create_task(news)
        self.news.add_done_callback(lambda _: bell.ring())

    def hear(self) -> News:
        """The news; raises what went wrong, and ``Stuck`` when nothing has been computed for too long."""
        assert self.news is not None
        news, self.news = self.news.result(), None
        if news.started_at is not None:
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > CALL_LIMIT_S:
            raise Stuck(f"no token was made for more than {CALL_LIMIT_S / 60:.0f} minutes")
        return news

    def end(self) -> None:
        """Nobody listens any more, to what went wrong either: something else has."""
        if self.news is not None and not self.news.cancel() and not self.news.cancelled():
            self.news.exception()


class Roller:
    """One worker's rollouts of one step."""

    def __init__(self, tools: Tools, step: int, worker: int, episodes: list[Episode]) -> None:
        self._tools = tools
        self._step, self._worker = step, worker
        self._arriving = episodes  # to be computed, not on an engine
        self._active: dict[tuple[int, ...], Episode] = {}  # on the engine
        self._thinking: dict[asyncio.Task[Observation | EpisodeFailed], Episode] = {}  # at their environments
        self._expected = 0  # merges to here that are under way
        self._target: Roller | None = None
        self._saturation = 0
        self._engine: Any = None
        self.lease: Lease | None = None
        self.part = PREFILL
        self.over = False

    @property
    def thin(self) -> bool:
        """Whether few of its sequences still run, or none."""
        return self.over or self.part >= THIN

    async def run(self) -> None:
        try:
            await self._visit(PREFILL)
            while self._target is None and await self._return():
                await self._visit(rollout_part(len(self._arriving), self._saturation))
        finally:
            for task in self._thinking:
                task.cancel()
        if self._engine is not None and self._tools.spec.environment is not None:
            await call(self._engine.forget, self._tools.run_key)
        self.over = True
        self._tools.bell.ring()

    # ------------------------------------------------------------ on a device

    async def _visit(self, part: int) -> None:
        """Compute from the grant until no sequence is on the device any more."""
        tools, self.part = self._tools, part
        kind = rollout_chain(tools.spec)[part]
        lease = await tools.desk.offer(kind, self._step, self._worker, len(self._arriving), part=part)
        self.lease, self._saturation = lease, lease.device.saturation_batch
        lease.resident = await tools.fleet.roll(self._worker, lease.device)
        visit = Visit(lease)
        try:
            while await self._act(visit):
                await tools.bell.until(lambda: self._stirs(visit))
        finally:
            visit.end()
        tools.fleet.rolled(self._worker)
        self._engine = lease.resident
        self.lease = None
        tools.desk.finish(lease)
        self._arriving += visit.exported or []
        if self._target is not None:
            self._hand_over(self._target)

    async def _act(self, visit: Visit) -> bool:
        """Do what there is to do; whether anything is still expected here."""
        if visit.told:
            self._take(visit.hear(), visit.lease)
        self._collect()
        if visit.must_export:
            visit.exported = await self._export(visit.lease.resident)
        elif self._arriving and not visit.lease.leaving:
            await self._submit(visit.lease)
        if self._active and visit.news is None:
            visit.listen(self._news(visit.lease), self._tools.bell)
        return visit.news is not None or self._expected > 0

    def _stirs(self, visit: Visit) -> bool:
        """Whether there is something to do."""
        return (
            visit.told
            or visit.must_export
            or (bool(self._arriving) and not visit.lease.leaving)
            or any(task.done() for task in self._thinking)
            or (visit.news is None and not self._expected)
        )

    async def _submit(self, lease: Lease) -> None:
        episodes, self._arriving = self._arriving, []
        self._active |= {episode.key: episode for episode in episodes}
        sequences = [episode.sequence for episode in episodes]
        lease.begin()
        await call(lease.resident.submit, self._tools.run_key, sequences, lease.share)

    async def _news(self, lease: Lease) -> News:
        part = lease.offer.part
        floor = 0 if part == PREFILL else part_floor(part, self._saturation)
        news: News = await call(lease.resident.news, self._tools.run_key, floor)
        return news

    def _take(self, news: News, lease: Lease) -> None:
        prefilling = lease.offer.part == PREFILL
        if news.started_at is not None and news.ended_at is not None:
            tokens = news.prompt_tokens if prefilling else news.sampled_tokens
            lease.count(news.started_at, news.ended_at, tokens, 0 if prefilling else news.forwards)
        for rollout in news.finished:
            episode = self._active.pop(rollout.request.key)
            episode.sequence = rollout
            self._end_turn(episode)
        left = len(self._active)
        if left and not lease.leaving and (not prefilling or prefilled(news)):
            self._cross(lease, left, news.cached_tokens)

    def _cross(self, lease: Lease, left: int, cached_tokens: int) -> None:
        """Into a thinner part; or anew, when answers have brought in many: a batch is paid for by rows."""
        part = rollout_part(left, self._saturation)
        if part > lease.offer.part or left >= GROWN * lease.offer.sequences:
            kind, self.part = rollout_chain(self._tools.spec)[part], part
            self._tools.desk.cross(lease, kind, left, part=part, cached_tokens=cached_tokens)
            self._tools.bell.ring()

    # ------------------------------------------------------------ environments

    def _end_turn(self, episode: Episode) -> None:
        if episode.environment is None:
            episode.end()
            return
        task = asyncio.create_task(self._ask(episode))
        task.add_done_callback(lambda _: self._tools.bell.ring())
        self._thinking[task] = episode

    async def _ask(self, episode: Episode) -> Observation | EpisodeFailed:
        """What follows the episode's turn; a failure is the episode's alone."""
        assert episode.environment is not None
        said = batches.last_turn(episode.sequence, self._tools.tokenizer)
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                return await episode.environment.step(said)
        except EpisodeFailed as failure:
            return failure
        except TimeoutError:
            words = f"the environment thought for more than {ANSWER_LIMIT_S:.0f} s"
            return EpisodeFailed(EpisodeFailure.TIMEOUT, words)

    def _collect(self) -> None:
        """Let those go on whose environments have answered; raises what went wrong there."""
        for task in [task for task in self._thinking if task.done()]:
            episode = self._thinking.pop(task)
            found = task.result()
            if isinstance(found, EpisodeFailed):
                episode.failure = found
                episode.end()
            else:
                self._answer(episode, found)

    def _answer(self, episode: Episode, found: Observation) -> None:
        """Write the observation behind the turn, or end the episode: there is none, or no room for it."""
        sequence = episode.sequence
        if found.reward is not None:
            episode.turn_rewards[len(sequence.tokens) - 1] = found.reward
        episode.calls += found.calls
        episode.failed_calls += found.failed_calls
        if found.text is None:
            episode.end()
            return
        tokens = observation_tokens(
            self._tools.tokenizer, episode.prompt.messages, sequence.tokens, found.text
        )
        if len(tokens) >= sequence.left:
            sequence.finish = "length"
            episode.end()
            return
        sequence.answer(tokens)
        episode.turns += 1
        self._arriving.append(episode)

    async def _return(self) -> bool:
        """Wait, off the device, for sequences to compute; False when the rollouts are over."""
        desk, waiting = self._tools.desk, len(self._thinking)
        self._collect()
        if self._thinking and not self._arriving:
            self.part = TOOL
            lease = desk.begin(SubStageKind.TOOL, self._step, self._worker, waiting, part=TOOL)
            while self._thinking and not self._arriving:
                await self._tools.bell.until(lambda: any(task.done() for task in self._thinking))
                self._collect()
            desk.finish(lease)
        return bool(self._arriving)

    # ------------------------------------------------------------ merging

    def leave(self, target: Roller | None) -> None:
        """Stop computing on this device. All that is not over goes on at ``target``; without one it is
        offered again.
        """
        assert self.lease is not None
        self.lease.leaving = True
        if target is not None:
            self._target = target
            target._expected += 1
        self._tools.bell.ring()

    async def _export(self, engine: Any) -> list[Episode]:
        """Those that are unfinished; what has ended by then is told as news."""
        keys = list(self._active)
        taken = await call(engine.export, self._tools.run_key, keys) if keys else []
        episodes = []
        for sequence in taken:
            episode = self._active.pop(sequence.request.key)
            episode.sequence = sequence
            episodes.append(episode)
        return episodes

    def _hand_over(self, target: Roller) -> None:
        target._arriving += self._arriving
        target._thinking |= self._thinking
        target._expected -= 1
        self._arriving, self._thinking = [], {}
        self._tools.bell.ring()


def prefilled(news: News) -> bool:
    """Whether all prompts are computed, or those for which there is no room wait for others to end."""
    return not news.waiting or (not news.prompt_tokens and bool(news.forwards))


class Rollers:
    """The rollers of all workers and of the steps that roll out."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._rollers: dict[tuple[int, int], Roller] = {}

    async def roll(self, step: int, worker: int, episodes: list[Episode]) -> None:
        roller = self._rollers[step, worker] = Roller(self._tools, step, worker, episodes)
        await roller.run()

    def thin(self, step: int) -> bool:
        """Whether all rollouts of the step are in the last part of their tails, or over."""
        rollers = [roller for (other, _), roller in self._rollers.items() if other == step]
        return len(rollers) == self._tools.spec.rl.devices and all(roller.thin for roller in rollers)

    def forget(self, step: int) -> None:
        for key in [key for key in self._rollers if key[0] == step]:
            del self._rollers[key]

    def merge(self, order: Merge) -> None:
        """Sources that are over stay over; without the target, the others make room and are offered again."""
        target = self._on(order.target)
        for node in order.sources:
            source = self._on(node)
            if source is not None and source is not target:
                source.leave(target)

    def _on(self, node: str) -> Roller | None:
        """Whose sub-stage it is, if that is on a device and stays there."""
        lease = self._tools.desk.find(node)
        if lease is None or lease.leaving:
            return None
        return next((roller for roller in self._rollers.values() if roller.lease is lease), None)
