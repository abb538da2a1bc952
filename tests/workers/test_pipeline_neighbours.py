"""A job alone, and beside three others on the same residents: the same tokens and the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.workers.local import Cluster, device, of_kind, run, running, same_weights, texts
from workers.pipeline import Pipeline
from workers.protocol import Ended, Merge, Offer, SubStageKind
from workers.residents.rollout import RolloutResident

#: Devices on which a batch is a tail from its first token on.
HERE, THERE = (device(f"local/cpu{index}", saturation=64) for index in range(2))
RL = {"steps": 3, "sample_groups": 4, "sampling": {"max_tokens": 60, "stop": list("abcd")}}
MINE = {**RL, "devices": 2, "prompts_per_step": 4, "group_size": 4}
GAME = {"environment": {"type": "guessing_game", "max_turns": 3, "turn_tokens": 10}}
OTHERS = {
    "ahead": (HERE, {"rl": {**RL, "mode": {"type": "async"}}}),
    "player": (THERE, {"rl": RL, "spec": GAME}),
    "larger": (
        THERE,
        {"rl": {**RL, "group_size": 8, "tuning": {"type": "lora", "rank": 4}}, "streams": True},
    ),
}


def mine_on(offer: Offer):
    return (HERE, THERE)[offer.worker]


class Merging:
    """Moves the job's sequences of each step to worker 0, as soon as both workers decode."""

    def __init__(self, cluster: Cluster, made: Pipeline) -> None:
        self.made = made
        self.loop = asyncio.get_running_loop()
        self.ordered: dict[str, str] = {}  # by step, the source's node
        cluster.may_step = self.may_step

    def may_step(self, name: str, left: int) -> bool:
        """Both wait for the other to decode, and then until one has left."""
        tails = {node.split(".")[1]: node for node in running(self.made, SubStageKind.TAIL)}
        own = tails.get("w0" if name == HERE.name else "w1")
        if own is None:
            return True
        step = own.split(".")[0]
        if step in self.ordered:
            return self.ordered[step] not in tails.values()
        if len(tails) < 2:
            return any(roller.over for roller in self._rollers_of(step))
        self.ordered[step] = tails["w1"]
        order = Merge(action_id=f"m{step}", sources=(tails["w1"],), target=tails["w0"])
        asyncio.run_coroutine_threadsafe(self.made.order(order), self.loop)
        return False

    def _rollers_of(self, step: str):
        rollers = self.made._rollers._rollers
        return [roller for (number, _), roller in list(rollers.items()) if f"s{number}" == step]


def test_neighbours_change_no_token_and_no_weight(start, cluster, monkeypatch):
    """Alone on two devices; and there in the batches of three others, moved in every step."""
    alone = asyncio.run(run(start("alone", MINE), place=mine_on))
    batches: list[set[str]] = []
    advance = RolloutResident._advance

    def watch(self, keys: Sequence[str]) -> None:
        batches.append(set(keys))
        advance(self, keys)

    monkeypatch.setattr(RolloutResident, "_advance", watch)
    moved: dict[str, str] = {}

    async def packed():
        made = start("packed", MINE)
        merging = Merging(cluster, made)
        others = [
            run(start(name, **fields), lambda offer, on=on: on) for name, (on, fields) in OTHERS.items()
        ]
        found = await asyncio.gather(run(made, place=mine_on), *others)
        moved.update(merging.ordered)
        return found

    beside, *others = asyncio.run(packed())
    assert all(of_kind(reports, Ended)[0].outcome == "succeeded" for reports in others)
    assert list(moved) == ["s0", "s1", "s2"]
    for other in OTHERS:
        assert any({"packed.1", f"{other}.1"} <= keys for keys in batches), f"fused with {other}"
    assert texts(alone) == texts(beside)
    assert same_weights(alone, beside)
    assert cluster.runs() == []
