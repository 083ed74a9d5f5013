"""One of several processes that use a store at once.

    python -m tests.tiers.disk.support.concurrent_writer DIRECTORY SECONDS SEED [stop]

Works for so many seconds at least, comparing all it reads; prints a JSON object with what it saw, exits with 1 if
it was wrong.
`stop`: instead, stops itself (SIGSTOP) while it holds the index's write lock, and says so first.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from kvtier.clock import SystemClock
from kvtier.testing import chain_of, sample_namespace
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Miss
from tests.tiers.disk.support.store import BLOCK, get, opened, put

CAPACITY = 96
NAMESPACE = sample_namespace(BLOCK)
TURNS_MIN = 30
"""However slow the machine is: there is something to compare."""
CHAINS = [chain_of(NAMESPACE, 6, seed) for seed in range(40)]


async def work(path: Path, seconds: float, seed: int) -> Counter[str]:
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    async with opened(path, CAPACITY, clock=SystemClock()) as tier:
        end = time.monotonic() + seconds
        while time.monotonic() < end or seen["turns"] < TURNS_MIN:
            seen["turns"] += 1
            chain = rng.choice(CHAINS)
            dice = rng.random()
            if dice < 0.5:
                seen.update(str(one) for one in await put(tier, chain, range(rng.randrange(1, 7)), parents=True))
            elif dice < 0.9:
                found = await get(tier, chain)
                assert Miss.CORRUPT not in found, "another process's write was taken for damage"
                seen.update("read" if one is True else f"miss {one}" for one in found)
            elif dice < 0.97:
                seen["evicted"] += await tier.evict(chain)
            else:
                tier.touch(chain, time.time())
    return seen


def stop_inside_a_transaction() -> None:
    save = WriteTxn.save
    left = [3]  # not the first: opening has transactions too, under a lock that others wait for

    def save_and_stop(self: WriteTxn) -> None:
        save(self)
        left[0] -= 1
        if left[0]:
            return
        print("stopped", flush=True)
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # one to the process may stop this thread too late
        WriteTxn.save = save  # type: ignore[method-assign]

    WriteTxn.save = save_and_stop  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[4:] == ["stop"]:
        stop_inside_a_transaction()
    print(json.dumps(asyncio.run(work(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))))
