"""The screen of `kvtier top`: rates, health, p99 and wear between two readings; it survives readings that fail."""

from __future__ import annotations

import contextlib
import http.server
import io
import os
import pty
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from kvtier.cli.top import Unanswered, read_figures, watch
from kvtier.cli.top_view import Figures, Screen, parse_figures, sparkline
from kvtier.connectors.tier_figures import TierGrowth, TierMetrics
from kvtier.metrics import StatsCollector, serve
from kvtier.testing import VirtualClock

NO_CALLS = [(0, 0.0)] * 12


def stats(lookups: int = 0, hits: int = 0, health: str = "well", **g3: Any) -> dict[str, Any]:
    tier = {"blocks": 5, "bytes": 5 << 20, "capacity_bytes": 10 << 20, "hits": hits, "health": health}
    tier |= {"seconds": {"read": NO_CALLS, "write": NO_CALLS}, "written_bytes": 0, "device_written_bytes": 0} | g3
    requests = {"lookups": lookups, "hits": hits, "misses": {"absent": lookups - hits}, "promises": {"pins": 2}}
    return {"requests": requests, "g3": tier}


def figures(given: dict[str, Any]) -> Figures:
    registry = CollectorRegistry()
    registry.register(StatsCollector(lambda: given))
    return parse_figures(generate_latest(registry).decode())


def shown(screen: Screen) -> str:
    out = Console(file=io.StringIO(), width=200)
    out.print(screen.render())
    return out.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def calls(bucket: int, count: int) -> list[tuple[int, float]]:
    return [(count, 0.001 * count) if number == bucket else (0, 0.0) for number in range(12)]


def test_rates_and_shares_are_of_the_time_between_two_readings() -> None:
    day = {"write_budget_bytes": 864 << 20}
    screen = Screen(figures(stats(100, 50, written_bytes=1 << 20, device_written_bytes=1 << 20, **day)))
    later = stats(140, 80, written_bytes=9 << 20, device_written_bytes=2 << 20, **day)
    screen.read(figures(later), 4.0)
    text = shown(screen)
    assert "140 blocks requested, 57.1% served" in text and "75.0% now" in text and "absent 60" in text
    assert "2.0 MiB/s" in text and "50%" in text and "pins 2" in text
    assert "2500% of budget" in text, "a MiB in 4 s of 864 MiB a day"


def test_sessions_and_hints_are_shown_where_there_are_any() -> None:
    known = stats()
    assert "sessions" not in shown(Screen(figures(known)))
    known["requests"] |= {"sessions": {"sessions": 3, "blocks": 4096}, "hints": {"accepted": 7, "rejected": 2}}
    screen = Screen(figures(known))
    assert "sessions 3, their blocks 4,096; hints: accepted 7, rejected 2" in shown(screen)
    asked = screen.report()["requests"]
    assert asked["sessions"] == {"blocks": 4096, "sessions": 3} and asked["hints"] == {"accepted": 7, "rejected": 2}


def test_without_a_budget_wear_is_in_bytes_per_day() -> None:
    screen = Screen(figures(stats(device_written_bytes=1 << 20)))
    screen.read(figures(stats(device_written_bytes=(1 << 20) + (16 << 20))), 1.0)
    assert "1.32 TiB/day" in shown(screen)


def test_a_spent_budget_is_said() -> None:
    """At 0 % of the budget G3 took no block, and nothing said why."""
    about: dict[str, Any] = {"write_budget_bytes": 1 << 20, "device_written_bytes": 1}
    screen = Screen(figures(stats(**about)))
    screen.read(figures(stats(**about, stored={"budget": 7})), 1.0)
    assert "0% of budget, spent" in shown(screen)
    screen.read(figures(stats(**about, stored={"budget": 7})), 1.0)
    assert "0% of budget" in shown(screen) and "spent" not in shown(screen)


def test_p99_is_of_the_latest_calls() -> None:
    slow, quick = calls(9, 100), calls(2, 100)
    screen = Screen(figures(stats(seconds={"read": slow, "write": NO_CALLS})))
    before = shown(screen)
    both = [(a + b, s + t) for (a, s), (b, t) in zip(slow, quick, strict=True)]
    screen.read(figures(stats(seconds={"read": both, "write": NO_CALLS})), 1.0)
    assert "≤3000/" in before and "≤1/" in shown(screen)
    screen.read(
        figures(stats(seconds={"read": [(n + 7, s) for n, s in both[:-1]] + [(99, 99.0)], "write": NO_CALLS})), 1.0
    )
    assert ">10000/" in shown(screen)


def test_a_tier_that_is_out_is_told() -> None:
    assert "out" in shown(Screen(figures(stats(health="out")))) and "well" not in shown(
        Screen(figures(stats(health="out")))
    )


