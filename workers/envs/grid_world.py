"""A small map in text, walked by words: ``workers.spec.GridWorld``."""

from __future__ import annotations

import re
from collections import deque

from workers.envs.environment import Beginning, Observation
from workers.envs.problems import EnvironmentProblem
from workers.spec import GridWorld as Settings

Place = tuple[int, int]

MOVES: dict[str, Place] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
WORD = re.compile(r"[a-z]+")
#: Moves of one turn that count.
MOVES_PER_TURN = 16
MAX_CELLS = 4_096
#: What all of the way is worth before the goal is reached.
WAY = 0.5


class GridWorld:
    def __init__(self, settings: Settings, beginning: Beginning) -> None:
        self._rows = _rows(beginning.item.get(settings.map_field), settings.map_field)
        self._at, self._goal = (
            _only(self._rows, "S", settings.map_field),
            _only(self._rows, "G", settings.map_field),
        )
        self._away = _distances(self._rows, self._goal)
        if self._at not in self._away:
            raise EnvironmentProblem(f"{settings.map_field} has no way from S to G")
        self._whole = self._away[self._at]
        self._given = 0.0

    async def step(self, turn: str) -> Observation:
        """The map as it is now; the reward is the way that the turn has come nearer, or gone back."""
        moves = [word for word in WORD.findall(turn.lower()) if word in MOVES][:MOVES_PER_TURN]
        for move in moves:
            self._move(MOVES[move])
            if self._at == self._goal:
                return Observation(None, 1.0 - self._given)
        worth = WAY * (1 - self._away[self._at] / self._whole)
        reward, self._given = worth - self._given, worth
        said = "" if moves else "Say up, down, left or right.\n"
        return Observation(said + self._shown(), reward)

    def _move(self, move: Place) -> None:
        there = self._at[0] + move[0], self._at[1] + move[1]
        if there in self._away:
            self._at = there

    def _shown(self) -> str:
        """``@`` is where the model stands."""
        rows = [list(row.replace("S", ".")) for row in self._rows]
        rows[self._at[0]][self._at[1]] = "@"
        return "\n".join(map("".join, rows))


def _rows(text: object, name: str) -> list[str]:
    if not isinstance(text, str):
        raise EnvironmentProblem(f"{name} must be a text")
    rows = text.strip("\n").split("\n")
    if len({len(row) for row in rows}) > 1 or len(text) > MAX_CELLS:
        raise EnvironmentProblem(
            f"{name} needs lines of the same length, of {MAX_CELLS:,} cells at most in all"
        )
    if set(text) - set("#.SG\n"):
        raise EnvironmentProblem(f"{name} may hold '#', '.', 'S' and 'G' only")
    return rows


def _only(rows: list[str], mark: str, name: str) -> Place:
    places = [(y, x) for y, row in enumerate(rows) for x, cell in enumerate(row) if cell == mark]
    if len(places) != 1:
        raise EnvironmentProblem(f"{name} needs one {mark}, and has {len(places)}")
    return places[0]


def _distances(rows: list[str], goal: Place) -> dict[Place, int]:
    """Moves to the goal, from everywhere it can be reached from."""
    away, near = {goal: 0}, deque([goal])
    while near:
        y, x = near.popleft()
        for dy, dx in MOVES.values():
            there = y + dy, x + dx
            inside = 0 <= there[0] < len(rows) and 0 <= there[1] < len(rows[0])
            if inside and there not in away and rows[there[0]][there[1]] != "#":
                away[there] = away[y, x] + 1
                near.append(there)
    return away
