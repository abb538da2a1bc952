"""``manage.py run_scheduler``: the daemon that cuts jobs into sub-stages and packs them onto the pool."""

from __future__ import annotations

import asyncio
import os
import signal

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from infra.embedded import ray_head
from scheduler.core.state import Policy
from scheduler.shell.cluster import RayCluster
from scheduler.shell.daemon import Daemon
from scheduler.shell.leader import leadership
from workers import launch


class Command(BaseCommand):
    help = "Run the scheduler. A second one waits until the first is gone."

    def handle(self, *args: object, **options: object) -> None:
        address = os.environ.get("RAY_ADDRESS") or ray_head.running(settings.VAR_DIR)
        if address is None:
            raise CommandError("no Ray cluster: set RAY_ADDRESS, or start everything with `manage.py up`")
        launch.connect(address)
        try:
            asyncio.run(self._lead())
        finally:
            launch.disconnect()

    async def _lead(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        try:
            self.stdout.write("waiting to lead")
            async with leadership() as lead:
                daemon = Daemon(RayCluster(), Policy(name=settings.SCHEDULER_POLICY))
                await daemon.run(lead, lambda: self.stdout.write("scheduler ready"))
        except asyncio.CancelledError:
            self.stdout.write("scheduler stopped; running pipelines go on")
