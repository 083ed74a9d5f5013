"""Eviction policies to compare with: no cache can be configured to use those that are defined here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvtier.bench.policies.arc import ARC
from kvtier.bench.policies.lru_freq import FrequencyLRU
from kvtier.bench.policies.s3fifo import S3FIFO
from kvtier.policies.policy import POLICIES, Policy

COMPARED: Mapping[str, Callable[[int], Policy]] = MappingProxyType(
    {**POLICIES, "arc": ARC, "s3fifo": S3FIFO, "lru-freq": FrequencyLRU}
)
"""Every policy by name, made for a capacity in blocks. `arc` and `s3fifo` do not keep residents prefix-closed."""
