"""How much of a session's prefix is in host RAM when it goes on, with and without a prefetch a little earlier.

    python benchmarks/session_prefetch.py

1,000 sessions, each a chain of 24 blocks that grows by 8 per request, 6 requests with exponential pauses of 10 minutes
on average, over a G2 that holds a tenth of them and a lower tier that holds all. The prefetch is the hint kv.prefetch,
2 s before a session goes on, as the sender of a tool's result can give it. Real code with a virtual clock; no figure
of it is a time. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import random
from typing import Any

import kvtier
from kvtier.config import Config
from kvtier.connectors.control import Controls
from kvtier.connectors.feedback import Feedback
from kvtier.identity.keys import SHARED
from kvtier.testing import MemoryTier, VirtualClock, chain_of, payloads_of, sample_namespace

SESSIONS, REQUESTS, FIRST, GROWTH, PAUSE_S, LEAD_S, SHARE = 1000, 6, 24, 8, 600.0, 2.0, 0.1
SIZE = 256
BLOCKS = FIRST + (REQUESTS - 1) * GROWTH
SLOT = 4096  # of G2, which pads


def run(prefetch: bool) -> dict[str, Any]:
    namespace, clock, rng = sample_namespace(SIZE), VirtualClock(), random.Random(7)
    config = Config.parse({"tiers": {"g2": {"capacity": int(SHARE * SESSIONS * BLOCKS) * SLOT}}})
    tier = MemoryTier(namespace, clock, capacity_blocks=SESSIONS * BLOCKS)
    feedback, controls = Feedback(namespace.block_tokens, config.retention.hints), Controls(config)
    chains = [chain_of(namespace, BLOCKS, seed) for seed in range(SESSIONS)]
    events = [(rng.expovariate(1 / PAUSE_S), session, 0) for session in range(SESSIONS)]
    resumed = wanted = found = fetched = 0
    heapq.heapify(events)
    with kvtier.open(config, namespace, clock=clock, tiers=[tier]) as cache:
        now = 0.0
        while events:
            at, session, turn = heapq.heappop(events)
            clock.advance(max(0.0, at - now))
            now = max(now, at)
            if turn < 0:  # the prefetch before request -turn
                hint = {"action_id": "", "action_type": "kv.prefetch", "action_version": "1.0",
                        "payload": {"session_id": str(session)}}  # fmt: skip
                envelope = {"protocol_version": "1.0", "message_id": "", "actions": [hint]}
                control = controls.parse({"hints": {"kv_hints": envelope}})
                wishes = feedback.begin(cache, SHARED, control, ())
                assert wishes is not None
                fetched += wishes.result(10)["hints"][0]["outcome"] == "accepted"
                while feedback.fetching:
                    cache.submit(asyncio.sleep(0)).result(10)
                continue
            length = FIRST + turn * GROWTH
            chain = chains[session][:length]
            if turn:
                before = length - GROWTH
                resumed += 1
                wanted += before
                found += min(before, cache.manager.prefix(chain[:before]))
            with cache.get(chain, 30):
                pass
            cache.put(chain, payloads_of(chain, SIZE))
            control = controls.parse({"session": str(session)})
            feedback.of(f"{session}-{turn}", SHARED, control, chain, {}, None)
            if turn + 1 < REQUESTS:
                again = now + rng.expovariate(1 / PAUSE_S)
                heapq.heappush(events, (again, session, turn + 1))
                if prefetch:
                    heapq.heappush(events, (max(now, again - LEAD_S), session, -(turn + 1)))
    return {
        "resumed": resumed,
        "blocks": wanted,
        "in_g2_percent": round(100 * found / wanted, 1),
        "prefetches": fetched,
    }


if __name__ == "__main__":
    print(json.dumps({"without": run(False), "with": run(True)}, indent=2))
