"""What a hammered cache may serve: bytes are a pure function of their key, and its scope is neither purged nor over."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache

from kvtier.identity.keys import BlockKey, Scope, scope_of_key
from kvtier.testing import payload_of

_EARLY_S = 0.02
"""Between a reading of the cache's clock and one of ours."""

_NEVER = float("-inf")


@lru_cache(maxsize=1 << 17)
def bytes_of(key: BlockKey, size: int) -> bytes:
    """`payload_of`, remembered."""
    return payload_of(key, size)


class Model:
    """When each block was last offered and used, and each scope purged, by time that nobody sets. Thread-safe.

    It says what must not be served, never what must be: an answer that is late, or a block evicted, is a miss.
    """

    def __init__(self, block_bytes: int, idle_s: Mapping[Scope, float], age_s: Mapping[Scope, float]) -> None:
        """Per scope with one class only: how long after its last use, or after it was last put, a block is over."""
        self._block_bytes = block_bytes
        self._idle_s, self._age_s = idle_s, age_s
        self._lock = threading.Lock()
        self._putting: Counter[BlockKey] = Counter()
        self._using: Counter[BlockKey] = Counter()
        self._put: dict[BlockKey, float] = {}  # end of the latest call that offered it
        self._used: dict[BlockKey, float] = {}  # end of the latest call that named it
        self._purged: dict[Scope, float] = {}  # begin of the latest purge
        self._kept: dict[Scope, float] = {}  # begin of the latest that every tier has confirmed
        self.wrong: list[str] = []
        """Each block that was served and should not have been."""
        self.served = 0

    @contextmanager
    def using(self, keys: Sequence[BlockKey], *, putting: bool = False) -> Iterator[float]:
        """Around a call that names these blocks. Gives its begin."""
        with self._lock:
            self._using.update(keys)
            if putting:
                self._putting.update(keys)
        began = time.monotonic()
        try:
            yield began
        finally:
            with self._lock:
                ended = time.monotonic()
                self._using.subtract(keys)
                self._used.update(dict.fromkeys(keys, ended))
                if putting:
                    self._putting.subtract(keys)
                    self._put.update(dict.fromkeys(keys, ended))

    @contextmanager
    def purging(self, scope: Scope) -> Iterator[None]:
        """Around a purge: in force in this cache when it returns or fails, and for good when it returns."""
        began = time.monotonic()
        answered = confirmed = False
        try:
            yield
            answered = confirmed = True
        except Exception:
            answered = True
            raise
        finally:
            with self._lock:
                if answered:
                    self._purged[scope] = max(began, self._purged.get(scope, _NEVER))
                if confirmed:
                    self._kept[scope] = max(began, self._kept.get(scope, _NEVER))

    def restarted(self) -> None:
        """Another cache over the same stores: it knows of the purges that these have confirmed."""
        with self._lock:
            self._purged = dict(self._kept)

    def clock_was_set(self) -> None:
        """A new time has been accepted: lives count from now on."""
        with self._lock:
            now = time.monotonic()
            for times in (self._put, self._used):
                times.update(dict.fromkeys(times, now))

    def floors(self, keys: Sequence[BlockKey]) -> dict[BlockKey, tuple[float, float, float]]:
        """Before a get: per block, the purge that covers it, and when it was last used and put."""
        with self._lock:
            return {
                key: (
                    self._purged.get(scope_of_key(key), _NEVER),
                    self._used.get(key, _NEVER),
                    self._put.get(key, _NEVER),
                )
                for key in keys
            }

    def compare(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[memoryview],
        tiers: Sequence[str],
        began: float,
        floors: Mapping[BlockKey, tuple[float, float, float]],
    ) -> None:
        """The result of a get that `began` then, with the `floors` of before it."""
        for key, block, tier in zip(keys, blocks, tiers, strict=False):
            wrong = "" if bytes(block) == bytes_of(key, self._block_bytes) else "other bytes"
            wrong = wrong or self._over(key, began, *floors[key])
            if wrong:
                self.wrong.append(f"{wrong}: {key.hex()[:16]}…{key.hex()[-8:]} from {tier}")
        self.served += min(len(keys), len(blocks))

    def _over(self, key: BlockKey, began: float, purged: float, used: float, put: float) -> str:
        scope = scope_of_key(key)
        with self._lock:
            offered = self._putting[key] > 0 or self._put.get(key, _NEVER) > put
            shared = self._using[key] > 1 or self._used.get(key, _NEVER) > used
        if offered:
            return ""
        if put < purged:
            return f"purged {began - purged:.3f} s before, put {began - put:.3f} s before"
        if began - put > self._age_s.get(scope, float("inf")) + _EARLY_S:
            return f"put {began - put:.3f} s before"
        if not shared and began - used > self._idle_s.get(scope, float("inf")) + _EARLY_S:
            return f"used {began - used:.3f} s before"
        return ""
