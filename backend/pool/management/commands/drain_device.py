"""``manage.py drain_device NAME``: let no new work begin on a device; ``--return`` takes it back."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from backend.pool.services import device_drain, device_return


class Command(BaseCommand):
    help = "Drain a device: what runs there ends, what lives there moves away. With --return: use it again."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="of the device, as the pool's page shows it")
        parser.add_argument("--return", action="store_true", dest="back", help="use the device again")

    def handle(self, *args: Any, name: str, back: bool, **options: Any) -> None:
        change = device_return if back else device_drain
        try:
            changed = change(name)
        except LookupError as error:
            raise CommandError(str(error.args[0])) from None
        state = "takes work" if back else "drains: no new work begins there"
        self.stdout.write(f"{name} {'' if changed else 'already '}{state}")
