"""A tenant's server as an environment: ``workers.spec.RemoteEnvironment``."""

from __future__ import annotations

from workers.envs.answers import observation_of
from workers.envs.environment import Beginning, Observation
from workers.envs.problems import EpisodeFailed, EpisodeFailure
from workers.outside import Door, OutsideError, Trouble
from workers.spec import RemoteEnvironment as Settings

KINDS = {
    Trouble.TIMEOUT: EpisodeFailure.TIMEOUT,
    Trouble.TOO_LARGE: EpisodeFailure.BAD_ANSWER,
    Trouble.NOT_JSON: EpisodeFailure.BAD_ANSWER,
}


class RemoteEnvironment:
    def __init__(self, settings: Settings, beginning: Beginning) -> None:
        self._settings, self._beginning = settings, beginning
        self._turn = 0

    async def step(self, turn: str) -> Observation:
        """A request that is tried again has the same ``turn``, so that the server can tell."""
        self._turn += 1
        beginning, settings = self._beginning, self._settings
        body = {
            "run": beginning.helpers.run_key,
            "episode": beginning.name,
            "seed": beginning.seed,
            "item": beginning.item,
            "turn": self._turn,
            "text": turn,
        }
        secret = beginning.helpers.secrets.get(settings.secret)
        if secret is None:
            raise EpisodeFailed(EpisodeFailure.UNREACHABLE, f"there is no secret {settings.secret!r}")
        try:
            async with Door(settings.url) as door:
                answer = await door.post(body, timeout_s=settings.timeout_s, signing_secret=secret)
        except OutsideError as error:
            kind = KINDS.get(error.kind, EpisodeFailure.UNREACHABLE)
            raise EpisodeFailed(kind, str(error)) from None
        return observation_of(answer)