def test_an_engine_s_own_metrics_are_read_and_its_ranks_added_up() -> None:
    registry, clock = CollectorRegistry(), VirtualClock()
    metrics = TierMetrics("vllm:", ["engine"], registry=registry)
    for rank in ("0", "1"):
        metrics.follow(TierGrowth(lambda: stats(10, 4), clock).report(), [rank])
    found = parse_figures(generate_latest(registry).decode())
    assert found[""]["lookup_blocks"] == 20 and found["g3"]["blocks"] == 10
    assert found["g3"]["call_seconds_bucket[0.01][read]"] == 0
    assert not [name for tier in found.values() for name in tier if "_created" in name], "times of counters' birth"


def test_a_reading_that_fails_is_shown_and_the_next_one_counts_from_the_last_good_one() -> None:
    answers: list[Figures | Exception] = [Unanswered("refused"), figures(stats(50, 25, written_bytes=30 << 20))]
    screen, seen, clock, waits = (
        Screen(figures(stats())),
        list[str](),
        iter(range(0, 100, 5)),
        iter([False, False, True]),
    )

    def read() -> Figures:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    watch(
        screen, read, 1.0, lambda seconds: next(waits), lambda: seen.append(shown(screen)), lambda: float(next(clock))
    )
    assert "no reading for 5 s: refused" in seen[0] and "g3" in seen[0]
    assert "no reading" not in seen[1] and "3.0 MiB/s" in seen[1], "30 MiB in the 10 s since the last good one"


def test_bars() -> None:
    assert sparkline([0, 0.5, 1, 1.2, -1]) == "▁▅██▁"


def test_q_ends_it_on_a_terminal() -> None:
    with serve(lambda: stats(10, 5), 0) as endpoint:
        main, other = pty.openpty()
        command = [sys.executable, "-m", "kvtier", "top", endpoint.url, "--interval", "0.2"]
        with subprocess.Popen(command, stdin=other, stdout=other, stderr=other, close_fds=True) as process:
            os.close(other)
            seen = b""
            while b"blocks requested" not in seen:
                seen += os.read(main, 4096)
            os.write(main, b"q")
            begin = time.monotonic()
            while process.poll() is None and time.monotonic() < begin + 60:
                try:
                    os.read(main, 4096)
                except OSError:  # the terminal's other end is closed
                    break
            assert process.wait(60) == 0
        os.close(main)
    assert b"\x1b[?1049h" in seen, "the alternate screen"


@pytest.mark.parametrize("page", ["", "# HELP other x\nother 1\n"])
def test_a_page_without_kvtier_has_no_figures(page: str) -> None:
    assert parse_figures(page) == {}


@pytest.mark.parametrize(
    "line",
    [
        "kvtier_hit_blocks_total NaN",
        "kvtier_lookup_blocks_total +Inf",
        "kvtier_hit_blocks_total 1e308",
        'kvtier_tier_call_seconds_bucket{le="soon",tier="g3",verb="read"} 5',
        'kvtier_tier_call_seconds_bucket{le="0.1",tier="g3",verb="read"} -5',
        'kvtier_tier_health{tier="g9",state=""} 1',
    ],
)
def test_a_broken_exporter_is_shown_as_far_as_it_goes(line: str) -> None:
    page = f'kvtier_lookup_blocks_total 8\n{line}\nkvtier_tier_blocks{{tier="g3"}} 5\n'
    screen = Screen(parse_figures(page))
    for after in (page, 'kvtier_tier_blocks{tier="g3"} 5\n', page):
        screen.read(parse_figures(after), 1.0)
        assert "g3" in shown(screen)


def test_a_narrow_terminal_gets_a_column_per_tier() -> None:
    screen = Screen(figures(stats(100, 50)))
    for width, columns in ((200, ["tier", "health", "blocks"]), (40, ["health", "well"])):
        out = Console(file=io.StringIO(), width=width)
        out.print(screen.render())
        text = out.file.getvalue()  # type: ignore[attr-defined]
        assert any(line.split()[: len(columns)] == columns for line in text.splitlines()) and "…" not in text


def test_a_page_that_never_ends_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.cli.top.WAIT_S_MAX", 0.2)

    class Drip(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"#")
                    time.sleep(0.05)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Drip) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            with pytest.raises(Unanswered, match="not here after"):
                read_figures(f"http://127.0.0.1:{server.server_port}/metrics")
        finally:
            server.shutdown()


def test_calls_whose_bounds_are_not_known_have_no_p99() -> None:
    page = 'kvtier_tier_call_seconds_bucket{tier="g2",verb="read",le="+Inf"} 5\n'
    assert "g2" in shown(Screen(parse_figures("# TYPE kvtier_tier_call_seconds histogram\n" + page)))


def test_a_page_of_others_controls_no_terminal_and_is_json() -> None:
    page = 'kvtier_tier_blocks{tier="g2\x1b]0;mine\x07"} 1\nkvtier_x{r="1"} 1e308\nkvtier_x{r="2"} 1e308\n'
    found = parse_figures(page)
    assert "\x1b" not in "".join(found) and "x" not in found.get("", {})
