"""``manage.py calibrate_pool``: measure how fast the pool's devices are, and what company costs on them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from rich.console import Console
from rich.table import Table

from backend.catalog.models import BaseModel
from backend.pool.models import Device
from infra.embedded import ray_head
from scheduler.shell.calibration import (
    NotMeasurable,
    all_measured,
    calibration_store,
    calm,
    device_named,
    held,
    measured_types,
    model_named,
    one_of_each_type,
    pool_look,
)
from scheduler.shell.orders import device_ref
from workers.protocol import Calibration

#: Columns of the tables, on a terminal or not.
WIDTH = 110


class Command(BaseCommand):
    help = "Measure speeds and mutual slow-downs on each type of device; the planner uses what is found."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--model", help="a model of the service (default: the built-in one)")
        parser.add_argument("--device", help="only this device (default: one of each type)")
        parser.add_argument(
            "--short", action="store_true", help="about twenty seconds instead of two minutes"
        )
        parser.add_argument("--wait", type=float, default=0.0, help="seconds to wait for a busy device")
        parser.add_argument("--force", action="store_true", help="measure although something computes there")
        parser.add_argument("--json", type=Path, dest="file", help="write what was measured to this file")
        parser.add_argument(
            "--first",
            action="store_true",
            help="only types of which nothing is known, or what was measured while other programs computed; "
            "before a scheduler leads: nothing is drained",
        )

    def handle(
        self,
        *,
        model: str | None,
        device: str | None,
        short: bool,
        wait: float,
        force: bool,
        file: Path | None,
        first: bool,
        **_options: object,
    ) -> None:
        if first and all_measured():
            return
        # A device that was drained is given back, however this ends.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with_model = model_named(model)
            found = self._measure(with_model, device, short=short, wait_s=wait, force=force, first=first)
        except NotMeasurable as error:
            raise CommandError(str(error)) from None
        finally:
            signal.signal(signal.SIGTERM, before)
        if file is not None:
            rows = [
                {"device_type": at.type, "threads": at.threads, "base_model": with_model.name}
                | {"values": values.model_dump(mode="json")}
                for at, values in found
            ]
            file.write_text(json.dumps(rows, indent=2) + "\n")
        for at, values in found:
            self._show(f"{at.type}, {at.threads} threads, {with_model.name}", values)

    def _measure(
        self,
        model: BaseModel,
        device: str | None,
        *,
        short: bool,
        wait_s: float,
        force: bool,
        first: bool,
    ) -> list[tuple[Device, Calibration]]:
        if "RAY_ADDRESS" not in os.environ:
            os.environ.update(ray_head.environment(settings.VAR_DIR))
        address = os.environ.get("RAY_ADDRESS")
        if address is None:
            raise NotMeasurable("no Ray cluster: set RAY_ADDRESS, or start everything with `manage.py up`")
        # Ray reads its environment when it is first imported.
        from workers import launch
        from workers.calibrate.processes import CalibrationFailed, calibrate
        from workers.calibrate.work import FULL, SHORT

        launch.connect(address)
        try:
            if first:
                pool_look(launch.nodes(), datetime.now(UTC))
            if device is not None:
                chosen: Sequence[Device] = [device_named(device)]
            else:
                chosen = one_of_each_type(without=measured_types() if first else ())
            found = []
            for at in chosen:
                self._say(f"measuring {at.name} with {model.name}")
                with held(at, drain=not first, wait_s=wait_s, force=force):
                    values = calibrate(
                        device_ref(at),
                        type_name=at.type,
                        model=model.name,
                        model_path=model.path,
                        effort=SHORT if short else FULL,
                        say=self._say,
                    )
                calibration_store(device=at, model=model.name, values=values, now=datetime.now(UTC))
                if not calm(values.disturbed):
                    self._say(
                        f"{at.name} was busy with other programs: {values.disturbed:.0%} of the time threads "
                        "waited for a processor. What was found is used, and the next start measures again"
                    )
                found.append((at, values))
        except CalibrationFailed as error:
            raise NotMeasurable(str(error)) from None
        finally:
            launch.disconnect()
        return found

    def _say(self, text: str) -> None:
        self.stdout.write(text)
        self.stdout.flush()

    def _show(self, title: str, values: Calibration) -> None:
        console = Console(file=self.stdout, width=WIDTH)
        console.print(_rates(title, values))
        if len(values.shares) > 1:
            console.print(_slowdowns(values))


def _rates(title: str, values: Calibration) -> Table:
    table = Table("", "", title=title, show_header=False)
    rates = values.rates
    for name, text in {
        "prefill": f"{1 / rates.prefill_s:,.0f} tokens/s",
        "decode step": f"{rates.decode_floor_s * 1e3:.1f} ms + {rates.decode_row_s * 1e3:.2f} ms a sequence",
        "saturation": f"{values.saturation_batch} sequences",
        "logprob": f"{1 / rates.logprob_s:,.0f} tokens/s",
        "update": f"{1 / rates.update_s:,.0f} tokens/s",
        "sync": f"{rates.sync_s * 1000:.0f} ms",
        "disturbed": "not known" if values.disturbed is None else f"{values.disturbed:.1%} of the time",
    }.items():
        table.add_row(name, text)
    return table


def _slowdowns(values: Calibration) -> Table:
    """A row for each character: alone at each share, then beside each of the others."""
    partners = [name for name in values.alone if name != "sync"]
    table = Table("", *[f"{share:.0%}" for share in values.shares], *partners)
    table.title = "slow-down with a share of the device, and beside others on their own share"
    for name, row in values.alone.items():
        beside = [values.beside.get(f"{name}|{partner}", 1.0) for partner in partners]
        table.add_row(name, *[f"{factor:.2f}" for factor in (*row, *beside)])
    return table
