"""The tiers of a configuration, put together: an arena and G2, G3 and G4 below it, and the manager above them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from kvtier.clock import Clock
from kvtier.config import Config
from kvtier.identity.namespace import Namespace
from kvtier.manager.hierarchy import ManagerLimits
from kvtier.manager.manager import Manager
from kvtier.policies.policy import make_policy
from kvtier.retention.trusted_clock import TrustedClock
from kvtier.tiers.host.arena import Arena
from kvtier.tiers.host.tier import HostTier
from kvtier.tiers.protocol import Tier

if TYPE_CHECKING:
    from kvtier.tiers.data_keys import StoredKeys


def build(
    config: Config,
    namespace: Namespace,
    clock: Clock,
    lower: Sequence[Tier] | None = None,
    near: Sequence[Collection[int]] = (),
    computes: bool = False,
) -> Manager:
    """A closed manager for this configuration. Opens nothing. `computes`: a model computes in this process, and G3 is
    to leave it the interpreter. Raises ConfigError."""
    tiers, clock = config.tiers, TrustedClock.around(clock)
    arena = Arena(namespace.block_bytes, namespace.ranks_served, tiers.g2.capacity, near)
    limits = limits_of(config, namespace)
    if lower is None:
        lower = lower_tiers(config, namespace, clock, arena if computes else None)
    host = HostTier(arena, make_policy(config.policy, arena.slots), config.retention.quota or 0.0)
    return Manager(host, lower, clock, limits)


def limits_of(config: Config, namespace: Namespace) -> ManagerLimits:
    """The manager's bounds in a configuration. Pure."""
    g3 = config.tiers.g3
    bound_s = config.security.purge_bound if config.security.purge == "strict" else math.inf
    return ManagerLimits(
        lookup_s=config.deadlines.lookup,
        reserved=config.retention.reserved,
        store_threshold=config.offload.store_threshold,
        min_prefix_blocks=-(-config.offload.min_prefix // namespace.block_tokens),
        block_tokens=namespace.block_tokens,
        classes=tuple(terms.name for terms in config.terms()),
        close_s=config.deadlines.close,
        purge_bound_s=bound_s,
        tombstones_s=min(20.0, bound_s / 3),
        write_rate=float(g3.write_rate or 0) if g3 else 0.0,
        g2_bytes=config.tiers.g2.capacity,
        g3_bytes=g3.capacity if g3 else 0,
        g3_write_budget=_daily_bytes(config),
    )


def _daily_bytes(config: Config) -> float:
    """What may be written to G3 per day; 0: any."""
    g3 = config.tiers.g3
    return float((g3.write_budget or 0) * g3.capacity) if g3 else 0.0


def data_keys(config: Config, clock: Clock) -> StoredKeys | None:
    """The keys that G3 and G4 encrypt with; None where they are not to. Reads the keyring. Raises ConfigError."""
    if config.security.data_keys is None:
        return None
    from kvtier.tiers.data_keys import StoredKeys
    from kvtier.tiers.key_directory import KeyDirectory

    return StoredKeys(KeyDirectory(config.security.data_keys), config.keyring(), clock)


def lower_tiers(config: Config, namespace: Namespace, clock: Clock, arena: Arena | None = None) -> list[Tier]:
    """G3 and G4 as configured, closed, nearest first. Imports only what is used. With an `arena`, G3 works in a process
    of its own over that memory."""
    out: list[Tier] = []
    g3, g4, quota = config.tiers.g3, config.tiers.g4, config.retention.quota or 0.0
    budget = _daily_bytes(config)
    keys = data_keys(config, clock)
    if g3 is not None and arena is not None:
        from kvtier.tiers.disk.worker.client import DiskWorkerClient

        out.append(
            DiskWorkerClient(
                g3.path, g3.capacity, namespace, clock=clock, arena=arena, quota=quota, write_budget=budget, keys=keys
            )
        )
    elif g3 is not None:
        from kvtier.tiers.disk.tier import DiskTier

        tier = DiskTier(g3.path, g3.capacity, namespace, clock=clock, quota=quota, write_budget=budget, keys=keys)
        out.append(tier)
    if g4 is not None:
        from kvtier.tiers.objects.bucket.open import BucketLimits
        from kvtier.tiers.objects.tier import ObjectTier

        out.append(
            ObjectTier(
                g4.url,
                namespace,
                clock=clock,
                options=g4.options,
                client=g4.client,
                stride=None if g4.stride == "auto" else g4.stride,
                limits=BucketLimits(
                    concurrency=g4.concurrency,
                    read_rate=float(g4.read_rate or 0),
                    write_rate=float(g4.write_rate or 0),
                ),
                keyring=config.keyring(),
                keys=keys,
                compression=g4.compression,
            )
        )
    return out
