"""The runs that a policy remembers."""

from __future__ import annotations

from collections.abc import Iterator

from kvtier.identity.keys import KEY_PARTS
from kvtier.policies.pages import Pages
from kvtier.policies.run import Run


class RunHistory:
    """Runs by `ident`, which `enrol` gives them, and in the order of forgetting: by `age`. No table of it is large."""

    __slots__ = ("_ages", "_idents", "_latest", "_parts")

    def __init__(self) -> None:
        self._parts: list[dict[int, Run]] = [{} for _ in range(KEY_PARTS)]
        self._ages = Pages[Run]("age")
        self._idents = self._latest = 0

    def enrol(self, run: Run) -> None:
        """A new run is remembered, and forgotten after all others."""
        self._idents += 1
        run.ident = self._idents
        self._parts[run.ident % KEY_PARTS][run.ident] = run
        self._enter(run)

    def renew(self, run: Run) -> None:
        """A run is forgotten after all others."""
        self._ages.remove(run)
        self._enter(run)

    def _enter(self, run: Run) -> None:
        self._latest += 1
        run.age = self._latest
        self._ages.add(run)

    def remove(self, run: Run) -> None:
        """Forget a run."""
        self._ages.remove(run)
        del self._parts[run.ident % KEY_PARTS][run.ident]

    @property
    def oldest(self) -> Run | None:
        """The run that is forgotten next."""
        return self._ages.first

    def __getitem__(self, ident: int) -> Run:
        return self._parts[ident % KEY_PARTS][ident]

    def __iter__(self) -> Iterator[Run]:
        """In the order of forgetting."""
        return iter(self._ages)

    def __len__(self) -> int:
        return sum(map(len, self._parts))
