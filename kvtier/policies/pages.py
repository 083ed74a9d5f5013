"""What is sorted by a number of its own, for as many as there are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from operator import attrgetter
from typing import Generic, TypeVar

T = TypeVar("T")

PAGE = 512
"""Entries on a page are at most twice this: bounds what moves when one enters out of turn."""


class Pages(Generic[T]):
    """Entries in ascending order of an attribute, a number that is distinct and does not change while they are here.

    Most enter at the end, and any may leave: O(log n), and O(n / PAGE) machine words. One that enters before others
    has its page made anew. A page is a dictionary in the order of its numbers: the garbage collector does not enter one
    of entries that it does not track, as it does each list. An OrderedDict of 50,000 stops its owner for 5 ms now and
    then, when it is laid out anew.
    """

    __slots__ = ("_firsts", "_number", "_pages")

    def __init__(self, attribute: str) -> None:
        self._number = attrgetter(attribute)
        self._pages: list[dict[int, T]] = []
        self._firsts: list[int] = []  # of each page: a number up to that of its first entry

    @property
    def first(self) -> T | None:
        """The entry of the lowest number."""
        return next(iter(self._pages[0].values())) if self._pages else None

    def add(self, entry: T) -> None:
        """It has a number that none has here."""
        number = self._number(entry)
        if not self._pages:
            self._pages, self._firsts = [{number: entry}], [number]
            return
        place = max(0, bisect_right(self._firsts, number) - 1)
        page = self._pages[place]
        last = next(reversed(page))
        page[number] = entry
        if number < last:
            page = self._pages[place] = {at: page[at] for at in sorted(page)}
            self._firsts[place] = min(self._firsts[place], number)
        if len(page) > 2 * PAGE:
            numbers = list(page)
            for at, half in enumerate((numbers[:PAGE], numbers[PAGE:])):
                self._pages.insert(place + at, {number: page[number] for number in half})
            del self._pages[place + 2]
            self._firsts.insert(place + 1, numbers[PAGE])

    def remove(self, entry: T) -> None:
        """It is here."""
        number = self._number(entry)
        place = bisect_right(self._firsts, number) - 1
        page = self._pages[place]
        del page[number]
        if not page:
            del self._pages[place], self._firsts[place]

    def __bool__(self) -> bool:
        return bool(self._pages)

    def __iter__(self) -> Iterator[T]:
        return (entry for page in self._pages for entry in page.values())
