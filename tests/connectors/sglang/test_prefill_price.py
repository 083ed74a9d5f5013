"""What an engine's prefill costs, which loading is weighed against."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from kvtier.cost_line import Bound
from tests.connectors.sglang.support.linker_bench import PAGE, keys_of


def batch_of(tokens: int, began: float, **changed: Any) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    given = {"forward_mode": ForwardMode.EXTEND, "hicache_consumer_index": -1}
    return SimpleNamespace(**{**given, **changed}, extend_num_tokens=tokens, launch_ts=began)


def test_only_batches_that_did_nothing_but_compute_prompts_tell_the_price(bench: Any) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    b, reported = bench(), []
    b.linker._prefill._computed = lambda blocks, seconds: reported.append(blocks)
    now = time.monotonic()
    for other in ({"forward_mode": ForwardMode.DECODE}, {"forward_mode": ForwardMode.MIXED}):
        b.linker.batch_done(batch_of(8 * PAGE, now - 1, **other))
    b.linker.batch_done(batch_of(8 * PAGE, now - 1, hicache_consumer_index=3))
    b.linker.batch_done(batch_of(7 * PAGE, now - 1))  # too short to tell
    b.linker.batch_done(SimpleNamespace())  # of a release that names things otherwise
    assert reported == []
    b.linker.batch_done(batch_of(9 * PAGE, now - 1))
    assert reported == [9]


def test_what_prefill_costs_decides_what_is_loaded(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    b, keys = bench(), keys_of(6)
    b.offload(keys, [1, 2, 3, 4, 5, 6])
    b.settle()
    cache = b.linker._pages.cache
    cache.flush()
    slow = cache.manager.lower["g3"]
    monkeypatch.setattr(slow, "estimate", lambda: Bound(0.0, 1.0))
    for seconds, hit in ((0.1, 0), (60.0, 6)):
        cache.evict("g2")
        now = time.monotonic()
        for _ in range(40):
            b.linker.batch_done(batch_of(8 * PAGE, now - seconds))
            b.linker._prefill._free_at_s = 0.0  # as if the engine had been idle in between
        assert b.until_promoted(f"r{seconds}", keys) == hit, seconds
        if not hit:
            b.linker.admitted(b.req(f"r{seconds}"))
        b.linker.forget(f"r{seconds}")
    assert b.linker.stats()["requests"]["misses"] == {"slower": 6}


def test_whether_loading_is_weighed_is_the_operators_choice(bench: Any) -> None:
    from kvtier.errors import ConfigError

    b = bench(more={"recompute": "never"})
    b.linker.batch_done(batch_of(9 * PAGE, time.monotonic() - 1))
    assert b.linker._pages.cache.manager.promoter.costs() is None
    b = bench()
    b.linker.batch_done(batch_of(9 * PAGE, time.monotonic() - 1))
    assert b.linker._pages.cache.manager.promoter.costs() is not None
    with pytest.raises(ConfigError, match="sometimes"):
        bench(more={"recompute": "sometimes"})
