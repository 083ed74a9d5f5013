"""Boundaries of a prompt in the tiers below G1: the longest for which every group's blocks are there.

The chain of the full group is found as any prefix is. The blocks that the other groups need at a boundary are a chain
of their own (`kvtier.identity.groups.boundary_keys`), and a part of it is of no use. Nothing says at which depths such
chains were stored: they are asked for from the longest on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvtier.connectors.promoted import Promoted
from kvtier.identity.keys import BlockKey
from kvtier.manager.lease import Lease
from kvtier.manager.manager import Manager
from kvtier.times import Mono

TRIED = 512
"""Boundaries that are tried for one request, from the longest on: each is a look-up."""
_ASKED_AT_ONCE = 16
"""Boundaries that lower tiers are asked for at the same time."""


def depths_below(start: int, stop: int, step: int = 1) -> Iterator[int]:
    """Depths beyond `start` and up to `stop` at which a boundary is looked for, from the longest on: some, and where
    most of them lie at multiples of `step`, some multiples below those."""
    near = max(start, stop - TRIED)
    yield from range(stop, near, -1)
    if step > 1:
        top = near // step * step
        yield from range(top, max(start, top - TRIED * step), -step)


NOTHING: Mapping[int, int] = {}


async def promote_boundary(
    manager: Manager,
    chain: Sequence[BlockKey],
    first_at: Callable[[int], BlockKey | None],
    keys_at: Callable[[int], list[BlockKey]],
    deadline: Mono,
    promoted: Promoted,
    step: int = 1,
) -> Lease:
    """Promote the longest boundary beyond the start of `promoted` that the tiers can serve: the chain up to there, and
    the blocks of other groups (`keys_at` a depth, of which `first_at` is the first). `step`: see `depths_below`.
    Releases what it pinned; see `requests.promote`. Notes in `promoted` how much of the chain was seen."""
    start = promoted.start
    promoted.matched = top = await manager.match(chain, deadline)
    depth = await stored_boundary(manager, first_at, keys_at, depths_below(start, top, step), deadline)
    if depth is None:
        return await manager.promote(chain[:start], deadline, start)
    with await manager.promote(chain[:depth], deadline, start) as lease:
        if keys := keys_at(depth):
            (await manager.promote(keys, deadline)).release()
        return lease


async def stored_boundary(
    manager: Manager,
    first_at: Callable[[int], BlockKey | None],
    keys_at: Callable[[int], list[BlockKey]],
    depths: Iterable[int],
    deadline: Mono,
    held: Mapping[int, int] = NOTHING,
) -> int | None:
    """The first of `depths` for which the blocks of other groups are all in some tier. `held`: by depth, how many of
    them, from the first on, the caller has in G1."""
    waiting = list(depths)
    while waiting:
        part, waiting = waiting[:_ASKED_AT_ONCE], waiting[_ASKED_AT_ONCE:]
        heads = [first for depth in part if depth not in held and (first := first_at(depth)) is not None]
        found = await asyncio.gather(*(manager.match([head], deadline) for head in heads))
        here = {head for head, count in zip(heads, found, strict=True) if count}
        for depth in part:
            first = first_at(depth)
            if first is None:
                return depth
            if depth in held or first in here:
                keys, start = keys_at(depth), held.get(depth, 0)
                if start == len(keys) or await manager.match(keys, deadline, start) == len(keys):
                    return depth
    return None
