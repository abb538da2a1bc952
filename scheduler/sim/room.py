"""Which jobs could never run: they would keep a simulation waiting for ever."""

from __future__ import annotations

from scheduler.core.board import Board
from scheduler.core.plan import decide
from scheduler.core.state import POLICIES, Device, Policy, RefusalCode, Tenant
from scheduler.sim.nature import Measured
from scheduler.sim.scenario import Scenario, streamed

NEVER = frozenset({RefusalCode.NEVER_FITS_DEVICES, RefusalCode.NEVER_FITS_MEMORY})


def hopeless(scenario: Scenario) -> dict[str, str]:
    """By job why not, whether jobs are multiplexed or not; quotas apart."""
    return {
        **_refused(scenario, POLICIES["exclusive"]),
        **_refused(streamed(scenario), POLICIES["lookahead"]),
    }


def _refused(scenario: Scenario, policy: Policy) -> dict[str, str]:
    """Asks the planner, at a time when nothing else is there."""
    nature = Measured(scenario)
    board = Board(0.0, 0, {nature.device_type: nature.table}, policy.shares)
    for name in scenario.device_names:
        board.set_device(Device(name, nature.device_type, nature.memory_bytes))
    board.tenants = {tenant: Tenant(tenant) for tenant in scenario.tenants}
    for job in scenario.jobs:
        board.submit(nature.queued(job))
    refusals = decide(board, policy).refusals
    return {refusal.job: refusal.text for refusal in refusals if refusal.job and refusal.code in NEVER}
