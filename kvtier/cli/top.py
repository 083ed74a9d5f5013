"""`kvtier top`: live figures of a running cache, from its metrics endpoint or its engine's."""

from __future__ import annotations

import os
import select
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from kvtier.cli.ask import shown
from kvtier.cli.output import Json, console, write_json
from kvtier.cli.top_latest import NOTHING, latest_of
from kvtier.cli.top_view import Figures, Screen, parse_figures
from kvtier.cli.top_web import WebView, served
from kvtier.errors import InvalidRequest, KVTierError
from kvtier.metrics import PORT
from kvtier.units import shorten

TEXT_BYTES_MAX = 16 << 20
WAIT_S_MAX = 5.0
HERE = f"http://127.0.0.1:{PORT}/metrics"
ENDPOINTS = "vLLM and SGLang (--enable-metrics) have /metrics at their own port, programs call kvtier.metrics.serve"

Url = Annotated[str, typer.Argument(help="The metrics endpoint: kvtier's own, vLLM's or SGLang's.", metavar="[URL]")]
Interval = Annotated[float, typer.Option("--interval", min=0.2, help="Seconds between two readings.")]
Once = Annotated[bool, typer.Option("--once", help="Read once and exit.")]

Web = Annotated[bool, typer.Option("--web", help="Show it as a page in a browser, on loopback, until q or Ctrl-C.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Of the page; 0: any free one.")]
Engine = Annotated[
    Path | None,
    typer.Option("--engine", help="With --web: the engine's YAML or trace.socket, for its prefixes and slow requests."),
]

Wait = Callable[[float], bool]
"""Waits so many seconds; whether the user wants to leave."""


class Unanswered(KVTierError):
    """The endpoint gives no metrics now; it may later."""


def top(
    url: Url = HERE, interval: Interval = 2.0, once: Once = False, web: Web = False, port: Port = 0,
    engine: Engine = None, json: Json = False,
) -> None:  # fmt: skip
    """Show tiers, hits, misses, rates and health of a cache whose process called `kvtier.metrics.serve`, or of an
    engine, until q. A reading that fails is shown and tried again."""
    if engine is not None and not web:
        raise InvalidRequest("--engine is for --web: `kvtier explain --engine` shows requests in a terminal")
    if web and (json or once):
        raise InvalidRequest("--web shows a page until q or Ctrl-C; --json and --once read once, and end")
    screen = Screen(read_figures(url))  # a mistyped URL ends it at once
    if web:
        serve_page(screen, url, interval, port, engine)
        return
    if json:
        write_json(screen.now)
        return
    if once or not sys.stdout.isatty():
        console().print(screen.render())
        return
    with (
        quit_key() as wait,
        Live(screen.render(), console=console(), auto_refresh=False, screen=True, redirect_stderr=False) as live,
    ):
        watch(screen, lambda: read_figures(url), interval, wait, lambda: live.update(screen.render(), refresh=True))


def serve_page(screen: Screen, url: str, interval: float, port: int, engine: Path | None = None) -> None:
    """Read and serve the page until the user leaves. Raises InvalidRequest or ConfigError for an `engine` that is
    none."""
    latest = latest_of(engine) if engine is not None else lambda: dict(NOTHING)

    def read() -> Figures:
        screen.latest = latest()
        return read_figures(url)

    view, screen.latest = WebView(), latest()
    view.show(screen)
    with served(view, port) as address, quit_key() as wait:
        print(f"{address} shows {shorten(url)}; q or Ctrl-C ends it", flush=True)
        watch(screen, read, interval, wait, lambda: view.show(screen))


def watch(
    screen: Screen, read: Callable[[], Figures], interval: float, wait: Wait, show: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:  # fmt: skip
    """Read every `interval` seconds and show, until `wait` says to leave. Readings that fail leave the figures as they
    are, with the reason above them."""
    last_s = clock()
    while not wait(interval):
        try:
            figures = read()
        except Unanswered as wrong:
            screen.fault = f"no reading for {clock() - last_s:.0f} s: {wrong}"
        else:
            screen.read(figures, clock() - last_s)
            last_s = clock()
        show()


@contextmanager
def quit_key() -> Iterator[Wait]:
    """A `Wait` that the key q ends, where the input is a terminal, whose keys are taken singly meanwhile."""
    if not sys.stdin.isatty():

        def sleep(seconds: float) -> bool:
            time.sleep(seconds)
            return False

        yield sleep
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    saved = termios.tcgetattr(descriptor)

    def wait(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([descriptor], [], [], left)[0] and os.read(descriptor, 1) in (b"q", b"Q", b""):
                return True
        return False

    tty.setcbreak(descriptor)
    try:
        yield wait
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)


def _text(answer: HTTPResponse) -> bytes:
    """At most TEXT_BYTES_MAX, in at most WAIT_S_MAX: a page that comes byte by byte is no answer. Raises OSError."""
    until, parts, size = time.monotonic() + WAIT_S_MAX, list[bytes](), 0
    while size < TEXT_BYTES_MAX and (part := answer.read1(1 << 16)):
        if time.monotonic() > until:
            raise TimeoutError(f"the page is not here after {WAIT_S_MAX:.0f} s")
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def read_figures(url: str) -> Figures:
    """The endpoint's present figures. Waits at most WAIT_S_MAX. Raises InvalidRequest for what is no http URL,
    Unanswered where it gives no metrics of kvtier."""
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"{shorten(url)} is not an http URL, such as {HERE}")
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S_MAX) as answer:
            figures = parse_figures(_text(answer).decode())
    except (urllib.error.URLError, HTTPException, OSError, ValueError) as wrong:
        reason = getattr(wrong, "reason", None) or wrong
        text = shown(getattr(reason, "strerror", None) or reason, 256)
        raise Unanswered(f"{shorten(url)} gives no metrics: {text}; is its process running? {ENDPOINTS}") from wrong
    if not figures:
        raise Unanswered(f"{shorten(url)} has no metrics of kvtier; is the cache open?")
    return figures
