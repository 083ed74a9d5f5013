"""OpenTelemetry spans of what a request waits for, in the trace of that request.

    with span("kv.lookup", blocks=5) as told:
        …
        told(found=3)

Figures and names of tiers, reasons and directions alone are told: no salt, token, key or text of an error. Off, which
is the default, a span is one comparison, and the library is not imported. The application owns provider and exporter.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

Told = Callable[..., None]
T = TypeVar("T")

_tracer: Tracer | None = None


class _Off:
    def __enter__(self) -> Told:
        return self._tell

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass

    def _tell(self, **figures: int | float | str) -> None:
        pass


_OFF = _Off()


def set_spans(on: bool) -> None:
    """Whether this process makes spans from now on, with its present provider. Raises ConfigError where the library
    is missing."""
    global _tracer
    if not on:
        _tracer = None
        return
    try:
        from opentelemetry import trace
    except ImportError as missing:
        raise ConfigError("trace.spans: needs OpenTelemetry: pip install 'kvtier[otel]'") from missing
    _tracer = trace.get_tracer("kvtier")


def spans_on() -> bool:
    """Whether figures that cost something to count are worth it."""
    return _tracer is not None


def span(name: str, **figures: int | float | str) -> AbstractContextManager[Told]:
    """A span of the work inside the `with`, below the current one of this task or thread. An error marks it by its
    class."""
    return _OFF if _tracer is None else _span(_tracer, name, figures)


@contextmanager
def _span(tracer: Tracer, name: str, figures: Mapping[str, Any]) -> Generator[Told]:
    with tracer.start_as_current_span(name, record_exception=False, set_status_on_exception=False) as one:

        def tell(**figures: int | float | str) -> None:
            for key, figure in figures.items():
                one.set_attribute(f"kvtier.{key}", figure)

        tell(**figures)
        try:
            yield tell
        except BaseException as error:  # the work goes on failing; its message may name a path
            tell(error=type(error).__name__)
            raise


def in_trace(headers: Mapping[str, str] | None, call: Callable[..., T], *arguments: Any) -> T:
    """`call(*arguments)` as a part of the trace that a request's headers (W3C trace context) name. Other headers, its
    baggage among them, are not looked at, and headers that name no trace change nothing."""
    if _tracer is None or not headers:
        return call(*arguments)
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    told = {name: value for name in ("traceparent", "tracestate") if isinstance(value := headers.get(name), str)}
    token = context.attach(TraceContextTextMapPropagator().extract(told))
    try:
        return call(*arguments)
    finally:
        context.detach(token)
