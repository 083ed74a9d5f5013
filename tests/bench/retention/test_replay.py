"""The replay with real bytes: what is served is what was stored, also by the process after the one that was killed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.bench.retention.curves import TtlCurve
from kvtier.bench.retention.replay import Setup, _serve_one, replay
from kvtier.bench.retention.simulate import keys_of
from kvtier.bench.retention.trace import Trace
from kvtier.errors import CorruptError, KVTierError
from kvtier.testing import payload_of

BLOCK = 4096


@pytest.mark.timeout(240)
def test_a_killed_process_is_followed_by_one_that_finds_its_blocks(made: Callable[..., Trace], tmp_path: Path) -> None:
    trace = made(1, requests=120, users=6)
    done = replay(trace, Setup(tmp_path, ttl=10**6, bytes_per_token=BLOCK // 16, g2_bytes=300 * BLOCK, g3_bytes=2**30))
    assert [one.number for one in done.served] == list(range(len(trace.requests)))
    assert done.killed_at == len(trace.requests) // 2
    after = done.served[done.killed_at]
    assert after.tiers.get("g2", 0) == 0  # RAM died with the process
    assert sum(one.tiers.get("g3", 0) for one in done.served[done.killed_at :]) > 0  # the disk did not
    best = TtlCurve(trace).prefill_left_percent(10**6)
    assert best <= done.prefill_left_percent < best + 25
    assert done.bytes_checked > 0


@pytest.mark.timeout(240)
def test_without_a_kill_and_with_room_nothing_is_lost(made: Callable[..., Trace], tmp_path: Path) -> None:
    trace = made(2, requests=60, users=4)
    setup = Setup(tmp_path, ttl=10**6, bytes_per_token=BLOCK // 16, g2_bytes=2000 * BLOCK, g3_bytes=2**30, kill=False)
    done = replay(trace, setup)
    assert done.prefill_left_percent == pytest.approx(TtlCurve(trace).prefill_left_percent(10**6))
    assert done.tier_percent.keys() == {"g2"} and done.killed_at == -1


def test_a_tier_that_does_not_open_ends_it(made: Callable[..., Trace], tmp_path: Path) -> None:
    """On a full disk it went on in RAM alone, and printed its hits as those of all tiers."""
    with pytest.raises(KVTierError, match="a replay needs all its tiers: g3: not open"):
        replay(made(2, requests=4, users=2), Setup(tmp_path, ttl=60, bytes_per_token=BLOCK // 16, g3_bytes=2**60))


@pytest.mark.timeout(240)
def test_time_that_runs_fast_is_the_traces(made: Callable[..., Trace], tmp_path: Path) -> None:
    """Minutes of the trace pass in moments; what is idle for less than the ttl must be served all the same."""
    trace = made(4, requests=60, users=4)
    setup = Setup(tmp_path, ttl=120, bytes_per_token=BLOCK // 16, g2_bytes=2000 * BLOCK, g3_bytes=2**30, kill=False)
    best = TtlCurve(trace).prefill_left_percent(120)
    assert replay(trace, setup).prefill_left_percent == pytest.approx(best, abs=1.0)
    assert 0 < best < 99


class _Found(SimpleNamespace):
    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __len__(self) -> int:
        return len(self.blocks)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_byte_is_seen(made: Callable[..., Trace], wrong: bool) -> None:
    chain = keys_of(made(3, requests=5))[:2]
    blocks = [bytearray(payload_of(key, BLOCK)) for key in chain]
    blocks[1][77] ^= wrong
    cache = SimpleNamespace(get=lambda _: _Found(blocks=blocks, tiers=["g2", "g3"]))
    if wrong:
        with pytest.raises(CorruptError, match="request 9: block"):
            _serve_one(cache, 9, chain, BLOCK)
    else:
        assert _serve_one(cache, 9, chain, BLOCK).tiers == {"g2": 1, "g3": 1}
