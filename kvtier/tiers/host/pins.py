"""Pins: while a slot has one, its block is neither evicted nor overwritten.

The loops here are an engine's: a request that hits 2,048 blocks pins them between two of its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvtier.identity.keys import BlockKey
from kvtier.tiers.host.slot import Slot, SlotState
from kvtier.times import Wall

Hold = tuple[Slot, int]
"""A pinned slot and the generation it was pinned in."""


class SlotPins:
    """Counts the slots that have a pin. Used under the lock of its tier's owner."""

    def __init__(self) -> None:
        self.slots = 0  # with a pin, in any state

    def add(self, slot: Slot) -> None:
        """`HostTier.pin` for a slot that was just found, or committed, under the lock."""
        if not slot.pins:
            self.slots += 1
        slot.pins += 1

    def add_leading(
        self,
        parts: Sequence[dict[BlockKey, Slot]],
        keys: Iterable[BlockKey],
        wall_s: Wall,
        used_wall_s: Wall,
        gone: Callable[[Slot], bool] | None,
    ) -> list[Hold]:
        """Pin and use the slots of the leading `keys` that are in `parts`, alive at `wall_s` and not `gone`."""
        holds, fresh = list[Hold](), 0
        stamps, ends = None, wall_s  # of the last slot that was used, if it has one stamp: the next ones have the same
        for key in keys:
            slot = parts[key[-1]].get(key)
            if slot is None or slot.expires_at < wall_s or (gone is not None and gone(slot)):
                break
            if slot.pins:
                slot.pins += 1
            else:
                slot.pins = 1
                fresh += 1
            if slot.stamps is not stamps:
                slot.use(used_wall_s)
                if len(slot.stamps) == 1 and slot.last_use == used_wall_s:
                    stamps, ends = slot.stamps, slot.expires_at
            elif slot.last_use < used_wall_s:
                slot.last_use, slot.expires_at = used_wall_s, ends
            holds.append((slot, slot.generation))
        self.slots += fresh
        return holds

    def drop(self, holds: Iterable[Hold]) -> tuple[list[Slot], int]:
        """Undo one pin of each. Returns the slots that lost their last one and wait for that, since they were dropped
        meanwhile or the policy left them out, and how many holds were stale: of another block, or without a pin."""
        waiting, stale = list[Slot](), 0
        for slot, generation in holds:
            pins = slot.pins
            if slot.generation != generation or pins < 1:
                stale += 1
                continue
            slot.pins = pins - 1
            if pins == 1:
                self.slots -= 1
                if slot.suspended or slot.state is SlotState.QUARANTINED:
                    slot.suspended = False
                    waiting.append(slot)
        return waiting, stale
