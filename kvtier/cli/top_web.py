"""`kvtier top --web`: the screen as one page in a browser, from a server on loopback.

/          the page: one file, nothing from elsewhere
/figures   what it shows, as one JSON object
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.resources import files
from typing import Any

from kvtier.cli.top_view import Screen
from kvtier.metrics import SILENT_S, BoundedThreads

ADDRESS = "127.0.0.1"
_HOSTS = (ADDRESS, "localhost")
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class WebView:
    """The latest state of a screen, for the page. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._shown: dict[str, Any] = {}
        self._shown_at_s = clock()

    def show(self, screen: Screen) -> None:
        """Take over what the screen shows now."""
        report = screen.report()
        with self._lock:
            fresh = not screen.fault or not self._shown
            self._shown = report
            self._shown_at_s = self._clock() if fresh else self._shown_at_s

    def figures(self) -> dict[str, Any]:
        """The JSON object of /figures."""
        with self._lock:
            return {**self._shown, "age_s": self._clock() - self._shown_at_s}


class _Server(BoundedThreads, HTTPServer):
    pass


@contextmanager
def served(view: WebView, port: int) -> Iterator[str]:
    """Answer on loopback (0: any free port) until the block ends; yields the page's address. Raises OSError where the
    port is taken."""

    class Handler(BaseHTTPRequestHandler):
        timeout = SILENT_S
        server_version, sys_version = "kvtier", ""

        def do_GET(self) -> None:
            # A page of another site may have its name point at loopback: it would then read the figures.
            if self.headers.get("Host", "").rpartition(":")[0] not in _HOSTS:
                self._answer(403, "text/plain", b"ask for http://127.0.0.1")
            elif self.path == "/":
                self._answer(200, "text/html; charset=utf-8", _page())
            elif self.path == "/figures":
                self._answer(200, "application/json", json.dumps(view.figures()).encode())
            else:
                self._answer(404, "text/plain", b"there are / and /figures")

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with _Server((ADDRESS, port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="kvtier-top", daemon=True)
        thread.start()
        try:
            yield f"http://{ADDRESS}:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def _page() -> bytes:
    return files("kvtier.cli").joinpath("top_page.html").read_bytes()
