"""What observing a cache costs its index path: spans, events for routers, and the scrape of its metrics.

A request here hashes its prompt, gets it (all of it in G2), and stores another one, whose blocks evict as many. Two
caches serve the same requests in turn, one with everything switched on: each span is made and ends in a provider
without an exporter, and the changes of residence are taken after each request. The figure is the thread's CPU time; the
cost is the median of the differences between neighbours, since the machine's noise hits both alike. A scrape comes once
in SCRAPE_S, whatever the requests, so it is a share of that time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from kvtier.bench.record import interleaved, summary
from kvtier.bench.tiers.index import BLOCK_BYTES, BLOCK_TOKENS, Prompt, make_prompt
from kvtier.cache import Cache
from kvtier.cache import open as open_cache
from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.events import Events
from kvtier.identity.namespace import Namespace
from kvtier.metrics import StatsCollector
from kvtier.spans import set_spans

TARGET_PERCENT = 2.0
SCRAPE_S = 15.0
PROMPTS = 12
"""More than G2 holds: each that is stored evicts one."""


def measure_observed(tokens: int = 8192, rounds: int = 300) -> dict[str, Any]:
    """The figures, in microseconds of CPU per request and in percent of it. Blocks for some seconds. Raises ConfigError
    where the OpenTelemetry SDK is missing."""
    _provide_spans()
    namespace = Namespace("bench/model", "bench:1", "bfloat16", "L2HND", BLOCK_TOKENS, BLOCK_BYTES)
    prompts = [make_prompt(namespace, tokens, seed) for seed in range(PROMPTS)]
    blocks = tokens // BLOCK_TOKENS
    config = Config.parse({"tiers": {"g2": {"capacity": (PROMPTS - 4) * blocks * BLOCK_BYTES}}})
    with open_cache(config, namespace) as plain, open_cache(config, namespace) as seen:
        events = Events()
        seen.manager.subscribe(events)
        subjects = {"plain": _requests(plain, prompts, None), "observed": _requests(seen, prompts, events)}
        for _ in range(PROMPTS):  # until each stores evicts
            for subject in subjects.values():
                subject()
        figures = interleaved(rounds, subjects)
        scrape_s = _scrape_s(seen)
    pairs = zip(figures["plain"], figures["observed"], strict=True)
    added = median(observed - bare for bare, observed in pairs) / median(figures["plain"])
    percent = 100 * (added + scrape_s / SCRAPE_S)
    return {
        **{name: summary([round(1e6 * s, 2) for s in seconds]) for name, seconds in figures.items()},
        "scrape_us": round(1e6 * scrape_s, 1),
        "percent": round(percent, 2),
        "target_percent": TARGET_PERCENT,
    }


def _provide_spans() -> None:
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
    except ImportError:
        raise ConfigError("bench index --observed makes spans: pip install opentelemetry-sdk") from None
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider())


def _requests(cache: Cache, prompts: list[Prompt], events: Events | None) -> Callable[[], float]:
    """One request per call; its CPU seconds. With `events` it is observed."""
    payload, turn = [bytes(BLOCK_BYTES)] * len(prompts[0].keys), -1

    def request() -> float:
        nonlocal turn
        turn += 1
        last, prompt = prompts[(turn - 1) % len(prompts)], prompts[turn % len(prompts)]
        set_spans(events is not None)
        began = time.thread_time()
        with cache.get(cache.chain_hashes(last.tokens)):
            pass
        cache.put(prompt.keys, payload)
        if events is not None:
            events.take()
        spent = time.thread_time() - began
        set_spans(False)
        return spent

    return request


def _scrape_s(cache: Cache, repeats: int = 20) -> float:
    """CPU seconds of a scrape of a cache's metrics."""
    collector = StatsCollector(cache.stats)
    began = time.thread_time()
    for _ in range(repeats):
        for _family in collector.collect():
            pass
    return (time.thread_time() - began) / repeats
