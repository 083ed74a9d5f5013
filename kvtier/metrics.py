"""The cache's counters for Prometheus, read from `stats()` at each scrape.

    serve(cache.stats)                              an HTTP endpoint of its own
    REGISTRY.register(StatsCollector(cache.stats))  or a place in the process's registry

Labels are tiers, reasons and outcomes. There is none for a tenant, scope or key: who can read the metrics must not
learn what somebody else's prompts share.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from socketserver import ThreadingMixIn
from typing import Any, NamedTuple, get_args
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

import kvtier
from kvtier.retention.hints import Outcome
from kvtier.tiers.breaker import Health
from kvtier.tiers.meter import Latency
from kvtier.tiers.protocol import Miss, Stored

PORT = 19400
"""Of `serve` and `kvtier top`: below the ephemeral ports, and of no exporter that we know."""

Stats = Mapping[str, Any]
BOUNDS_S = Latency.BOUNDS_S
"""Upper bounds of a histogram's buckets."""


class Family(NamedTuple):
    """How one entry of `stats()` is exported. `label`: the entry is a mapping, its keys are that label's values; those
    in `values` are shown from the start, as 0.

    A histogram's figure is a list of its buckets: how many durations each has, and their sum in seconds.
    """

    name: str
    help: str
    kind: type = Counter  # or Gauge, Histogram
    label: str | None = None
    values: tuple[str, ...] = ()


MISSES = tuple(str(miss) for miss in Miss)
REFUSALS = ("budget", "forgotten", "orphan", "purged", "queue", "quota")
BUILD = Family("kvtier_build_info", "1 for the release that runs.", kind=Gauge, label="version")

REQUESTS = {
    "lookups": Family("kvtier_lookup_blocks", "Blocks asked for."),
    "hits": Family("kvtier_hit_blocks", "Blocks served, by all tiers together."),
    "misses": Family("kvtier_miss_blocks", "Blocks not served, by reason.", label="reason", values=MISSES),
    "read_tokens": Family("kvtier_read_tokens", "Tokens served, by the tier they were in.", label="tier"),
    "missed_tokens": Family("kvtier_missed_tokens", "Tokens not served, by reason.", label="reason", values=MISSES),
    "written_tokens": Family("kvtier_written_tokens", "Tokens taken in, by retention class.", label="class"),
    "accepted": Family("kvtier_accepted_blocks", "Blocks taken in by put."),
    "dropped": Family("kvtier_dropped_blocks", "Accepted blocks that no lower tier took."),
    "hints": Family(
        "kvtier_hints", "Actions of requests' hints, by outcome.", label="outcome", values=get_args(Outcome)
    ),
    "sessions": Family(
        "kvtier_sessions", "Sessions whose blocks are remembered, and those blocks.", kind=Gauge, label="kind"
    ),
    "promises": Family(
        "kvtier_promises",
        "Named pins, blocks they name, guaranteed blocks; refused and unheld blocks.",
        kind=Gauge,
        label="kind",
    ),
}
"""Entries of `stats()["requests"]`."""

ENGINE = {
    "tokens_read": Family("kvtier_tokens_read", "Prompt tokens that an engine was given, by tier.", label="tier"),
    "events": Family("kvtier_events", "Events of an engine's blocks and look-ups, by kind.", label="event"),
}
"""Entries of `stats()["engine"]`, which connectors add."""

TASKS = {
    "restarts": Family("kvtier_task_restarts", "Background tasks that failed and were restarted.", label="task"),
    "abandoned": Family("kvtier_abandoned_tasks", "Background tasks that did not end when the cache was closed."),
}
"""Entries of `stats()["tasks"]`."""

TIERS = {
    "blocks": Family("kvtier_tier_blocks", "Blocks held.", kind=Gauge),
    "bytes": Family("kvtier_tier_bytes", "Bytes held.", kind=Gauge),
    "capacity_bytes": Family("kvtier_tier_capacity_bytes", "Bytes that may be held; 0: no bound.", kind=Gauge),
    "hits": Family("kvtier_tier_hit_blocks", "Blocks served from this tier."),
    "misses": Family(
        "kvtier_tier_miss_blocks", "Blocks this tier was asked for and did not give.", label="reason", values=MISSES
    ),
    "device_written_bytes": Family("kvtier_tier_device_written_bytes", "Bytes written to the device, index included."),
    "write_budget_bytes": Family(
        "kvtier_tier_write_budget_bytes", "Bytes that may be written per day; 0: no bound.", kind=Gauge
    ),
    "write_amplification": Family(
        "kvtier_tier_write_amplification", "Bytes written to the device per byte of stored blocks.", kind=Gauge
    ),
    "evictions": Family("kvtier_tier_evicted_blocks", "Blocks that left for others."),
    "seconds": Family("kvtier_tier_call_seconds", "Time per call.", kind=Histogram, label="verb"),
    "pinned": Family("kvtier_tier_pinned_blocks", "Blocks under a lease.", kind=Gauge),
    "quarantined": Family("kvtier_tier_quarantined_blocks", "Slots that wait for a late transfer.", kind=Gauge),
    "late": Family("kvtier_tier_late_blocks", "Blocks that arrived after the deadline of whoever asked."),
    "loaded": Family("kvtier_tier_loaded_blocks", "Blocks read and verified."),
    "stored": Family(
        "kvtier_tier_stored_blocks",
        "Blocks handed to this tier, by outcome.",
        label="outcome",
        values=tuple(str(stored) for stored in Stored),
    ),
    "refused": Family(
        "kvtier_tier_refused_blocks", "Blocks the queue did not take, by reason.", label="reason", values=REFUSALS
    ),
    "pending": Family("kvtier_tier_pending_blocks", "Blocks waiting to be written.", kind=Gauge),
    "read_bytes": Family("kvtier_tier_read_bytes", "Bytes read."),
    "written_bytes": Family("kvtier_tier_written_bytes", "Bytes written."),
    "counters": Family("kvtier_tier_events", "Counters of this kind of tier alone, by kind.", label="kind"),
    "unanswered": Family("kvtier_tier_unanswered_calls", "Calls without an answer in time, by verb.", label="verb"),
    "health": Family(
        "kvtier_tier_health",
        "1 for the state the tier is in, 0 for the others.",
        kind=Gauge,
        label="state",
        values=tuple(health.value for health in Health),
    ),
}
"""Entries of `stats()[tier]`."""


