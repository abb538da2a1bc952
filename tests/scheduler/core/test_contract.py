"""What the core promises to the rest: standard library only, the same words, clear refusals of bad rows."""

import subprocess
import sys
import time

import pytest

from scheduler.core.plan import plan
from scheduler.core.state import OFF_DEVICE, Device, Kind, Pipeline, Policy, QueuedJob, Snapshot, Tenant
from tests.scheduler.core.build import decide, device, job, node, pipeline, placed
from workers.protocol import SubStageKind

IMPORTS = """
import importlib, pkgutil, sys
before = set(sys.modules)
import scheduler.core
for module in pkgutil.iter_modules(scheduler.core.__path__):
    importlib.import_module("scheduler.core." + module.name)
foreign = {name.split(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names - {"scheduler"}
assert "scheduler.core.plan" in sys.modules
sys.exit(f"not of the standard library: {sorted(foreign)}" if foreign else 0)
"""


def test_the_core_imports_only_the_standard_library():
    result = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_kinds_are_those_of_the_protocol():
    assert {k.name: k.value for k in Kind} == {k.name: k.value for k in SubStageKind}
    assert {k.value for k in SubStageKind if not k.needs_device} == OFF_DEVICE


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="policy 'nope' is not one of exclusive"):
        plan(Snapshot(now=0), Policy(name="nope"))


def test_rows_that_cannot_be_read_are_named():
    devices = (device("d1"),)
    with pytest.raises(ValueError, match="j: tenant 5 is not in the snapshot"):
        plan(Snapshot(now=0, devices=devices, queue=(job("j", tenant=5),)), Policy())
    with pytest.raises(ValueError, match="tenant 1: weight is 0"):
        plan(Snapshot(now=0, devices=devices, tenants=(Tenant(1, weight=0.0),)), Policy())
    with pytest.raises(ValueError, match="j: devices is 0"):
        plan(Snapshot(now=0, devices=devices, tenants=(Tenant(1),), queue=(job("j", devices=0),)), Policy())


def test_nodes_of_attempts_that_are_gone_are_ignored():
    snapshot = Snapshot(now=0, devices=(device("d1"),), tenants=(Tenant(1),), nodes=(node(9),))
    assert plan(snapshot, Policy()).actions == ()


def test_a_pipeline_may_name_a_device_that_is_gone():
    snapshot = Snapshot(
        now=0,
        devices=(device("d1"),),
        tenants=(Tenant(1),),
        pipelines=(pipeline(1, "gone"),),
        nodes=(node(1),),
    )
    assert placed(decide(snapshot)) == {1: "d1"}


def large_snapshot(keys: int) -> Snapshot:
    """1,024 devices, 512 pipelines of which half hold and half want a turn, 1,000 queued jobs."""
    devices = tuple(Device(f"d{i:04}", "gpu", 80) for i in range(1024))
    pipelines = []
    for i in range(512):
        home = f"d{(i // 2) * 2:04}"  # two to a device: one holds, one must move
        pipelines.append(
            Pipeline(
                id=i,
                job=f"p{i}",
                tenant=i % 50,
                submitted=float(i),
                devices=1,
                weights_key=f"k{i % keys}",
                weights_bytes=20,
                run_bytes=5,
                home=(home,),
                holds=(home,) if i % 2 else (),
            )
        )
    queue = tuple(
        QueuedJob(f"j{i}", i % 50, float(i), 1 + 7 * (i % 10 == 0), f"k{i % keys}", 20, 5)
        for i in range(1000)
    )
    return Snapshot(
        now=0.0,
        devices=devices,
        tenants=tuple(Tenant(i, weight=1.0 + i % 3) for i in range(50)),
        queue=queue,
        pipelines=tuple(pipelines),
        nodes=tuple(node(p.id) for p in pipelines),
    )


@pytest.mark.parametrize("keys", [1, 400])
def test_a_large_pool_is_planned_in_well_under_a_second(keys):
    snapshot = large_snapshot(keys)
    started = time.process_time()
    decided = plan(snapshot, Policy())
    assert time.process_time() - started < 1.0
    assert len(decided.actions) > 1000
