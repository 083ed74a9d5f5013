"""Two kinds of time, both in seconds, that must not be mixed up.

At run time they are floats. The type checker knows them apart: a time plus or minus a duration (a plain float) is a
time of the same kind, the difference of two is a duration, and neither the other kind nor a plain float passes for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, Self, overload

    class _Time(float):
        def __add__(self, seconds: float, /) -> Self: ...
        @overload
        def __sub__(self, other: Self, /) -> float: ...  # type: ignore[overload-overlap]
        @overload
        def __sub__(self, seconds: float, /) -> Self: ...
        def __sub__(self, other: float, /) -> Any: ...

    class Wall(_Time):
        """Since the Unix epoch: may leave the process, and may be set."""

    class Mono(_Time):
        """Of a clock that never goes back: for waits, rates and deadlines within one process."""

else:
    Wall = Mono = float
