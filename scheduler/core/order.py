"""Who comes first: the tenant with the least virtual time, and among its own work the order of ``rank``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import TypeVar

from scheduler.core.state import Pipeline, QueuedJob, Tenant

Work = TypeVar("Work", QueuedJob, Pipeline)

#: A tenant's place between tenants; lower is earlier, then the lower tenant id.
Clock = tuple[float, float]


def rank(work: QueuedJob | Pipeline) -> tuple[int, float, str, int]:
    """Order inside one tenant: higher priority, earlier submitted, id. Total: ids are unique."""
    if isinstance(work, Pipeline):
        return -work.priority, work.submitted, "", work.id
    return -work.priority, work.submitted, work.id, 0


def fair_order(work: Iterable[Work], clocks: dict[int, Clock]) -> Iterator[Work]:
    """Hand out the work one by one.

    The caller raises ``clocks`` of the item's tenant by what it gave, before it asks for the next.
    """
    of_tenant: dict[int, list[Work]] = defaultdict(list)
    for item in work:
        of_tenant[item.tenant].append(item)
    for own in of_tenant.values():
        own.sort(key=rank, reverse=True)
    heap = [(clocks[tenant], tenant) for tenant in of_tenant]
    heapify(heap)
    while heap:
        _, tenant = heappop(heap)
        yield of_tenant[tenant].pop()
        if of_tenant[tenant]:
            heappush(heap, (clocks[tenant], tenant))


def ahead_of(
    waiting: Iterable[Work], clocks: dict[int, Clock], cost: Callable[[Work], float]
) -> Iterator[tuple[Work, int]]:
    """Each waiting item with the number of those that are served before it, if all cost what is expected."""
    clocks = dict(clocks)
    for position, item in enumerate(fair_order(waiting, clocks)):
        yield item, position
        clocks[item.tenant] = later(clocks[item.tenant], cost(item))


def later(clock: Clock, cost: float) -> Clock:
    return clock[0] + cost, clock[1]


def turn_cost(pipeline: Pipeline, tenants: dict[int, Tenant]) -> float:
    """Virtual seconds that one turn is expected to add to its tenant's service."""
    return pipeline.devices * pipeline.step_seconds / tenants[pipeline.tenant].weight


def turn_clocks(pipelines: Iterable[Pipeline], tenants: dict[int, Tenant]) -> dict[int, Clock]:
    """Virtual time per tenant: service received plus the expected cost of the turns it has now."""
    clocks = {tenant.id: (tenant.service, 0.0) for tenant in tenants.values()}
    for pipeline in pipelines:
        if pipeline.holds:
            clocks[pipeline.tenant] = later(clocks[pipeline.tenant], turn_cost(pipeline, tenants))
    return clocks


def admission_clocks(pipelines: Iterable[Pipeline], tenants: dict[int, Tenant]) -> dict[int, Clock]:
    """Devices of a tenant's running pipelines per weight, then the service it received."""
    clocks = {tenant.id: (0.0, tenant.service) for tenant in tenants.values()}
    for pipeline in pipelines:
        cost = pipeline.devices / tenants[pipeline.tenant].weight
        clocks[pipeline.tenant] = later(clocks[pipeline.tenant], cost)
    return clocks
