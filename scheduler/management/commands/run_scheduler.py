"""``manage.py run_scheduler``: the daemon that cuts jobs into sub-stages and packs them onto the pool."""

from __future__ import annotations

import asyncio
import os
import signal

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from infra.embedded import ray_head
from scheduler.core.state import Policy
from scheduler.shell.policies import policy_named


class Command(BaseCommand):
    help = "Run the scheduler. A second one waits until the first is gone."

    def handle(self, *args: object, **options: object) -> None:
        if "RAY_ADDRESS" not in os.environ:
            os.environ.update(ray_head.environment(settings.VAR_DIR))
        address = os.environ.get("RAY_ADDRESS")
        if address is None:
            raise CommandError("no Ray cluster: set RAY_ADDRESS, or start everything with `manage.py up`")
        try:
            policy = policy_named(settings.SCHEDULER_POLICY)
        except ValueError as error:
            raise CommandError(str(error)) from None
        # Ray reads its environment when it is first imported.
        from workers import launch

        launch.connect(address)
        try:
            asyncio.run(self._lead(policy))
        finally:
            launch.disconnect()

    async def _lead(self, policy: Policy) -> None:
        from scheduler.shell.cluster import RayCluster
        from scheduler.shell.daemon import Daemon
        from scheduler.shell.leader import leadership

        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        try:
            self.stdout.write("waiting to lead")
            async with leadership() as lead:
                daemon = Daemon(RayCluster(), policy)
                await daemon.run(lead, self._ready)
        except asyncio.CancelledError:
            self.stdout.write("scheduler stopped; running pipelines go on")

    def _ready(self) -> None:
        self.stdout.write("scheduler ready")
        self.stdout.flush()
