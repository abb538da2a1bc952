"""What was measured on the pool's devices, as the core reads it: tables by type of device, and rates.

Rates belong to a base model; those of another are taken in proportion to the parameters. Where nothing was
measured at all a guess stands in, which the first steps of a job replace.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import ValidationError

from backend.pool.models import Device, DeviceCalibration
from scheduler.core.interference import Character, Interference
from workers.protocol import Calibration, Rates

log = logging.getLogger(__name__)

#: The guess: SmolLM2-135M, bf16, one thread of a CPU device; a GPU computes a hundred times as fast and is
#: bound by launches where it decodes.
GUESS_PARAMETERS = 135_000_000
GUESS = {
    "cpu": Rates(
        prefill_s=1e-3, decode_floor_s=0.06, decode_row_s=1e-3, logprob_s=1.2e-3, update_s=4e-3, sync_s=0.1
    ),
    "gpu": Rates(
        prefill_s=1e-5, decode_floor_s=6e-3, decode_row_s=1e-5, logprob_s=1.2e-5, update_s=4e-5, sync_s=0.1
    ),
}


def type_name(device: Device) -> str:
    """Devices of one type, which is what a table is measured for."""
    return f"{device.type}/{device.threads}"


@dataclass(frozen=True)
class Calibrated:
    """``tables`` by ``type_name``; ``of_model`` by type name and base model."""

    tables: Mapping[str, Interference] = field(default_factory=dict)
    of_model: Mapping[tuple[str, str], Calibration] = field(default_factory=dict)
    stamp: tuple[tuple[int, float], ...] = ()

    def rates(self, type: str, kind: str, base_model: str, parameters: int) -> Rates:
        """Seconds of one worker on a whole device."""
        own = self.of_model.get((type, base_model))
        if own is not None:
            return own.rates
        others = [found for (name, _), found in sorted(self.of_model.items()) if name == type]
        if not others:
            return scaled(GUESS[kind], parameters / GUESS_PARAMETERS)
        nearest = min(others, key=lambda one: abs(one.parameters - parameters))
        return scaled(nearest.rates, parameters / nearest.parameters)


def calibrated(known: Calibrated) -> Calibrated:
    """What is stored now; ``known`` itself where nothing is new, so that what the core remembers stays."""
    stored = DeviceCalibration.objects.order_by("measured_at", "pk")
    stamp = tuple((pk, at.timestamp()) for pk, at in stored.values_list("pk", "measured_at"))
    if stamp == known.stamp:
        return known
    tables: dict[str, Interference] = {}
    of_model: dict[tuple[str, str], Calibration] = {}
    for row in stored:
        type = f"{row.device_type}/{row.threads}"
        try:
            values = Calibration.model_validate(row.values)
            tables[type] = interference(values)
        except (ValidationError, ValueError):
            log.exception("the calibration of %s with %s is not understood", type, row.base_model)
            continue
        of_model[type, row.base_model] = values
    return Calibrated(tables, of_model, stamp)


def interference(values: Calibration) -> Interference:
    """Raises ``ValueError`` for a table that the core refuses."""
    return Interference(
        shares=values.shares,
        alone={Character(name): row for name, row in values.alone.items()},
        beside={
            (Character(one), Character(other)): factor
            for pair, factor in values.beside.items()
            for one, other in [pair.split("|")]
        },
        saturation=values.saturation_batch,
        source=values.source,
    )


def scaled(rates: Rates, times: float) -> Rates:
    return Rates(**{name: seconds * times for name, seconds in rates.model_dump().items()})
