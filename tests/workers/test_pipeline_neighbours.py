"""A job alone, and beside three others on the same residents: the same tokens and the same weights."""

from __future__ import annotations

import asyncio

from tests.workers.local import of_kind, run, same_weights, texts
from workers.protocol import Ended

RL = {"steps": 3, "sample_groups": 3, "sampling": {"max_tokens": 60, "stop": list("abcd")}}
GAME = {"environment": {"type": "guessing_game", "max_turns": 3, "turn_tokens": 10}}
OTHERS = {
    "ahead": {"rl": {**RL, "mode": {"type": "async"}}},
    "player": {"rl": RL, "spec": GAME},
    "larger": {"rl": {**RL, "group_size": 8, "tuning": {"type": "lora", "rank": 4}}, "streams": True},
}


def test_neighbours_change_no_token_and_no_weight(start, cluster):
    alone = asyncio.run(run(start("alone", RL)))

    async def packed():
        others = [start(name, **fields) for name, fields in OTHERS.items()]
        return await asyncio.gather(*(run(made) for made in [start("packed", RL), *others]))

    beside, *others = asyncio.run(packed())
    assert all(of_kind(reports, Ended)[0].outcome == "succeeded" for reports in others)
    assert texts(alone) == texts(beside)
    assert same_weights(alone, beside)
    assert cluster.runs() == []
