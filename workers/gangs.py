"""The trainers of a run on the devices of their grants: all workers together, part by part of the chain."""

from __future__ import annotations

from collections.abc import Mapping

from workers.calls import together
from workers.fleet import Fleet
from workers.grants import Desk, Gang, Lease
from workers.pieces import Compute, Load
from workers.protocol import SubStageKind


class Trainers:
    def __init__(self, desk: Desk, fleet: Fleet, chain: tuple[SubStageKind, ...]) -> None:
        self._desk, self._fleet, self._chain = desk, fleet, chain

    def _part(self, kind: SubStageKind) -> int:
        """The place of the kind in the chain; of UPDATE the last, which is not early."""
        return max(place for place, other in enumerate(self._chain) if other is kind)

    async def enter(
        self, gang: Gang | None, kind: SubStageKind, step: int, sequences: Mapping[int, int]
    ) -> Gang:
        """Cross into the next part, or offer it where nothing is held."""
        part = self._part(kind)
        if gang is None:
            return await self._hold(await self._desk.gang(kind, step, sequences, part=part))
        return await self._hold(await self._desk.cross_gang(gang, kind, sequences, part=part))

    async def enter_early(self, step: int, sequences: Mapping[int, int]) -> Gang:
        """Begin to update while others of the step roll out."""
        part = self._chain.index(SubStageKind.UPDATE)
        offered = await self._desk.gang(SubStageKind.UPDATE, step, sequences, part=part, early=True)
        return await self._hold(offered)

    async def _hold(self, gang: Gang) -> Gang:
        """Bring the trainers to the gang's devices."""
        for worker, lease in gang.items():
            lease.resident = await self._fleet.train(worker, lease.device)
        return gang

    def finish(self, gang: Gang) -> None:
        for worker in gang:
            self._fleet.trained(worker)
        self._desk.finish(*gang.values())

    async def work(self, gang: Gang, load: Load, compute: Compute) -> Gang:
        """Take the pieces through the trainers, also where the gang has to make room in between."""

        async def go_on(worker: int, lease: Lease) -> None:
            while load.now[worker] and not lease.leaving:
                await compute(lease, load.now[worker])

        while any(load.now.values()):
            await together(*(go_on(worker, lease) for worker, lease in gang.items()))
            if any(load.now.values()):
                gang = await self._offer_again(gang, load.left())
        return gang

    async def _offer_again(self, gang: Gang, left: Mapping[int, float]) -> Gang:
        offer = next(iter(gang.values())).offer
        sequences = {worker: lease.offer.sequences for worker, lease in gang.items()}
        self.finish(gang)
        again = await self._desk.gang(
            offer.kind,
            offer.step,
            sequences,
            part=offer.part,
            left=left,
            early=offer.early,
            yielded=True,
        )
        return await self._hold(again)


def kind_of(gang: Gang) -> SubStageKind:
    return next(iter(gang.values())).offer.kind
