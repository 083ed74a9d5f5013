"""An error in the cache becomes a default answer: it costs a hit, never a step of the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def or_fallback(call: Callable[..., T], *arguments: Any, fallback: T, **named: Any) -> T:
    """The call's answer; `fallback`, and the error in the log, where it raises an Exception."""
    try:
        return call(*arguments, **named)
    except Exception:
        log.exception("kvtier: %s failed; the engine goes on without a cache", getattr(call, "__name__", call))
        return fallback


def falls_back_to(answer: Any) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """`or_fallback` for every call of a method. All failed calls return the same `answer`: it must not be changed."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @wraps(method)
        def answered(*arguments: P.args, **named: P.kwargs) -> T:
            result: T = or_fallback(method, *arguments, fallback=answer, **named)
            return result

        return answered

    return decorate
