"""Which classes of G3 want space that only another class can give."""

from __future__ import annotations


class Demand:
    """Marked inside transactions, answered between them. One process's memory, on the writer thread."""

    def __init__(self) -> None:
        self._wants: dict[int, tuple[int, bool]] = {}  # by class: the highest priority that wants, whether it must
        self._refused: dict[int, tuple[int, bool]] = {}  # by class: until which tick, and whether a must, too

    def want(self, slot_cls: int, priority: int, tick: int, *, must: bool) -> None:
        """The class has no unused slot left, or soon will not. `must`: none of its own blocks may leave either."""
        until, musts_too = self._refused.get(slot_cls, (0, False))
        if tick < until and (musts_too or not must):
            return
        highest, musts = self._wants.get(slot_cls, (priority, False))
        self._wants[slot_cls] = max(highest, priority), musts or must

    @property
    def waits(self) -> bool:
        """Whether a class wants space."""
        return bool(self._wants)

    def must(self, slot_cls: int) -> bool:
        """Whether a block of the class waits for an answer."""
        return self._wants.get(slot_cls, (0, False))[1]

    def take(self) -> list[tuple[int, int, bool]]:
        """All wants, as (class, priority, must); those that must come first."""
        wants, self._wants = self._wants, {}
        return sorted(((cls, *want) for cls, want in wants.items()), key=lambda want: (not want[2], want[0]))

    def answered(self, slot_cls: int) -> None:
        """The class has got space: it may want more, but what it must have it has."""
        if slot_cls in self._wants:
            self._wants[slot_cls] = self._wants[slot_cls][0], False

    def refuse(self, slot_cls: int, until: int, *, must: bool) -> None:
        """Pass over the wants of the class before that tick, those that `must` only if this one did: finding out that
        none can be answered costs time."""
        self._wants.pop(slot_cls, None)
        self._refused[slot_cls] = until, must

    def retry(self) -> None:
        """Slots came free, or blocks may leave that had to stay: pass over nothing."""
        self._refused.clear()
