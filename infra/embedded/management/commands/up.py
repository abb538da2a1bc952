"""``manage.py up``: the whole product on this machine until Ctrl-C."""

from __future__ import annotations

import argparse

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from infra.embedded.stack import Stack
from infra.embedded.supervisor import StartFailed


class Command(BaseCommand):
    help = "Start the services, the scheduler, Celery and the web; one Ctrl-C stops them all."
    requires_system_checks = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--host", default="127.0.0.1")
        parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
        parser.add_argument("--cpus", type=int, help="CPUs that the embedded Ray offers (default: all)")

        parser.add_argument(
            "--no-models", dest="models", action="store_false", help="do not make the built-in model"
        )

    def handle(self, *, host: str, port: int, cpus: int | None, models: bool, **_options: object) -> None:
        stack = Stack(settings.VAR_DIR, host=host, port=port, cpus=cpus, models=models)
        try:
            with stack:
                self.stdout.write(_greeting(stack))
                self.stdout.flush()
                stack.wait()
        except KeyboardInterrupt:
            self.stdout.write("stopped; no process is left")
        except StartFailed as error:
            raise CommandError(str(error)) from None


def _greeting(stack: Stack) -> str:
    lines = ["", f"  Console   {stack.web_url}"]
    if account := stack.sign_in():
        lines.append(f"  Sign in   {account.email}  /  {account.password}")
    return "\n".join([*lines, f"  Logs      {stack.var / 'logs'}", "  Ctrl-C stops everything.", ""])
