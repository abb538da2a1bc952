"""``grid``: small maps to walk over."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path

from workers.data.builtin.dataset import BuiltinDataset, Row, prompt, recommended, write_rows

Place = tuple[int, int]

ROWS = 120
HEIGHT, WIDTH, WALLS = 3, 4, 2
#: Shortest way to the goal, in moves.
WAYS = range(2, 6)


def grid(folder: Path) -> BuiltinDataset:
    return BuiltinDataset(
        name="grid",
        title="Walk to the goal",
        description="Walk over a small map by words, in three turns; coming nearer is worth something.",
        path=write_rows(folder / "grid.jsonl", grid_rows),
        grader=None,
        environment={"type": "grid_world", "max_turns": 3, "turn_tokens": 12},
        rl=recommended(learning_rate=5e-4, warmup_steps=5, max_tokens=96, algorithm="rloo"),
    )


def grid_rows(rng: random.Random) -> list[Row]:
    """No map comes twice."""
    found: dict[str, Row] = {}
    while len(found) < ROWS:
        start, goal, *walls = rng.sample([(y, x) for y in range(HEIGHT) for x in range(WIDTH)], 2 + WALLS)
        if way(start, goal, walls) in WAYS:
            row = grid_row(start, goal, walls)
            found.setdefault(row["map"], row)
    return list(found.values())


def grid_row(start: Place, goal: Place, walls: list[Place]) -> Row:
    marks = {start: "S", goal: "G", **dict.fromkeys(walls, "#")}
    text = "\n".join("".join(marks.get((y, x), ".") for x in range(WIDTH)) for y in range(HEIGHT))
    # The environment, too, draws "@" where the model stands.
    task = f"{text.replace('S', '@')}\n{where_to(start, goal)}"
    # A walk shows the form; without it, a small model seldom says a move.
    return {
        "messages": prompt(
            "Walk to G. Reply with moves only.",
            f"..G.\n@...\n.##.\n{where_to((1, 0), (0, 2))}",
            "right right up",
            task,
        ),
        "map": text,
    }


def where_to(start: Place, goal: Place) -> str:
    where = " and ".join(
        f"{abs(steps)} {later if steps > 0 else earlier}"
        for steps, later, earlier in (
            (goal[1] - start[1], "right", "left"),
            (goal[0] - start[0], "down", "up"),
        )
        if steps
    )
    return f"You are @. G is {where}. # is a wall."


def way(start: Place, goal: Place, walls: list[Place]) -> int | None:
    """Moves of the shortest way; None when there is none."""
    moves, near = {start: 0}, deque([start])
    while near:
        y, x = near.popleft()
        if (y, x) == goal:
            return moves[goal]
        for there in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
            inside = 0 <= there[0] < HEIGHT and 0 <= there[1] < WIDTH
            if inside and there not in walls and there not in moves:
                moves[there] = moves[y, x] + 1
                near.append(there)
    return None
