"""How long a copy is waited for before its rank is taken to have stopped answering."""

from __future__ import annotations

_STEPS_MIN = 8
"""Ranks answer between steps, and one step alone may take longer than any time allowed: a kernel is compiled, a long
prefill runs on a CPU, the machine stands still. So it takes so many steps, too."""


class Patience:
    """Of copies that are answered in about the order in which they began: the oldest one tells of all."""

    def __init__(self) -> None:
        self._oldest: object = None
        self._steps = 0  # that have run since this one is the oldest

    def over(self, oldest: object, waited_s: float, timeout_s: float) -> bool:
        """A step has run, and this copy, now the oldest, has waited so long. Whether that is too long."""
        self._steps = self._steps + 1 if oldest is self._oldest else 1
        self._oldest = oldest
        return waited_s >= timeout_s and self._steps >= _STEPS_MIN
