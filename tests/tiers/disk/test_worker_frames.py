"""Messages to and from G3's worker process that are too long: refused where they are made."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvtier.clock import SystemClock
from kvtier.errors import TierError
from kvtier.retention.trusted_clock import TrustedClock
from kvtier.testing import chain_of, sample_namespace
from kvtier.tiers.disk.worker import protocol
from kvtier.tiers.disk.worker.client import DiskWorkerClient
from kvtier.tiers.disk.worker.server import Server
from kvtier.tiers.disk.worker.shared_arena import SharedArena
from kvtier.times import Wall
from tests.tiers.disk.support.store import BLOCK
from tests.tiers.disk.support.worker import memory

NAMESPACE = sample_namespace(BLOCK)
CHAIN = chain_of(NAMESPACE, 2000)


async def test_a_call_that_is_too_long_fails_and_its_process_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process took its length for garbage, and ended: all blocks were misses until another one had opened."""
    clock = SystemClock()
    with memory() as arena:
        tier = DiskWorkerClient([tmp_path / "g3"], 64 * BLOCK, NAMESPACE, clock=clock, arena=arena)
        await tier.open()
        worker = tier._worker
        monkeypatch.setattr(protocol, "FRAME_BYTES_MAX", 1 << 16)
        with pytest.raises(TierError, match="too long"):
            await tier.evict(CHAIN)
        assert await tier.evict(CHAIN[:4]) == 0
        assert tier._worker is worker and worker is not None and not worker._waiting
        await tier.close(clock.monotonic() + 60)


async def test_an_answer_that_is_too_long_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a million retained blocks: the cache took its length for garbage, and ended the process each time."""
    sent: list[bytes] = []
    server = Server(asyncio.StreamReader(), sent.append, SharedArena([]))

    async def retained() -> dict[bytes, Wall]:
        return {bytes(key): Wall(1.0) for key in CHAIN}

    monkeypatch.setattr(protocol, "FRAME_BYTES_MAX", 1 << 16)
    call = protocol.Call(1, "retained", TrustedClock.around(SystemClock()).read(), protocol.packed(()))
    done = asyncio.ensure_future(retained())
    server._tasks[1] = done
    await done
    server._reply(call, done)
    (reply,) = (protocol.replies.decode(raw[4:]) for raw in sent)
    assert isinstance(reply, protocol.Refusal) and "too long" in reply.text


def test_a_million_retained_blocks_travel() -> None:
    key, count = bytes(CHAIN[0]), 4_000_000
    assert count * len(protocol.packed({key: 1.0})) < protocol.FRAME_BYTES_MAX
