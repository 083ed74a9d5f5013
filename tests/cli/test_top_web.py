"""`kvtier top --web`: one self-contained page on loopback with the screen's figures."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvtier.cli import top
from kvtier.cli.top_latest import ROWS_MAX, latest_of, rows_of
from kvtier.cli.top_view import Screen, parse_figures
from kvtier.cli.top_web import WebView, served
from kvtier.errors import FormatError, InvalidRequest
from kvtier.metrics import CONNECTIONS_MAX, serve
from tests.support.trace_socket import listening_cache

PAGE = """\
kvtier_build_info{version="9.9.9"} 1
kvtier_lookup_blocks_total 100
kvtier_hit_blocks_total 25
kvtier_miss_blocks_total{reason="absent"} 75
kvtier_tier_blocks{tier="g3"} 5
kvtier_tier_bytes{tier="g3"} 5000
kvtier_tier_capacity_bytes{tier="g3"} 10000
kvtier_tier_read_bytes_total{tier="g3"} 4000
kvtier_tier_health{tier="g3",state="out"} 1
kvtier_tier_call_seconds_bucket{tier="g3",verb="read",le="0.1"} 5
"""


@pytest.fixture
def screen() -> Screen:
    screen = Screen(parse_figures(PAGE.replace("100\n", "60\n").replace(" 4000", " 2000")))
    screen.read(parse_figures(PAGE), 2.0)
    return screen


@pytest.fixture
def address(screen: Screen) -> Iterator[str]:
    view = WebView()
    view.show(screen)
    with served(view, 0) as address:
        yield address


def test_it_has_the_screen_s_figures(address: str) -> None:
    found = json.load(urllib.request.urlopen(f"{address}figures", timeout=30))
    assert (found["version"], found["fault"], found["hit_rates"]) == ("9.9.9", "", [0.0])
    assert found["requests"]["requested"] == 100 and found["requests"]["misses"] == [["absent", 75.0]]
    (tier,) = found["tiers"]
    assert tier | {"name": "g3", "health": "out", "read_bytes_s": 1000.0, "p99_ms": "≤100/–", "blocks": 5} == tier
    assert found["age_s"] >= 0


def test_a_fault_keeps_the_age_of_the_last_good_reading(screen: Screen) -> None:
    now = [10.0]
    view = WebView(lambda: now[0])
    view.show(screen)
    now[0], screen.fault = 15.0, "no reading"
    view.show(screen)
    assert (view.figures()["age_s"], view.figures()["fault"]) == (5.0, "no reading")


class _Places(HTMLParser):
    """Everything that a page loads or links."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "action", "srcset", "data")]


def test_the_page_needs_nothing_from_elsewhere_and_takes_no_markup_from_figures(address: str) -> None:
    with urllib.request.urlopen(address, timeout=30) as answer:
        page, policy = answer.read().decode(), answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and answer.headers["Cache-Control"] == "no-store"
    places = _Places()
    places.feed(page)
    assert places.found == ["data:,"] and "@import" not in page and "url(" not in page
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", page)
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page
    assert page.encode() == files("kvtier.cli").joinpath("top_page.html").read_bytes()


@pytest.mark.parametrize(
    ("host", "path", "status"),
    [
        ("127.0.0.1:{port}", "/figures", 200),
        ("localhost:{port}", "/figures", 200),
        ("rebound.example:{port}", "/figures", 403),
        ("", "/figures", 403),
        ("127.0.0.1:{port}", "/../../etc/passwd", 404),
    ],
)
def test_it_answers_its_own_name_and_two_paths(address: str, host: str, path: str, status: int) -> None:
    port = urlsplit(address).port
    assert port is not None
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("Host", host.format(port=port))
    connection.endheaders()
    assert connection.getresponse().status == status
    connection.close()


def test_a_browser_that_hangs_up_is_no_news(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    """`top` is on a terminal: no traceback there, and the next one is served."""
    port = urlsplit(address).port
    for request in (b"GET /figures HTTP/1.1\r\n", f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode() * 50):
        with socket.create_connection(("127.0.0.1", port)) as gone:
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
            gone.sendall(request)
            time.sleep(0.05)
    assert json.load(urllib.request.urlopen(f"{address}figures", timeout=30))["version"] == "9.9.9"
    time.sleep(0.05)
    assert capfd.readouterr().err == ""


def test_many_that_say_nothing_take_few_threads(address: str) -> None:
    before = threading.active_count()
    port = urlsplit(address).port
    with contextlib.ExitStack() as silent:
        for _ in range(CONNECTIONS_MAX + 8):
            silent.enter_context(socket.create_connection(("127.0.0.1", port)))
        time.sleep(0.2)
        assert threading.active_count() - before <= CONNECTIONS_MAX
    time.sleep(0.1)
    assert json.load(urllib.request.urlopen(f"{address}figures", timeout=30))["version"] == "9.9.9"


def test_another_method_is_refused_without_a_word_about_the_server(address: str) -> None:
    port = urlsplit(address).port
    connection = http.client.HTTPConnection("127.0.0.1", port or 0, timeout=30)
    connection.request("POST", "/figures", b"x")
    answer = connection.getresponse()
    assert answer.status == 501 and "Python" not in str(answer.headers)
    connection.close()


def test_the_command_serves_until_it_is_interrupted() -> None:
    stats: dict[str, Any] = {"requests": {"lookups": 5, "hits": 1, "misses": {}}}
    with serve(lambda: stats, 0) as endpoint:
        command = [sys.executable, "-m", "kvtier", "top", endpoint.url, "--web", "--interval", "0.2"]
        heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # who runs tests in the background ignores it
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, preexec_fn=heard
        ) as process:
            assert process.stdout is not None
            address = process.stdout.readline().split()[0]
            found = json.load(urllib.request.urlopen(f"{address}figures", timeout=30))
            assert found["requests"]["requested"] == 5
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130


