"""Write transactions about slots that failed alone: set them aside, drop unreadable blocks, try places again.

A trial has its place's slots reserved, so that nothing else is written there, and is counted by the commit that begins
it: a crash in between leaves the slots set aside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvtier.tiers.disk.bad_places import BadPlace
from kvtier.tiers.disk.records import SLOT_ALIGN, Entry, SlotReservation
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.times import Wall

TRIALS_PER_COMMIT_MAX = 64


@dataclass(frozen=True, slots=True)
class Trial:
    """A place that is to be written, synced and read back, and the reservations of the slots on it."""

    place: BadPlace
    reservations: tuple[SlotReservation, ...]


class Dropped(Enum):
    """What became of an unreadable block."""

    DONE = "done"
    RACED = "raced"  # it is another write's by now, or gone
    TOO_MANY = "too_many"  # slots are set aside


def set_aside(txn: WriteTxn, reservations: Sequence[SlotReservation], tries: int, wall_s: Wall) -> bool:
    """End reservations, of one class, whose slots failed alone, after so many tries of each, and set the slots aside.
    False, changing nothing, if they would be too many."""
    bad = txn.segments.bad
    if not bad.may_add(reservations[0].slot_class, len(reservations), txn.geometry.capacity):
        return False
    for one in reservations:
        bad.add(one.segment, one.slot_class, one.slot, tries, wall_s)
        txn.release(one)
    return True


def drop_unreadable(txn: WriteTxn, name: bytes, raw: bytes, tries: int, wall_s: Wall) -> Trial | Dropped:
    """Remove a block whose slot could not be read, so many times, under the entry `raw`, and set the slot aside.

    Returns the trial to be made of the slot; DONE if none can be made now. Nothing is changed in the other cases.
    """
    bad, entry = txn.segments.bad, Entry.decode(name, raw)
    if not txn.is_same(name, raw):  # the place may be recorded already, by the read that removed the block
        return Dropped.RACED
    if not bad.may_add(entry.slot_class, 1, txn.geometry.capacity):
        return Dropped.TOO_MANY
    place = bad.add(entry.segment, entry.slot_class, entry.slot, tries, wall_s)
    txn.drop(name)
    return _begin(txn, place.after_tries(1, wall_s)) or Dropped.DONE


def begin_trials(txn: WriteTxn, wall_s: Wall) -> list[Trial]:
    """Trials of the places that are due, a bounded number."""
    due = [place for place in txn.segments.bad.all() if place.is_due(wall_s)]
    trials = (_begin(txn, place.after_tries(1, wall_s)) for place in due[:TRIALS_PER_COMMIT_MAX])
    return [trial for trial in trials if trial is not None]


def _begin(txn: WriteTxn, place: BadPlace) -> Trial | None:
    """None if the slots on the place are not all set aside: some were never handed out, or are reserved by a trial; or
    if the budget is spent."""
    size = place.units * SLOT_ALIGN
    if not txn.budget.allows(size):
        return None
    held = [txn.reservations.add(free) for free in txn.segments.hold(place)]
    if not held:
        return None
    txn.budget.charge(size)
    txn.segments.bad.put(place)
    return Trial(place, tuple(held))


def end_trial(txn: WriteTxn, trial: Trial, *, sound: bool) -> None:
    """Free the slots of a place that proved sound; leave the others set aside."""
    if sound:
        txn.segments.bad.remove(trial.place)
    for reservation in trial.reservations:
        txn.release(reservation)
