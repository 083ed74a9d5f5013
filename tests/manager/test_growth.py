"""No table that grows under the lock is large: one of a million entries that is moved stops every thread for 30 ms."""

from __future__ import annotations

import gc
import sys
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

from kvtier.bench.retention.byteless import EmptyArena
from kvtier.identity.keys import BlockKey
from kvtier.manager.accounts import LOSSES_MAX, Losses
from kvtier.policies.lru import LRU
from kvtier.testing import chain_of, sample_namespace
from kvtier.tiers.host.tier import HostTier
from kvtier.tiers.protocol import Miss

NS = sample_namespace(64)
LARGE_BYTES = 128 * 1024
"""A dictionary of some 3,000 entries: it is moved in a tenth of a millisecond."""


def largest_dict(root: object) -> int:
    """Bytes of the largest dictionary that is reached from an object, without those of modules and types."""
    seen, left, most = {id(root)}, [root], 0
    while left:
        one = left.pop()
        if isinstance(one, dict):
            most = max(most, sys.getsizeof(one))
        for found in gc.get_referents(one):
            if id(found) in seen or isinstance(
                found, ModuleType | type | FunctionType | BuiltinFunctionType | MethodType | bytes | int
            ):
                continue
            seen.add(id(found))
            left.append(found)
    return most


def test_reasons_are_kept_in_parts() -> None:
    losses = Losses()
    for number in range(LOSSES_MAX + LOSSES_MAX // 4):
        losses.record(BlockKey(number.to_bytes(48, "big")), Miss.EVICTED)
    assert LOSSES_MAX * 0.8 <= len(losses) <= LOSSES_MAX
    assert largest_dict(losses) <= LARGE_BYTES


def test_blocks_on_their_way_in_are_kept_in_parts() -> None:
    """A long chain comes from below: all of it has slots before the first is read."""
    tier, keys = HostTier(EmptyArena(5_000), LRU(5_000)), list(chain_of(NS, 5_000))
    tier.open()
    numbers, room = tier.reserve_leading(keys, 0, None, insist=True, priority=50, wall_s=0.0)
    assert room and len(numbers) == len(keys) == len(tier.filling()) and tier.busy()
    assert largest_dict(tier._filling) <= LARGE_BYTES
