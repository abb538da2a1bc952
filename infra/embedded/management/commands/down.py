"""``manage.py down``: stop a running ``up`` from another shell, and whatever a killed one left."""

from __future__ import annotations

from django.conf import settings
from django.core.management.base import BaseCommand

from infra.embedded import sweep


class Command(BaseCommand):
    help = "Stop everything that `manage.py up` started in this var/."
    requires_system_checks = ()

    def handle(self, **_options: object) -> None:
        ran = sweep.down(settings.VAR_DIR)
        self.stdout.write("stopped" if ran else "nothing was up; nothing is left running")
