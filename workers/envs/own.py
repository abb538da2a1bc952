"""A tenant's own class in the sandbox: ``workers.spec.OwnEnvironment``.

Its object lives in a process that may end between two turns. So each call brings all turns of the episode: a
process that knows the episode takes the last, another builds the object anew and takes them all.
"""

from __future__ import annotations

from workers.envs.answers import observation_of
from workers.envs.environment import Beginning, Observation
from workers.envs.helpers import failure_of
from workers.sandbox.pool import ENVIRONMENT, check_source
from workers.spec import OwnEnvironment as Settings

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


def check_environment(source: str) -> None:
    """Refuse a source that does not compile or has no such class; ``ValueError`` names the line."""
    check_source(source, ENVIRONMENT)


class OwnEnvironment:
    def __init__(self, settings: Settings, beginning: Beginning) -> None:
        self._settings, self._beginning = settings, beginning
        self._turns: list[str] = []

    async def step(self, turn: str) -> Observation:
        self._turns.append(turn)
        beginning = self._beginning
        result = await beginning.helpers.run(
            self._settings.source + HARNESS,
            "_jigsaw_step",
            [beginning.name, beginning.item, beginning.seed, self._turns],
            # Any process of the run may get the call, and one that does not know the episode hears all of it.
            self._settings.timeout_s * len(self._turns),
            apart="",
        )
        if result.error is not None:
            raise failure_of(result)
        return observation_of(result.value)
