"""A tenant's own class in the sandbox: ``workers.spec.OwnEnvironment``.

Its object lives in a process that may end between two turns. So each call brings all turns of the episode: a
process that knows the episode takes the last, another builds the object anew and takes them all.
"""

from __future__ import annotations

import hashlib

from workers.envs.answers import observation_of
from workers.envs.environment import Beginning, Observation
from workers.envs.problems import EpisodeFailed, EpisodeFailure
from workers.sandbox.pool import check_source
from workers.sandbox.process import FailureKind
from workers.spec import OwnEnvironment as Settings

WANTED = ("Environment.__init__(item, seed)", "Environment.step(turn)")
#: Stands behind the tenant's source, so that lines keep their numbers.
HARNESS = """

_jigsaw_episodes = {}


def _jigsaw_step(episode, item, seed, turns):
    environment, heard = _jigsaw_episodes.pop(episode, (None, 0))
    if environment is None or heard != len(turns) - 1:
        environment, heard = Environment(item, seed), 0
    answer = None
    for turn in turns[heard:]:
        answer = environment.step(turn)
    _jigsaw_episodes[episode] = environment, len(turns)
    while len(_jigsaw_episodes) > 256:
        del _jigsaw_episodes[next(iter(_jigsaw_episodes))]
    return answer
"""
KINDS = {
    FailureKind.TIMEOUT: EpisodeFailure.TIMEOUT,
    FailureKind.CRASHED: EpisodeFailure.CRASHED,
    FailureKind.MEMORY: EpisodeFailure.CRASHED,
    FailureKind.SANDBOX: EpisodeFailure.SANDBOX,
    FailureKind.BAD_VALUE: EpisodeFailure.BAD_ANSWER,
}


def check_environment(source: str) -> None:
    """Refuse a source that does not compile or has no such class; ``ValueError`` names the line."""
    check_source(source, WANTED)


class OwnEnvironment:
    def __init__(self, settings: Settings, beginning: Beginning) -> None:
        self._settings, self._beginning = settings, beginning
        self._turns: list[str] = []

    async def step(self, turn: str) -> Observation:
        self._turns.append(turn)
        beginning = self._beginning
        seed = int.from_bytes(hashlib.sha256(beginning.name.encode()).digest()[:4]) >> 1
        result = await beginning.helpers.run(
            self._settings.source + HARNESS,
            "_jigsaw_step",
            [beginning.name, beginning.item, seed, self._turns],
            self._settings.timeout_s,
            apart="",
        )
        if result.error is not None:
            kind = EpisodeFailure.EXCEPTION if result.kind is None else KINDS.get(result.kind)
            raise EpisodeFailed(kind or EpisodeFailure.EXCEPTION, result.error)
        return observation_of(result.value)
