"""The first block in which a prompt differs from that of an earlier request, for diagnosing misses.

Chain hashes commit to everything before them, so two chains agree up to one depth and nowhere after; it is found by
bisection. Only the last 8 bytes of each key are remembered: enough to tell blocks apart within two chains.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvtier.identity.keys import BlockKey

REQUESTS_MAX = 1024
BLOCKS_MAX = 1 << 20
_TAIL_BYTES = 8


def tails_of(chain: Sequence[BlockKey]) -> bytes:
    """All that is remembered of a chain. Pure; O(n)."""
    return b"".join(key[-_TAIL_BYTES:] for key in chain)


class RecentChains:
    """Chains of the latest requests by id, at most REQUESTS_MAX of them and BLOCKS_MAX blocks. No lock of its own."""

    def __init__(self, requests_max: int = REQUESTS_MAX, blocks_max: int = BLOCKS_MAX) -> None:
        self._requests_max = requests_max
        self._blocks_max = blocks_max
        self._chains: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def record(self, request_id: str, chain: Sequence[BlockKey]) -> None:
        """Remember a request's chain, instead of an earlier one of this id."""
        self.record_tails(request_id, tails_of(chain))

    def record_tails(self, request_id: str, tails: bytes) -> None:
        """`record` of a chain's `tails_of`."""
        self._bytes -= len(self._chains.pop(request_id, b""))
        tails = tails[: self._blocks_max * _TAIL_BYTES]
        self._chains[request_id] = tails
        self._bytes += len(tails)
        while len(self._chains) > self._requests_max or self._bytes > self._blocks_max * _TAIL_BYTES:
            self._bytes -= len(self._chains.popitem(last=False)[1])

    def divergence(self, request_id: str, chain: Sequence[BlockKey]) -> int | None:
        """Depth of the first block in which `chain` differs from that request's; its length if it merely is longer
        or shorter and agrees so far. None: that request is not remembered."""
        tails = self._chains.get(request_id)
        if tails is None:
            return None
        low, high = 0, min(len(chain), len(tails) // _TAIL_BYTES)
        while low < high:
            middle = (low + high) // 2
            if chain[middle][-_TAIL_BYTES:] == tails[middle * _TAIL_BYTES : (middle + 1) * _TAIL_BYTES]:
                low = middle + 1
            else:
                high = middle
        return low

    def __len__(self) -> int:
        return len(self._chains)
