"""Test tools of kvtier, public for the tests of other tiers and connectors.

MemoryTier      a tier in a dict, with a durable image: the model that real tiers are compared with
FaultyTier      wraps a tier and fails, delays or damages by rule and seed
VirtualClock    time that moves only by `advance`; SkewedClock: another clock, ahead of it by the wall
VirtualBucket   a client of a bucket in memory, the VirtualServer; faults go into a subclass
payload_of      block bytes as a pure function of the key, so that any wrong byte shows
check_tier      the contract of `kvtier.tiers.protocol.Tier` as a test suite
Child           a program in a process of its own that answers in JSON lines
"""

from kvtier.testing.child import Child, ChildFailed
from kvtier.testing.clock import SkewedClock, VirtualClock
from kvtier.testing.contract import check_tier
from kvtier.testing.faults import Fault, FaultyTier, verification_off
from kvtier.testing.memory import MemoryTier
from kvtier.testing.payload import chain_of, payload_of, payloads_of, sample_namespace, seal
from kvtier.testing.virtual_bucket import VirtualBucket, VirtualServer

__all__ = [
    "Child",
    "ChildFailed",
    "Fault",
    "FaultyTier",
    "MemoryTier",
    "SkewedClock",
    "VirtualBucket",
    "VirtualClock",
    "VirtualServer",
    "chain_of",
    "check_tier",
    "payload_of",
    "payloads_of",
    "sample_namespace",
    "seal",
    "verification_off",
]
