"""A real HTTP server on this machine, whose answers a test decides."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Asked:
    path: str
    headers: dict[str, str]  # by names in lower case
    body: bytes


@dataclass(frozen=True)
class Answer:
    body: bytes = b"{}"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    #: Sent first; then nothing more until the server ends.
    stall: bool = False
    #: The connection ends without an answer.
    hang_up: bool = False


@dataclass
class Server:
    url: str
    port: int
    asked: list[Asked]


@contextmanager
def serving(answer: Callable[[Asked], Answer], certificate: Path | None = None) -> Iterator[Server]:
    """Every POST is given to ``answer``, each in a thread of its own; over TLS with a ``certificate``."""
    over = threading.Event()
    asked: list[Asked] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            given = Asked(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            asked.append(given)
            self.send(answer(given))

        def send(self, given: Answer) -> None:
            if given.hang_up:
                self.close_connection = True
                return
            self.send_response(given.status)
            for name, value in given.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(given.body) + given.stall))
            self.end_headers()
            try:
                self.wfile.write(given.body)
                self.wfile.flush()
            except OSError:  # the other side had enough
                self.close_connection = True
            if given.stall:
                over.wait()
                self.close_connection = True

        def handle(self) -> None:
            with suppress(ConnectionError, ssl.SSLError):  # the other side would not go on
                super().handle()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        # The handshake is the handler's, so that one that fails is no concern of the next.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    port = server.server_address[1]
    try:
        scheme = "http" if certificate is None else "https"
        yield Server(f"{scheme}://127.0.0.1:{port}", port, asked)
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()
