"""Decides whether lower tiers are asked for blocks that they may not have, since a request waits for their answer.

Asks have an account in seconds. A wait is drawn from it, whatever it came to; what was found pays in the prefill that
it saves; and a share of the time that requests take is paid in. While it is overdrawn nothing is asked. So waits cost
at most that share more than they save, but for what the first find is credited, and where they save more, everything is
asked. What is saved up is bounded, so that good times do not pay for long bad ones.
"""

from __future__ import annotations

_BUDGET = 0.015
"""Share of all time that asking may cost."""
_AT_ONCE = 8
"""Asks that run at once while none has told how long one waits. So many waits may be saved up without any find."""
_FINDS_SAVED = 3.0
"""Times what a find saves that may be saved up. As much is credited at the first find, once."""
_RECENT = 0.2
"""Weight of the latest wait, and of the latest find."""
_LOOK_EVERY = 32
"""Of prompts so short that not even a find would repay the usual wait, one in so many is asked for: it may be shorter
by now."""


class AskGate:
    """See the module. Pure: told of times, reads no clock. Not thread-safe. Requests by name."""

    def __init__(self, longest_s: float) -> None:
        """No wait takes longer, but for a process that stood still."""
        self._longest_s = longest_s
        self._saved_s = 0.0  # the account
        self._open: set[str] = set()  # asked, and not answered yet
        self._wait_s: float | None = None  # lately
        self._find_s = 0.0  # what a find saved lately
        self._too_short = 0

    def decide(self, name: str, prefill_s: float | None) -> bool:
        """Whether to ask for blocks that would take `prefill_s` to compute; None: not known yet."""
        wait_s = self._wait_s
        if wait_s is None:
            asks = len(self._open) < _AT_ONCE
        else:
            asks = self._saved_s >= len(self._open) * wait_s
            if prefill_s is not None and prefill_s <= wait_s:
                self._too_short += 1
                asks = asks and self._too_short % _LOOK_EVERY == 0
        if asks:
            self._open.add(name)
        return asks

    def answered(self, name: str, waited_s: float, saved_s: float) -> None:
        """The request waited so long for what it asked, and what was found saved it so much. Without effect where it
        asked nothing."""
        if name not in self._open:
            return
        self._open.discard(name)
        waited_s = min(max(0.0, waited_s), self._longest_s)
        self._wait_s = waited_s if self._wait_s is None else self._wait_s + _RECENT * (waited_s - self._wait_s)
        if saved_s > 0 and not self._find_s:  # lower tiers have something: one wait in vain does not end asking
            self._find_s = saved_s
            self._pay(_FINDS_SAVED * saved_s)
        elif saved_s > 0:
            self._find_s += _RECENT * (saved_s - self._find_s)
        self._pay(saved_s - waited_s)

    def forget(self, name: str) -> None:
        """What the request asked tells nothing."""
        self._open.discard(name)

    def spent(self, seconds: float) -> None:
        """A request took so long until its first token."""
        self._pay(_BUDGET * max(0.0, seconds))

    def _pay(self, seconds: float) -> None:
        most_s = max(_AT_ONCE * (self._wait_s or 0.0), _FINDS_SAVED * self._find_s)
        self._saved_s = min(self._saved_s + seconds, most_s)
