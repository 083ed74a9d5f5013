"""All figures of a cache's `stats()` in an engine's own metrics.

`TierGrowth` is where the cache is: what changed since the last report, as plain lists that any process can be sent.
`TierMetrics` is where the engine's metrics are, and follows these reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from kvtier.clock import Clock
from kvtier.metrics import BOUNDS_S, ENGINE, Family, Figure, Stats, figures_of, labels_of
from kvtier.times import Mono

Report = list[list[Any]]
"""Per figure: the family's name, the values of its labels, and the growth of a counter, the value of a gauge, or the
growth of a histogram's buckets (durations and their sum in seconds, each)."""


class TierGrowth:
    """What changed in `stats()` since the last report. One thread reports."""

    EVERY_S = 1.0

    def __init__(self, stats: Callable[[], Stats], clock: Clock) -> None:
        """`stats` is asked at most every EVERY_S. It returns nothing while there is no cache."""
        self._stats = stats
        self._clock = clock
        self._due_s = clock.monotonic()
        self._last: dict[str, dict[tuple[str, ...], Any]] = {}  # by family

    def report(self) -> Report:
        """Empty where it is too early for another report."""
        now_s = self._clock.monotonic()
        if now_s < self._due_s:
            return []
        self._due_s = Mono(now_s + self.EVERY_S)
        return [
            [family.name, list(values), change]
            for family, found in _families(self._stats())
            for values, change in self._changes(family, dict(found))
        ]

    def _changes(self, family: Family, found: dict[tuple[str, ...], Any]) -> Iterable[tuple[tuple[str, ...], Any]]:
        last = self._last.setdefault(family.name, {})
        if family.kind is Gauge:  # a state that is no more is 0
            found = {**dict.fromkeys(last, 0.0), **found}
        for values, figure in found.items():
            before = last.get(values)
            if figure != before:
                last[values] = figure
                yield values, figure if family.kind is Gauge else _growth(figure, before)


def families() -> list[Family]:
    """All that a report may have."""
    return [family for family, _ in _families({})]


def _families(stats: Stats) -> Iterable[tuple[Family, list[Figure]]]:
    """Without those that connectors count themselves."""
    return ((family, found) for family, found in figures_of(stats) if family not in ENGINE.values())


def _growth(now: Any, last: Any) -> Any:
    """Of a counter or of buckets. A figure that fell is another cache's, which began at 0."""
    if isinstance(now, list | tuple):
        then = last or [(0, 0.0)] * len(now)
        if any(count < before for (count, _), (before, _) in zip(now, then, strict=True)):
            then = [(0, 0.0)] * len(now)
        return [[n - m, s - t] for (n, s), (m, t) in zip(now, then, strict=True)]
    return now - last if last is not None and now >= last else now


class TierMetrics:
    """The figures of all reports. Registers its metrics at construction."""

    def __init__(
        self, prefix: str, labels: Sequence[str], kinds: Mapping[Any, Callable[..., Any]] | None = None, **more: Any
    ) -> None:
        """`labels`: names of those that the engine adds. `kinds`: what to make instead of Prometheus's Counter, Gauge
        and Histogram. `more` goes to each."""
        made = kinds or {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
        special: dict[type, dict[str, Any]] = {
            Gauge: {"multiprocess_mode": "mostrecent"}, Histogram: {"buckets": BOUNDS_S}
        }  # fmt: skip
        self._metrics = {
            family.name: (
                family.kind,
                made[family.kind](
                    name=f"{prefix}{family.name}",
                    documentation=family.help,
                    labelnames=[*labels, *labels_of(family)],
                    **special.get(family.kind, {}),
                    **more,
                ),
            )
            for family in families()
        }

    def follow(self, report: Report, labels: Sequence[object]) -> None:
        """Take a report in; `labels` are the values of the engine's."""
        for name, values, change in report:
            kind, metric = self._metrics[name]
            series = metric.labels(*labels, *values)
            if kind is Counter:
                series.inc(change)
            elif kind is Gauge:
                series.set(change)
            else:
                for count, seconds in change:
                    for _ in range(count):
                        series.observe(seconds / count)  # the mean of a bucket's durations lies in that bucket
