"""The whole product on one machine: services, scheduler, Celery, web; ready in order, stopped in reverse.

    with Stack(var, port=0) as stack:      # Ctrl-C, SIGTERM and exceptions all end in stack.stop()
        print(stack.web_url)

``DATABASE_URL``, ``REDIS_URL`` and ``RAY_ADDRESS`` each replace an embedded service, which then is neither
started nor stopped. One stack per ``var/``: a second one is refused. If this process is killed outright, a
guard process stops what it left.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Self, TextIO

from infra.embedded import paths, postgres, ray_head, valkey
from infra.embedded.hold import Hold
from infra.embedded.supervisor import (
    RESTARTS,
    WINDOW,
    Console,
    Program,
    StartFailed,
    Stopped,
    Supervisor,
)

#: Longer than a short measurement may take by itself.
CALIBRATE_SECONDS = 150


@dataclass(frozen=True)
class SignIn:
    email: str
    password: str


def embedded(env: Mapping[str, str]) -> tuple[ModuleType, ...]:
    """The services that nothing in the environment replaces, in the order of their start."""
    services = {"DATABASE_URL": postgres, "REDIS_URL": valkey, "RAY_ADDRESS": ray_head}
    return tuple(
        service for name, service in services.items() if not (env.get(name) or env.get(f"{name}_FILE"))
    )


class Stack:
    """``port=0`` takes a free one. ``console=None`` keeps the programs' lines to the log files.

    ``models``: make the built-in model at the first start (a download and half a minute).
    """

    def __init__(
        self,
        var: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        cpus: int | None = None,
        models: bool = True,
        console: TextIO | None = sys.stdout,
    ) -> None:
        self.var = var.resolve()
        self.host = host
        self.port = port
        self.cpus = cpus or os.cpu_count() or 1
        self.models = models
        self._console = Console(console)
        self._supervisor = Supervisor(self.var, {}, paths.PROJECT, self._console)
        self._services: list[ModuleType] = []
        self._hold = Hold(self.var)
        self._watcher: threading.Thread | None = None
        self._deferring = False
        self._old_handlers: dict[signal.Signals, object] = {}

    # ------------------------------------------------------------ for callers

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    @property
    def web_url(self) -> str:
        shown = "127.0.0.1" if self.host in {"0.0.0.0", "::"} else self.host  # noqa: S104
        return f"http://{shown}:{self.port}"

    @property
    def env(self) -> dict[str, str]:
        """The environment of the programs: what another process needs to use this stack's services."""
        return dict(self._supervisor.env)

    @property
    def failure(self) -> str | None:
        """Why the stack cannot be kept up; a caller with a loop of its own looks at this."""
        return self._supervisor.failure

    def sign_in(self) -> SignIn | None:
        """The demo account that bootstrap made, if it made one."""
        try:
            found = json.loads((self.var / "demo_signin.json").read_text())
            return SignIn(found["email"], found["password"])
        except (OSError, ValueError, KeyError):
            return None

    def start(self) -> None:
        """Bring everything up and wait until it is ready.

        StartFailed with the reason if something does not come up; KeyboardInterrupt if asked to stop
        meanwhile. Whatever was started is stopped again then.
        """
        self._take_signals()
        try:
            with self._deferred():
                self._hold.take()
                self._start_all()
        except Stopped:
            self.stop()
            raise KeyboardInterrupt from None
        except BaseException:
            self.stop()
            raise

    def wait(self) -> None:
        """Serve until Ctrl-C (KeyboardInterrupt) or until something cannot be kept up (StartFailed)."""
        self._supervisor.wait()

    def stop(self) -> None:
        """Stop all, the last started first; a second Ctrl-C skips the politeness. Safe to call again."""
        with self._deferred():
            self._supervisor.stop()
            # It may be in the middle of bringing a service back.
            if self._watcher is not None:
                self._watcher.join()
            while self._services:
                service = self._services.pop()
                self._say(f"stopping {service.__name__.rpartition('.')[2]}")
                try:
                    service.stop(self.var)
                except (OSError, RuntimeError) as error:
                    self._say(str(error))
            self._hold.release()
        self._give_signals_back()

    # ------------------------------------------------------------ one after another

    def _say(self, text: str) -> None:
        self._console.line("up", text)

    def _start_all(self) -> None:
        self._choose_port()
        supervisor = self._supervisor
        supervisor.env = self._environment()
        services = embedded(os.environ)
        for service in services:
            if service is not ray_head:
                self._bring_up(service)
        manage = (sys.executable, str(paths.PROJECT / "manage.py"))
        supervisor.run("migrate", [*manage, "migrate", "--no-input", "--verbosity", "1"], 300)
        supervisor.run("bootstrap", [*manage, "bootstrap", *(["--models"] if self.models else [])], 600)
        if ray_head in services:
            self._bring_up(ray_head)
            supervisor.env |= ray_head.environment(self.var)
            self._calibrate(manage)
        self._watcher = threading.Thread(target=self._watch_services, name="services", daemon=True)
        self._watcher.start()
        for program in self._programs(manage):
            supervisor.start(program)
        for program in self._programs(manage):
            supervisor.wait_ready(program.name)

    def _calibrate(self, manage: tuple[str, str]) -> None:
        """Measure devices of which nothing is known, while nothing else runs; the result is a row and stays.

        Without it the service starts all the same.
        """
        try:
            self._supervisor.run(
                "calibrate", [*manage, "calibrate_pool", "--short", "--first"], CALIBRATE_SECONDS
            )
        except StartFailed as error:
            self._say(f"the devices are not measured, so each serves one job at a time: {error}")

    def _choose_port(self) -> None:
        """Find out now, not after half a minute, that the port is taken."""
        with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                raise StartFailed(
                    f"port {self.port} on {self.host} cannot be used: {error.strerror}"
                ) from None
            self.port = probe.getsockname()[1]

    def _environment(self) -> dict[str, str]:
        return os.environ | {
            "JIGSAW_VAR": str(self.var),
            "DJANGO_SETTINGS_MODULE": "backend.settings",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(paths.scratch_dir(self.var)),
        }

    def _bring_up(self, service: ModuleType) -> None:
        if self._supervisor.stopping.is_set():
            raise Stopped
        self._services.append(service)
        self._ensure(service)
        self._say(f"{service.__name__.rpartition('.')[2]} is ready")

    def _ensure(self, service: ModuleType) -> None:
        if service is ray_head:
            ray_head.ensure(self.var, self.cpus)
        else:
            service.ensure(self.var)

    def _programs(self, manage: tuple[str, str]) -> list[Program]:
        python = sys.executable
        celery = (python, "-m", "celery", "-A", "backend")
        worker = [*celery, "worker", "--pool", "prefork", "--loglevel", "INFO", "--without-mingle"]
        # One tenant has at most one check running: with two, a long file leaves room for the others.
        validator = [*worker, "-n", "validator@%h", "-Q", "validation", "-c", "2"]
        # Trials of graders, for which somebody waits; one tenant has one at a time.
        grader = [*worker, "-n", "grader@%h", "-Q", "graders", "-c", "2"]
        periodic = [*worker, "-n", "periodic@%h", "-Q", "periodic", "-c", "1"]
        schedule = str(self.var / "celerybeat-schedule")
        beat = ["beat", "--loglevel", "INFO", "--pidfile", "", "--schedule", schedule]
        listen = ("--host", self.host, "--port", str(self.port))
        uvicorn = (python, "-m", "uvicorn", "backend.asgi:application", *listen)
        manners = ("--timeout-graceful-shutdown", "2", "--no-access-log")
        return [
            Program("scheduler", [*manage, "run_scheduler"], ready_line="scheduler ready", stop_seconds=12.0),
            Program("validator", validator, ready_line=" ready."),
            Program("grader", grader, ready_line=" ready."),
            Program("periodic", periodic, ready_line=" ready."),
            Program("beat", [*celery, *beat], ready_line="beat: Starting"),
            Program("web", [*uvicorn, *manners], ready_check=self._web_answers),
        ]

    def _web_answers(self) -> bool:
        address = "127.0.0.1" if self.host == "0.0.0.0" else self.host  # noqa: S104
        connection = http.client.HTTPConnection(address, self.port, timeout=5)
        try:
            connection.request("GET", "/healthz", headers={"Host": f"localhost:{self.port}"})
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _watch_services(self) -> None:
        """Bring a service back that died; a new Ray head has a new address, so the scheduler starts anew."""
        supervisor = self._supervisor
        revivals: deque[float] = deque(maxlen=RESTARTS)
        while not supervisor.stopping.wait(1.0):
            for service in list(self._services):
                if service.running(self.var) is not None or supervisor.stopping.is_set():
                    continue
                name = service.__name__.rpartition(".")[2]
                now = time.monotonic()
                if len(revivals) == RESTARTS and revivals[0] > now - WINDOW:
                    supervisor.fail(f"{name} does not stay up; see {self.var / 'logs' / name}.log")
                    return
                revivals.append(now)
                self._say(f"{name} died; starting it again")
                try:
                    self._ensure(service)
                except (OSError, RuntimeError) as error:
                    supervisor.fail(str(error))
                    return
                if service is ray_head:
                    supervisor.env |= ray_head.environment(self.var)
                    supervisor.restart("scheduler")

    # ------------------------------------------------------------ signals

    def _take_signals(self) -> None:
        """While the stack lives, SIGTERM and a closed terminal end it as Ctrl-C does."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup ignores SIGHUP on purpose.
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._old_handlers[number] = signal.signal(number, self._on_signal)

    def _give_signals_back(self) -> None:
        while self._old_handlers:
            number, handler = self._old_handlers.popitem()
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Interrupt the caller's code once, but never our own start and stop: those look at the events."""
        if self._supervisor.stopping.is_set():
            self._supervisor.hurry.set()
            return
        self._supervisor.stopping.set()
        if not self._deferring:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def _deferred(self) -> Iterator[None]:
        before, self._deferring = self._deferring, True
        try:
            yield
        finally:
            self._deferring = before
