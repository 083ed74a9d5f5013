"""A replica of G4 over a bucket in memory, and what it is made of."""

from __future__ import annotations

from kvtier.testing import SkewedClock, VirtualBucket, VirtualServer
from kvtier.testing.replica import NS, Replica

__all__ = ["NS", "Replica", "SkewedClock", "VirtualBucket", "VirtualServer"]
