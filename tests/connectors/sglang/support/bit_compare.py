"""Compares what comes back to the device's pages with what was computed there, bit for bit.

A block may be computed more than once, and floats then round by the batch they are computed in: what comes back must be
one of those. Digests go through a file, so that engines that follow or run beside each other have one witness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from kvtier.connectors.sglang.pool import place_of
from kvtier.connectors.sglang.state_pool import StatePart
from kvtier.identity.keys import NAME_BYTES

_RECORD_BYTES = NAME_BYTES + 16


class Witness:
    """Of one rank. `pool` is the connector's view of the device's pages."""

    def __init__(self, pool: Any, file: Path) -> None:
        self.counts: Counter[str] = Counter(same_blocks=0, other_blocks=0)
        self._pool = pool
        self._file = file
        self._computed: dict[bytes, set[bytes]] = {}
        self._read_until = 0

    def computed(self, names: Sequence[bytes], pages: Sequence[int]) -> None:
        """The engine offers these pages, which hold these blocks; `names` are their full ones."""
        news = b""
        for name, page in zip(names, pages, strict=True):
            digest = self._digest(page)
            if digest not in self._computed.setdefault(name, set()):
                self._computed[name].add(digest)
                news += name + digest
        with open(self._file, "ab", buffering=0) as out:  # one write, since others append beside it
            out.write(news)

    def restored(self, names: Sequence[bytes], pages: Sequence[int]) -> None:
        """These blocks were loaded into these pages just now."""
        self._learn()
        for name, page in zip(names, pages, strict=True):
            same = self._digest(page) in self._computed.get(name, ())
            self.counts["same_blocks" if same else "other_blocks"] += 1

    def _learn(self) -> None:
        """What others have seen since."""
        if not self._file.exists():
            return
        with open(self._file, "rb") as file:
            file.seek(self._read_until)
            news = file.read()
        whole = len(news) // _RECORD_BYTES * _RECORD_BYTES
        self._read_until += whole
        for start in range(0, whole, _RECORD_BYTES):
            name, digest = news[start : start + NAME_BYTES], news[start + NAME_BYTES : start + _RECORD_BYTES]
            self._computed.setdefault(name, set()).add(digest)

    def _digest(self, block: int) -> bytes:
        number, page = place_of(block)
        part = self._pool.parts[number]
        if isinstance(part, StatePart):
            return xxhash.xxh3_128(part.piece(page).contiguous().numpy()).digest()
        rows = slice(page * self._pool.page, (page + 1) * self._pool.page)
        digest = xxhash.xxh3_128()
        for layer in part.tensors:
            for tensor in layer:
                digest.update(tensor[rows].contiguous().numpy())
        return digest.digest()