TIER_LABEL = "tier"
Figure = tuple[tuple[str, ...], Any]
"""Values of a family's labels, and what `stats()` says of them."""


def labels_of(family: Family) -> tuple[str, ...]:
    """Names of its labels."""
    of_tier = (TIER_LABEL,) if family.name.startswith("kvtier_tier_") else ()
    return of_tier if family.label is None else (*of_tier, family.label)


def figures_of(stats: Stats) -> Iterator[tuple[Family, list[Figure]]]:
    """Every family, with its figures in what `stats()` returned."""
    yield BUILD, [((kvtier.__version__,), 1.0)] if stats else []
    sections = {"requests": REQUESTS, "engine": ENGINE, "tasks": TASKS}
    tiers = {name: entry for name, entry in stats.items() if name not in sections}
    for section, families in sections.items():
        for key, family in families.items():
            yield family, _figures(family, (), stats.get(section, {}).get(key))
    for key, family in TIERS.items():
        yield family, [one for name, entry in tiers.items() for one in _figures(family, (name,), entry.get(key))]


def _figures(family: Family, values: tuple[str, ...], found: Any) -> list[Figure]:
    """`found` is a figure, or a mapping of them where the family has a label; None is left out."""
    if found is None:
        return []
    if family.label is None:
        return [(values, found)]
    # A state's name stands for itself: the series of that name is 1.
    each = {**dict.fromkeys(family.values, 0), **({found: 1.0} if isinstance(found, str) else found)}
    return [((*values, str(name)), figure) for name, figure in each.items() if figure is not None]


class StatsCollector(Collector):
    """Exports what `stats` returns. `collect` calls it once and holds nothing between calls."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """One metric family per entry. Takes as long as `stats` does; waits for no tier."""
        for family, figures in figures_of(self._stats()):
            yield _export(family, figures)


def _export(family: Family, figures: list[Figure]) -> Metric:
    if family.kind is Histogram:
        metric = HistogramMetricFamily(family.name, family.help, labels=labels_of(family))
        for values, buckets in figures:
            counts = accumulate(count for count, _ in buckets)
            bounds = [*(str(bound) for bound in BOUNDS_S), "+Inf"]
            total_s = sum(seconds for _, seconds in buckets)
            metric.add_metric(values, list(zip(bounds, counts, strict=True)), total_s)
        return metric
    plain = CounterMetricFamily if family.kind is Counter else GaugeMetricFamily
    other = plain(family.name, family.help, labels=labels_of(family))
    for values, figure in figures:
        other.add_metric(values, float(figure))
    return other


CONNECTIONS_MAX = 32
"""Answered at a time, each on a thread; more are hung up on: an engine needs its process's descriptors."""

SILENT_S = 10.0
"""How long a connection may say nothing, or not take its answer."""


class BoundedThreads(ThreadingMixIn):
    """For a server of connections: one thread for each, CONNECTIONS_MAX at a time."""

    daemon_threads = True

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._free = threading.Semaphore(CONNECTIONS_MAX)
        super().__init__(*arguments, **named)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)  # type: ignore[attr-defined]

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that hung up, or is silent, is no news
            super().handle_error(request, client_address)  # type: ignore[misc]


class _Server(BoundedThreads, WSGIServer):
    pass


class _Handler(WSGIRequestHandler):
    timeout = SILENT_S

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class Endpoint:
    """A running `/metrics` page at `url`. Close it, or use it as a context manager."""

    def __init__(self, stats: Callable[[], Stats], port: int, address: str) -> None:
        registry = CollectorRegistry()
        registry.register(StatsCollector(stats))
        family, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        server = type("_Server", (_Server,), {"address_family": family})
        self._server = server(where[:2], _Handler)
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvtier-metrics", daemon=True)
        self._thread.start()
        host = f"[{address}]" if family == socket.AF_INET6 else address
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Take no more connections, and give the port back. An answer that is under way goes on."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def serve(stats: Callable[[], Stats], port: int = PORT, address: str = "127.0.0.1") -> Endpoint:
    """Answer on `address`:`port` (0: any free one) from a thread of its own. Raises OSError if the port is taken."""
    return Endpoint(stats, port, address)
