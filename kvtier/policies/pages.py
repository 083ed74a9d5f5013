"""What is sorted by a number of its own, for as many as there are."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Generic, TypeVar

T = TypeVar("T")

PAGE = 512
"""Entries on a page are at most twice this: bounds what moves when one enters or leaves."""


class Pages(Generic[T]):
    """Entries in ascending order of an attribute, which is distinct and does not change while they are here.

    Most enter at the end, and any may leave. O(log n) comparisons and O(PAGE + n / PAGE) machine words per change, in
    C: an OrderedDict of 50,000 stops its owner for 5 ms now and then, when it is laid out anew.
    """

    __slots__ = ("_firsts", "_number", "_pages")

    def __init__(self, attribute: str) -> None:
        self._number = attrgetter(attribute)
        self._pages: list[list[T]] = []
        self._firsts: list[int] = []  # of each page: a number up to that of its first entry

    @property
    def first(self) -> T | None:
        """The entry of the lowest number."""
        return self._pages[0][0] if self._pages else None

    def add(self, entry: T) -> None:
        """It has a number that none has here."""
        number = self._number(entry)
        if not self._pages:
            self._pages, self._firsts = [[entry]], [number]
            return
        place = max(0, bisect_right(self._firsts, number) - 1)
        page = self._pages[place]
        if self._number(page[-1]) < number:
            page.append(entry)
        else:
            insort(page, entry, key=self._number)
            self._firsts[place] = min(self._firsts[place], number)
        if len(page) > 2 * PAGE:
            self._pages.insert(place + 1, page[PAGE:])
            self._firsts.insert(place + 1, self._number(page[PAGE]))
            del page[PAGE:]

    def remove(self, entry: T) -> None:
        """It is here."""
        number = self._number(entry)
        place = bisect_right(self._firsts, number) - 1
        page = self._pages[place]
        del page[0 if page[0] is entry else bisect_left(page, number, key=self._number)]
        if not page:
            del self._pages[place], self._firsts[place]

    def __bool__(self) -> bool:
        return bool(self._pages)

    def __iter__(self) -> Iterator[T]:
        return (entry for page in self._pages for entry in page)
