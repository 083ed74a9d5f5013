"""One request that a cache has served, as it is remembered."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.identity.keys import Scope


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """What came of one request. `at_s`: wall time of its arrival. `given`: tokens of its prompt by the tier that they
    came from, `g1` for the engine's own cache. `why`: the reason for which no more were given, "" where there is none.

    The times are seconds since its arrival, None where nobody measured: `placed_s` until it was given blocks, of which
    it waited `waited_s` for lower tiers; `first_s` until its first token; `whole_s` until its end.
    """

    name: str
    scope: Scope
    at_s: float
    input_tokens: int
    output_tokens: int = 0
    given: Mapping[str, int] = field(default_factory=dict)
    why: str = ""
    placed_s: float | None = None
    waited_s: float | None = None
    first_s: float | None = None
    whole_s: float | None = None

    @property
    def computed_tokens(self) -> int:
        """Tokens of its prompt that no cache had."""
        return max(0, self.input_tokens - sum(self.given.values()))


class Remembered(NamedTuple):
    """A request with its prompt: `tails`, 8 bytes of the name of each whole block, and the tokens where the cache was
    given them."""

    served: ServedRequest
    tails: bytes
    tokens: array[int]
