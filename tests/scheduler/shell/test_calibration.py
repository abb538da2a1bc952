"""Which devices may be measured, and that what was measured stays."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from backend.jobs.models import Attempt
from backend.pool.models import Device, DeviceCalibration, Placement
from backend.pool.services import DeviceSeen
from backend.pool.states import DeviceState
from scheduler.shell import calibration
from scheduler.shell.calibrated import Calibrated, calibrated, type_name
from scheduler.shell.calibration import (
    NotMeasurable,
    all_measured,
    as_measured,
    calibration_store,
    device_named,
    held,
    measured_types,
    model_named,
    one_of_each_type,
    pool_look,
)
from tests import factories
from tests.backend.metering.conftest import ada, finish, grant
from workers import launch
from workers.calibrate import processes
from workers.launch import NodeSeen
from workers.protocol import Calibration, Rates

__all__ = ["ada"]

pytestmark = pytest.mark.django_db

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
CHARACTERS = ("prefill", "decode", "tail", "thin", "logprob", "update", "sync")


def values(saturation: int = 32, disturbed: float | None = 0.0) -> Calibration:
    return Calibration(
        shares=(0.5, 1.0),
        alone=dict.fromkeys(CHARACTERS, (1.25, 1.0)),
        beside={"update|decode": 1.1},
        saturation_batch=saturation,
        rates=Rates(
            prefill_s=1e-3,
            decode_floor_s=0.05,
            decode_row_s=0.002,
            logprob_s=1e-3,
            update_s=4e-3,
            sync_s=0.05,
        ),
        parameters=1_000_000,
        source="a test",
        disturbed=disturbed,
    )


def look(cpus: int = 2) -> list[Device]:
    node = NodeSeen("n", "f" * 56, "127.0.0.1", cpus, 0, "", 8 << 30)
    pool_look([node], NOW)
    return list(Device.objects.select_related("node").order_by("name"))


@pytest.fixture
def devices(settings) -> list[Device]:
    settings.CPU_DEVICE_THREADS = 1
    return look()


# ---------------------------------------------------------------- the result


def test_what_was_measured_is_what_the_planner_reads(devices: list[Device]) -> None:
    calibration_store(device=devices[0], model="tiny", values=values(), now=NOW)
    seen = calibrated(Calibrated())
    table = seen.tables[type_name(devices[0])]
    assert table.saturation == 32
    assert seen.of_model[type_name(devices[0]), "tiny"] == values()
    assert measured_types() == {(devices[0].type, 1)}


def test_measuring_again_replaces(devices: list[Device]) -> None:
    calibration_store(device=devices[0], model="tiny", values=values(), now=NOW)
    calibration_store(device=devices[1], model="tiny", values=values(64), now=NOW)
    calibration_store(device=devices[1], model="other", values=values(16), now=NOW + timedelta(seconds=1))
    assert DeviceCalibration.objects.get(base_model="tiny").values["saturation_batch"] == 64
    assert DeviceCalibration.objects.count() == 2


def test_the_saturation_batch_survives_a_new_announcement(devices: list[Device]) -> None:
    """Of all devices of the type, also of those that join later; others keep their default."""
    default = devices[0].saturation_batch
    calibration_store(device=devices[0], model="tiny", values=values(64), now=NOW)
    assert [device.saturation_batch for device in look(cpus=3)] == [64, 64, 64]
    assert default != 64
    of_gpu = DeviceSeen(0, "gpu", "H200", 1, 1 << 30, 128)
    assert as_measured([of_gpu]) == [of_gpu]


# ---------------------------------------------------------------- which model, which device


def test_the_built_in_model_else_the_smallest_on_disk(tmp_path: Path) -> None:
    with pytest.raises(NotMeasurable, match="no model of the service is on disk"):
        model_named(None)
    large = factories.base_model(tmp_path / "large", name="large")
    large.parameters = 10**9
    large.save()
    small = factories.base_model(tmp_path / "small", name="small")
    factories.base_model(tmp_path / "private", of=factories.organization())
    assert model_named(None) == small
    assert model_named("large") == large
    built_in = factories.base_model(tmp_path / "built-in", name=calibration.BUILT_IN)
    assert model_named(None) == built_in
    (tmp_path / "built-in").rename(tmp_path / "elsewhere")
    assert model_named(None) == small
    with pytest.raises(NotMeasurable, match=f"no model {calibration.BUILT_IN} of the service is on disk"):
        model_named(calibration.BUILT_IN)


def test_one_device_of_each_type_a_free_one(devices: list[Device], ada: Attempt) -> None:
    first, second = devices
    assert one_of_each_type() == [first]
    grant(ada, first, 0)
    assert one_of_each_type() == [second]
    grant(ada, second, 0)
    assert one_of_each_type() == [first]
    assert one_of_each_type(without={(first.type, 1)}) == []
    Device.objects.update(state=DeviceState.LOST)
    assert one_of_each_type() == []


def test_a_start_without_anything_new_needs_no_cluster(devices: list[Device], settings) -> None:
    assert not all_measured()
    calibration_store(device=devices[0], model="tiny", values=values(), now=NOW)
    assert all_measured()
    call_command("calibrate_pool", first=True)
    settings.CPU_DEVICE_THREADS = 2
    assert not all_measured()
    Device.objects.all().delete()
    assert not all_measured()


@pytest.mark.parametrize(
    ("disturbed", "known"), [(0.0, True), (0.1, True), (0.11, False), (0.9, False), (None, True)]
)
def test_what_others_disturbed_is_used_but_measured_again(
    devices: list[Device], disturbed: float | None, known: bool
) -> None:
    calibration_store(device=devices[0], model="tiny", values=values(disturbed=disturbed), now=NOW)
    assert all_measured() == known
    assert bool(one_of_each_type(without=measured_types())) != known
    assert type_name(devices[0]) in calibrated(Calibrated()).tables


def test_one_calm_measurement_of_a_type_is_enough(devices: list[Device]) -> None:
    """Also one from before it was known how disturbed it was."""
    calibration_store(device=devices[0], model="tiny", values=values(disturbed=0.5), now=NOW)
    row = calibration_store(device=devices[0], model="other", values=values(), now=NOW)
    assert all_measured()
    del row.values["disturbed"]
    row.save()
    assert all_measured()


def test_the_command_says_when_it_was_disturbed(
    devices: list[Device], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    factories.base_model(tmp_path / "tiny", name="tiny")
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")
    monkeypatch.setattr(launch, "connect", lambda address: None)
    monkeypatch.setattr(launch, "disconnect", lambda: None)
    monkeypatch.setattr(processes, "calibrate", lambda *_args, **_names: values(disturbed=0.25))
    call_command("calibrate_pool", short=True)
    said = capsys.readouterr().out
    assert "n/cpu0 was busy with other programs: 25% of the time" in said
    assert "25.0% of the time" in said
    assert measured_types() == set()
    monkeypatch.setattr(processes, "calibrate", lambda *_args, **_names: values(disturbed=0.02))
    call_command("calibrate_pool", short=True)
    said = capsys.readouterr().out
    assert "busy with other programs" not in said
    assert "2.0% of the time" in said


def test_without_a_model_the_command_says_so(devices: list[Device]) -> None:
    with pytest.raises(CommandError, match="no model of the service is on disk"):
        call_command("calibrate_pool", first=True, short=True)


def test_a_device_that_is_not_there(devices: list[Device]) -> None:
    assert device_named("n/cpu1") == devices[1]
    with pytest.raises(NotMeasurable, match="there is no device n/cpu9"):
        device_named("n/cpu9")


# ---------------------------------------------------------------- a device to oneself


def draining(device: Device) -> bool:
    return Device.objects.get(pk=device.pk).draining


def test_new_work_is_kept_away_and_let_in_again(devices: list[Device]) -> None:
    with pytest.raises(ZeroDivisionError), held(devices[0], drain=True, wait_s=0, force=False):
        assert [draining(device) for device in devices] == [True, False]
        raise ZeroDivisionError
    assert not draining(devices[0])


def test_what_an_operator_drained_stays_drained(devices: list[Device]) -> None:
    Device.objects.filter(pk=devices[0].pk).update(draining=True)
    with held(device_named("n/cpu0"), drain=True, wait_s=0, force=False):
        pass
    assert draining(devices[0])


def test_before_a_scheduler_leads_nothing_is_drained(devices: list[Device]) -> None:
    with held(devices[0], drain=False, wait_s=0, force=False):
        assert not draining(devices[0])


def test_a_busy_device_is_refused_unless_forced(devices: list[Device], ada: Attempt) -> None:
    substage = grant(ada, devices[0], 0)
    with (
        pytest.raises(NotMeasurable, match=f"n/cpu0 computes for {ada.job.public_id}"),
        held(devices[0], drain=True, wait_s=0, force=False),
    ):
        pass
    assert not draining(devices[0])
    with held(devices[0], drain=True, wait_s=0, force=True):
        pass
    finish(substage, 0, 1)
    Placement.objects.create(attempt=ada, device=devices[0], worker=0, opened_at=NOW)
    with pytest.raises(NotMeasurable), held(devices[0], drain=True, wait_s=0, force=False):
        pass


def test_it_waits_for_a_device_to_become_free(
    devices: list[Device], ada: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    substage = grant(ada, devices[0], 0)
    asked: list[float] = []

    def pause(seconds: float) -> None:
        asked.append(seconds)
        assert draining(devices[0])
        finish(substage, 0, 1)

    monkeypatch.setattr(calibration.time, "sleep", pause)
    with held(devices[0], drain=True, wait_s=600, force=False):
        assert len(asked) == 1


@pytest.mark.parametrize("gone", ["device", "node"])
def test_a_lost_device_is_refused_even_if_forced(devices: list[Device], gone: str) -> None:
    if gone == "device":
        Device.objects.update(state=DeviceState.LOST)
    else:
        devices[0].node.alive = False
        devices[0].node.save()
    with (
        pytest.raises(NotMeasurable, match="n/cpu0 is lost"),
        held(devices[0], drain=True, wait_s=600, force=True),
    ):
        pass