@pytest.mark.parametrize("options", [["--web", "--json"], ["--web", "--once"], ["--engine", "kv.yaml", "--json"]])
def test_options_that_would_be_ignored_are_refused(run: Any, options: list[str]) -> None:
    """`--web --json --engine` printed figures without the engine's."""
    stats: dict[str, Any] = {"requests": {"lookups": 5, "hits": 1, "misses": {}}}
    with serve(lambda: stats, 0) as endpoint:
        failed = run("top", endpoint.url, *options)
    assert failed.status == 2 and "--web" in failed.err


ANSWER: dict[str, Any] = {
    "kvtier_answer": 1, "requests": 3, "since_s": 60.5,
    "prefixes": [{"prefix": "3f2a91bc", "requests": 3, "shared_tokens": 512, "input_tokens": 900, "computed": 100,
                  "ago_s": 1.5, "given": {"g1": 300, "g3": 500}}],
    "slow": [{"name": "cmpl-1", "why": "evicted", "reason": "computed", "ago_s": 2.0, "placed_s": 0.5, "waited_s": None,
              "first_s": 3.0, "whole_s": 4.0, "computed_tokens": 100, "given": {}}],
}  # fmt: skip


def test_the_page_has_prefixes_and_slow_requests_where_the_engine_is_asked(screen: Screen) -> None:
    view = WebView()
    view.show(screen)
    assert not view.figures()["latest"]["asked"]
    screen.latest = rows_of(ANSWER)
    view.show(screen)
    latest = view.figures()["latest"]
    assert latest["asked"] and latest["prefixes"][0]["given"] == {"g1": 300, "g3": 500}
    assert latest["slow"][0]["waited_s"] == 0.0 and latest["slow"][0]["why"] == "evicted"
    page = files("kvtier.cli").joinpath("top_page.html").read_text()
    shown = set(re.findall(r"row\.(\w+)", page))
    assert shown == {*latest["prefixes"][0], *latest["slow"][0]} - {"given"} | {"given"}


@pytest.mark.parametrize(
    "changed",
    [
        {"requests": "many"},
        {"prefixes": 7},
        {"prefixes": [{}]},
        {"slow": [{**ANSWER["slow"][0], "first_s": "long"}]},
        {"slow": [{**ANSWER["slow"][0], "given": [1]}]},
        {"slow": None},
        {"since_s": {}},
        {"requests": float("inf")},
        {"since_s": float("nan")},
    ],
)
def test_answers_that_are_none_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match="trace socket"):
        rows_of({**ANSWER, **changed})


def test_rows_are_few_and_names_are_short() -> None:
    many = {**ANSWER, "slow": [{**ANSWER["slow"][0], "name": "x\x1b[31m" * 99}] * 500}
    rows = rows_of(many)["slow"]
    assert len(rows) == ROWS_MAX and all(len(row["name"]) < 200 and row["name"].isprintable() for row in rows)


def test_an_engine_that_does_not_answer_is_told_and_the_page_goes_on(tmp_path: Path) -> None:
    (tmp_path / "kv.yaml").write_text(f"tiers: {{g2: {{capacity: 1MiB}}}}\ntrace: {{socket: {tmp_path}/none.sock}}\n")
    told = latest_of(tmp_path / "kv.yaml")()
    assert told["asked"] and "no cache listens there" in told["fault"] and not told["slow"]
    with pytest.raises(InvalidRequest, match="neither a socket nor a YAML"):
        latest_of(tmp_path / "none.sock")


def test_an_engine_that_goes_refuses_and_comes_back_leaves_the_page_up(
    tmp_path: Path, screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart of the engine takes its socket away for a minute."""
    path, wait = tmp_path / "kv.sock", iter([False, False, False, True])
    seen: list[dict[str, Any]] = []
    caches = contextlib.ExitStack()
    caches.enter_context(listening_cache(path))

    def step(_seconds: float) -> bool:
        seen.append(screen.latest)
        if len(seen) == 1:
            caches.close()  # it restarts
        elif len(seen) == 2:
            cache = caches.enter_context(listening_cache(path))
            cache.trace._answer = lambda line: {"kvtier_answer": 1, "refused": "ask is request or breaks"}
        elif len(seen) == 3:
            caches.close()
            caches.enter_context(listening_cache(path))
        return next(wait)

    monkeypatch.setattr(top, "quit_key", lambda: contextlib.nullcontext(step))
    monkeypatch.setattr(top, "read_figures", lambda url: parse_figures(PAGE))
    with caches:
        top.serve_page(screen, "http://127.0.0.1/metrics", 0.2, 0, path)
    faults = [latest["fault"] for latest in [*seen, screen.latest]]
    assert [bool(fault) for fault in faults] == [False, True, True, False, False]
    assert "no cache listens there" in faults[1] and "ask is request or breaks" in faults[2]


def test_a_browser_without_scripts_is_told_where_the_figures_are() -> None:
    page = files("kvtier.cli").joinpath("top_page.html").read_text()
    assert "kvtier top" in page.partition("<noscript>")[2].partition("</noscript>")[0]
