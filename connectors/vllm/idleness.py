"""Whether an engine has anything to compute, and for how long it has not.

A session that waits for its next input is a request that may stay for hours. The engine sleeps meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.clock import Clock
from kvtier.connectors.vllm import compat
from kvtier.connectors.vllm.requests import RequestState
from kvtier.times import Mono


class Idleness:
    """See the module. Used from the engine's one scheduler thread."""

    def __init__(self, requests: Mapping[str, RequestState], clock: Clock) -> None:
        """`requests`: all that the engine has, by now."""
        self._requests = requests
        self._clock = clock
        self._since_s: Mono | None = None  # when it was asked for first, since something was to be computed

    def end(self) -> None:
        """There is something to compute."""
        self._since_s = None

    def at(self, tokens: int) -> bool:
        """A step is planned that computes so many tokens: whether no request waits for it."""
        if tokens:
            self._since_s = None
        return not self._requests or (not tokens and self._rests())

    def seconds(self) -> float | None:
        """How long the engine has had nothing to compute; None where it has something."""
        if not self._rests():
            return None
        now = self._clock.monotonic()
        if self._since_s is None:
            self._since_s = now
        return now - self._since_s

    def _rests(self) -> bool:
        return all(compat.waits_for_input(state.track.request) for state in self._requests.values())
