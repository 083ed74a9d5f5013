"""Which of SGLang's pools are kept whole, what their blocks are called, and what a linker does between two engines'
calls: on SGLang's real pool classes, without an engine."""

from __future__ import annotations

import time
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

PAGE, PAGES, LAYERS = 16, 40, 3


class Kind(IntEnum):
    FULL = 0
    SWA = 1
    MAMBA = 2


@pytest.fixture(scope="module", autouse=True)
def _cpu() -> None:
    from kvtier.testing import sglang_cpu

    sglang_cpu.install()


def mha(page: int = PAGE, **changed: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    given = {"head_num": 2, "head_dim": 32, "dtype": torch.float32, "layer_num": LAYERS, **changed}
    return MHATokenToKVPool(size=PAGE * PAGES, page_size=page, device="cpu", enable_memory_saver=False, **given)


def mla(**changed: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(
        size=PAGE * PAGES, page_size=PAGE, dtype=torch.float32, kv_lora_rank=48, qk_rope_head_dim=16,
        layer_num=LAYERS, device="cpu", enable_memory_saver=False, **changed,
    )  # fmt: skip


def pool(device: Any, page: int = PAGE, *kinds: Kind) -> Any:
    from kvtier.connectors.sglang_pool import pool_of

    return pool_of(device, page, kinds or (Kind.FULL,))


def test_a_block_is_a_page_of_all_layers() -> None:
    full, latent = pool(mha()), pool(mla())
    assert (full.kind, full.block_bytes) == ("full", LAYERS * 2 * PAGE * 2 * 32 * 4)
    assert (latent.kind, latent.block_bytes) == ("mla", LAYERS * PAGE * 64 * 4)


@pytest.mark.parametrize("kinds", [(Kind.FULL, Kind.SWA), (Kind.FULL, Kind.MAMBA), (Kind.SWA,)])
def test_hybrid_state_is_refused(kinds: tuple[Kind, ...]) -> None:
    from kvtier.errors import IdentityError

    with pytest.raises(IdentityError, match=kinds[-1].name):
        pool(mha(), PAGE, *kinds)


def test_pools_that_would_lose_a_part_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.errors import IdentityError

    class PageMajorMHATokenToKVPool:
        pass

    with pytest.raises(IdentityError, match="PageMajor"):
        pool(PageMajorMHATokenToKVPool())
    scaled, folded, uneven, indexed = mha(), mha(), mha(), mla()
    scaled.k_scale_buffer = [torch.zeros(1)]
    folded.kv_cache_layout = "hnd"
    uneven.v_head_dim = 16
    indexed.use_dsa = True
    for broken, word in ((scaled, "scales"), (folded, "hnd"), (uneven, "equal"), (indexed, "MLA")):
        with pytest.raises(IdentityError, match=word):
            pool(broken)


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────


def server(**changed: Any) -> Any:
    given = {
        "model_path": "hub/tiny", "revision": None, "speculative_algorithm": None, "load_format": "auto",
        "quantization": None, "json_model_override_args": "{}", "quantization_param_path": None,
    }  # fmt: skip
    return SimpleNamespace(**{**given, **changed})


def model_config(**rope: Any) -> Any:
    text = SimpleNamespace(rope_theta=10000.0, rope_scaling=None, rope_parameters=rope or None)
    return SimpleNamespace(hf_text_config=text, dtype=torch.float32)


def name(device: Any = None, *, ranks: dict[str, int] | None = None, rope: Any = None, **changed: Any) -> Any:
    from kvtier.config import Config
    from kvtier.connectors.common import Settings
    from kvtier.connectors.sglang_pool import Ranks, namespace_of

    settings = Settings(Config.parse({"version": 1}), weights="1")
    kept = pool(device if device is not None else mha())
    return namespace_of(server(**changed), model_config(**(rope or {})), settings, kept, Ranks(**(ranks or {})))


def test_whatever_changes_the_bytes_changes_the_name() -> None:
    same = name()
    others = [
        name(mha(dtype=torch.float16)),
        name(mha(head_num=4)),
        name(mha(layer_num=2)),
        name(mla()),
        name(ranks={"tp_rank": 0, "tp": 2}),
        name(ranks={"tp_rank": 1, "tp": 2}),
        name(rope={"rope_type": "linear", "factor": 2.0}),
        name(quantization="fp8"),
        name(json_model_override_args='{"rope_theta": 5}'),
        name(model_path="hub/other"),
    ]
    assert name().digest == same.digest
    assert len({n.digest for n in (same, *others)}) == len(others) + 1


def test_mla_ranks_share() -> None:
    assert name(mla(), ranks={"tp_rank": 1, "tp": 4}).digest == name(mla()).digest


def test_runs_whose_blocks_have_no_name_are_refused() -> None:
    from kvtier.errors import IdentityError

    with pytest.raises(IdentityError, match="speculative"):
        name(speculative_algorithm="EAGLE")
    for kind in ("dynamic", "longrope"):
        with pytest.raises(IdentityError, match=kind):
            name(rope={"rope_type": kind})


def test_sglang_hashes_pages_as_the_namespace_says() -> None:
    import hashlib
    import struct

    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    tokens = list(range(3 * PAGE))
    expected, parent = [], b""
    for start in range(0, len(tokens), PAGE):
        parent = hashlib.sha256(parent + struct.pack(f"<{PAGE}I", *tokens[start : start + PAGE])).digest()
        expected.append(parent.hex())
    assert list(get_storage_hash_str(RadixKey(tokens), None, page_size=PAGE)) == expected


# ── a linker between two calls ──────────────────────────────────────────────────────────────────────────────────


class Bench:
    """A linker over a real pool, called as the tree calls it."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, page: int = PAGE, g2: str = "4MiB", more: Any = None
    ) -> None:
        from kvtier.connectors import sglang as module
        from kvtier.testing import sample_namespace

        self.device, self.page = mha(page), page
        self.refusals = 0  # votes of another rank, to come

        for tensor in (*self.device.k_buffer, *self.device.v_buffer):
            tensor.copy_(torch.randn(tensor.shape))
        kept = pool(self.device, page)
        namespace = sample_namespace(kept.block_bytes, block_tokens=page, dtype="float32")
        monkeypatch.setattr(module, "_namespace", lambda *_: namespace)
        allocator = SimpleNamespace(get_kvcache=lambda: self.device)
        params = SimpleNamespace(
            token_to_kv_pool_allocator=allocator, page_size=page, is_eagle=False, mtp_draft_device_pools=(),
            sidecar_draft_device_pools=(),
        )  # fmt: skip
        tiers = {"g2": {"capacity": g2}, "g3": {"path": str(folder), "capacity": "64MiB"}}
        extra = {"kvtier_config": {"version": 1, "tiers": tiers}, **(more or {})}
        self.linker = module.KVTierLinker(server(), params, components={Kind.FULL}, extra_config=extra)

    def vote(self, answer: bool) -> bool:
        refused, self.refusals = self.refusals > 0, max(0, self.refusals - 1)
        return answer and not refused

    def req(self, rid: str, salt: str | None = None, **asked: Any) -> Any:
        params = SimpleNamespace(custom_params={"kvtier": asked} if asked else None)
        return SimpleNamespace(rid=rid, cache_salt=salt, extra_key=None, sampling_params=params)

    def slots(self, pages: list[int]) -> Any:
        return torch.cat([torch.arange(page * self.page, (page + 1) * self.page) for page in pages])

    def transfer(self, keys: list[str], pages: list[int] | None = None) -> list[Any]:
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

        indices = None if pages is None else self.slots(pages)
        return [PoolTransfer(name=PoolName.KV, keys=keys, device_indices=indices)]

    def offload(self, keys: list[str], pages: list[int], head: list[str] | None = None, **req: Any) -> bool:
        self.linker.own(self.req("o", **req))
        self.linker.place(head or [])
        queued: bool = self.linker.offload(self.transfer(keys, pages))
        self.linker.own(None)
        return queued

    def settle(self) -> list[bool]:
        return [self.linker.pop_completed_offload() for _ in range(self.linker.num_completed_offloads())]

    def lookup(self, rid: str, keys: list[str], head: list[str] | None = None, **req: Any) -> int:
        self.linker.meet(self.req(rid, **req), lambda: head or [], self.vote)
        return len(self.linker.lookup(rid, self.transfer(keys)))

    def flush(self) -> None:
        self.linker.reset()
        self.linker.flushed()

    def run(self) -> bool:
        return bool(self.linker.finish_layer_wise_loading(self.linker.start_layer_wise_loading()))

    def pinned(self) -> int:
        """Blocks under a lease, once those on their way to disk are there."""
        self.linker._pages.cache.flush()
        return int(self.linker.stats()["g2"]["pinned"])

    def bytes_of(self, page: int) -> bytes:
        rows = slice(page * self.page, (page + 1) * self.page)
        layers = zip(self.device.k_buffer, self.device.v_buffer, strict=True)
        return b"".join(t[rows].numpy().tobytes() for pair in layers for t in pair)

    def until_promoted(self, rid: str, keys: list[str]) -> int:
        """Blocks in G2 once nothing is on its way up any more."""
        for _ in range(400):
            hit = self.lookup(rid, keys)
            if not self.linker._visits.of(rid).waits:
                return hit
            time.sleep(0.01)
        pytest.fail("the promotion does not end")

    def until_resident(self, rid: str, keys: list[str]) -> int:
        for _ in range(400):
            hit = self.lookup(rid, keys)
            if not self.linker.awaited(rid):
                return hit
            time.sleep(0.01)
        pytest.fail("the request waits for ever")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    made: list[Bench] = []

    def make(**changed: Any) -> Bench:
        (tmp_path / "g3").mkdir(exist_ok=True)
        for old in made:
            old.linker.close()
        made.append(Bench(monkeypatch, tmp_path / "g3", **changed))
        return made[-1]

    yield make
    for old in made:
        old.linker.close()


def keys_of(count: int, seed: int = 0) -> list[str]:
    import hashlib

    return [hashlib.sha256(f"{seed}/{index}".encode()).hexdigest() for index in range(count)]


@pytest.mark.parametrize("page", [1, 16, 64])
def test_pages_move_out_and_into_other_places(bench: Any, page: int) -> None:
    b, keys = bench(page=page), keys_of(4)
    assert b.offload(keys, [3, 1, 4, 2])
    assert b.settle() == [True]
    expected = [b.bytes_of(p) for p in (3, 1, 4, 2)]
    assert b.lookup("r", keys) == 4
    assert b.linker.load("r", b.transfer(keys, [6, 8, 5, 7]))
    assert b.run()
    assert [b.bytes_of(p) for p in (6, 8, 5, 7)] == expected


def test_offloading_again_stores_nothing(bench: Any) -> None:
    b, keys = bench(), keys_of(4)
    b.offload(keys, [1, 2, 3, 4])
    b.settle()
    before = b.linker.stats()["requests"]["accepted"]
    assert b.offload(keys, [5, 6, 7, 8])
    assert b.settle() == [True]
    assert b.linker.stats()["requests"]["accepted"] == before == 4


def test_salts_and_wishes_of_requests_are_kept(bench: Any) -> None:
    b, keys = bench(), keys_of(2)
    assert b.offload(keys, [1, 2], salt="alice")
    b.settle()
    assert b.lookup("a", keys, salt="alice") == 2
    assert b.lookup("b", keys, salt="bob") == b.lookup("c", keys) == 0
    assert not b.offload(keys_of(2, 1), [1, 2], store=False)
    assert not b.offload(keys_of(2, 1), [1, 2], retention="none such")
    assert b.lookup("d", keys, salt="alice", load=False) == 0


def test_an_offload_of_nobody_is_refused(bench: Any) -> None:
    b = bench()
    b.linker.place([])
    assert not b.linker.offload(b.transfer(keys_of(1), [1]))


def test_a_load_is_refused_when_a_block_has_gone(bench: Any) -> None:
    b, keys = bench(), keys_of(4)
    b.offload(keys, [1, 2, 3, 4])
    b.settle()
    assert b.lookup("r", keys) == 4
    cache = b.linker._pages.cache
    cache.evict("g2")
    assert not b.linker.load("r", b.transfer(keys, [5, 6, 7, 8]))
    assert b.linker.start_layer_wise_loading() == -1
    cache.check()


def test_a_queued_load_can_be_cancelled(bench: Any) -> None:
    b, keys = bench(), keys_of(2)
    b.offload(keys, [1, 2])
    b.settle()
    b.lookup("r", keys)
    b.linker.load("r", b.transfer(keys, [5, 6]))
    before = b.bytes_of(5)
    assert not b.linker.cancel_queued_load("stranger")
    assert b.linker.cancel_queued_load("r")
    assert not b.linker.cancel_queued_load("r")
    assert b.linker.start_layer_wise_loading() == -1
    assert b.bytes_of(5) == before
    assert b.pinned() == 0


def test_reset_in_the_middle_keeps_what_is_stored(bench: Any) -> None:
    b, keys = bench(), keys_of(4)
    b.offload(keys[:2], [1, 2])
    b.settle()
    b.lookup("r", keys[:2])
    b.linker.load("r", b.transfer(keys[:2], [5, 6]))
    b.offload(keys[2:], [3, 4], head=keys[:2])
    b.linker.reset()
    assert b.linker.num_completed_offloads() == 0
    assert b.linker.start_layer_wise_loading() == -1
    assert b.pinned() == 0
    assert b.lookup("s", keys) == 4


def test_what_is_deeper_is_waited_for_and_verified(bench: Any) -> None:
    b, keys = bench(), keys_of(6)
    b.offload(keys, [1, 2, 3, 4, 5, 6])
    b.settle()
    expected = [b.bytes_of(p) for p in range(1, 7)]
    cache = b.linker._pages.cache
    cache.flush()
    cache.evict("g2")
    assert b.lookup("r", keys) == 0
    assert b.until_resident("r", keys) == 6
    assert b.linker.load("r", b.transfer(keys, [11, 12, 13, 14, 15, 16]))
    assert b.run()
    assert [b.bytes_of(p) for p in range(11, 17)] == expected
    b.linker.forget("r")
    assert b.pinned() == 0


def test_a_request_waits_for_all_ranks_and_only_once(bench: Any) -> None:
    b, keys = bench(), keys_of(3)
    answers = []
    for b.refusals in (1, 0):
        b.until_promoted("r", keys)
        answers.append(b.linker.awaited("r"))
    assert answers == [True, False]
    b.refusals = 1
    assert not b.linker.awaited("r")
    assert b.refusals == 1  # who is decided on is not voted on again


def test_ranks_vote_on_a_request_also_where_one_has_no_cache(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    b, keys = bench(), keys_of(3)
    monkeypatch.setattr(b.linker._rotation, "current", None)
    assert b.lookup("r", keys) == 0
    b.refusals = 1
    assert b.linker.awaited("r")
    assert b.refusals == 0


def test_a_load_that_one_rank_refuses_is_nobodys(bench: Any) -> None:
    b, keys = bench(), keys_of(2)
    b.offload(keys, [1, 2])
    b.settle()
    b.lookup("r", keys)
    b.refusals = 1
    assert not b.linker.load("r", b.transfer(keys, [5, 6]))
    assert b.linker.start_layer_wise_loading() == -1
    assert b.pinned() == 0
    assert b.linker.load("r", b.transfer(keys, [5, 6]))
    assert b.run()


def test_every_offload_has_one_answer(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    b, keys = bench(), keys_of(2)
    with monkeypatch.context() as patch:
        patch.setattr(b.linker._rotation, "current", None)
        assert b.offload(keys, [1, 2])
        assert b.settle() == [False]
    with monkeypatch.context() as patch:
        patch.setattr(b.linker._pages._engine, "store", lambda _: 1 / 0)
        assert b.offload(keys, [1, 2])
    with monkeypatch.context() as patch:
        patch.setattr(b.linker._pages, "offload", lambda *_: 1 / 0)
        assert b.offload(keys, [1, 2])
    assert b.offload(keys, [1, 2])
    assert b.settle() == [False, False, True]
    assert b.linker.stats()["engine"]["events"] == {"copies_failed": 2, "blocks_stored": 2}


def test_tokens_are_booked_by_the_tier_they_came_from(bench: Any) -> None:
    b, keys = bench(), keys_of(6)
    b.offload(keys, [1, 2, 3, 4, 5, 6])
    b.settle()
    cache = b.linker._pages.cache
    cache.flush()
    cache.evict("g2")
    b.offload(keys[:2], [1, 2])
    b.settle()
    b.until_promoted("r", keys)
    assert b.linker.load("r", b.transfer(keys, [11, 12, 13, 14, 15, 16]))
    b.linker.admitted("r")
    assert b.run()
    assert b.linker.stats()["engine"]["tokens_read"] == {"g2": 2 * PAGE, "g3": 4 * PAGE}
    b.until_promoted("s", keys_of(3, 1))
    b.linker.admitted("s")
    requests = b.linker.stats()["requests"]
    assert (requests["lookups"], requests["hits"], requests["misses"]) == (9, 6, {"absent": 3})
    assert b.pinned() == 0


def batch_of(tokens: int, began: float, **changed: Any) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    given = {"forward_mode": ForwardMode.EXTEND, "hicache_consumer_index": -1}
    return SimpleNamespace(**{**given, **changed}, extend_num_tokens=tokens, launch_ts=began)


def test_only_batches_that_did_nothing_but_compute_prompts_tell_the_price(bench: Any) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    b, told = bench(), []
    b.linker._prefill._computed = lambda blocks, seconds: told.append(blocks)
    now = time.monotonic()
    for other in ({"forward_mode": ForwardMode.DECODE}, {"forward_mode": ForwardMode.MIXED}):
        b.linker.ran(batch_of(8 * PAGE, now - 1, **other))
    b.linker.ran(batch_of(8 * PAGE, now - 1, hicache_consumer_index=3))
    b.linker.ran(batch_of(7 * PAGE, now - 1))  # too short to tell
    b.linker.ran(SimpleNamespace())  # of a release that names things otherwise
    assert told == []
    b.linker.ran(batch_of(9 * PAGE, now - 1))
    assert told == [9]


def test_what_prefill_costs_decides_what_is_loaded(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    b, keys = bench(), keys_of(6)
    b.offload(keys, [1, 2, 3, 4, 5, 6])
    b.settle()
    cache = b.linker._pages.cache
    cache.flush()
    slow = cache.manager.lower["g3"]
    monkeypatch.setattr(slow, "estimate", lambda: 1.0)
    for seconds, hit in ((0.1, 0), (60.0, 6)):
        cache.evict("g2")
        now = time.monotonic()
        for _ in range(40):
            b.linker.ran(batch_of(8 * PAGE, now - seconds))
            b.linker._prefill._free_at = 0.0  # as if the engine had been idle in between
        assert b.until_promoted(f"r{seconds}", keys) == hit, seconds
        if not hit:
            b.linker.admitted(f"r{seconds}")
        b.linker.forget(f"r{seconds}")
    assert b.linker.stats()["requests"]["misses"] == {"slower": 6}


def test_whether_loading_is_weighed_is_the_operators_choice(bench: Any) -> None:
    from kvtier.errors import ConfigError

    b = bench(more={"recompute": "never"})
    b.linker.ran(batch_of(9 * PAGE, time.monotonic() - 1))
    assert b.linker._pages.cache.manager._costs() is None
    b = bench()
    b.linker.ran(batch_of(9 * PAGE, time.monotonic() - 1))
    assert b.linker._pages.cache.manager._costs() is not None
    with pytest.raises(ConfigError, match="sometimes"):
        bench(more={"recompute": "sometimes"})


def test_prompts_are_pinned_whether_they_are_looked_up_or_on_the_device(bench: Any) -> None:
    b, keys, wish = bench(), keys_of(4), {"name": "manual", "ttl": "1h"}
    cache = b.linker._pages.cache
    b.lookup("r", keys[2:], head=keys[:2], pin=wish)
    b.linker.admitted("r")
    b.linker.meet(b.req("s", pin={"name": "hot", "ttl": "1h"}), lambda: keys[:3], b.vote)
    b.linker.admitted("s")  # no look-up came
    b.linker.meet(b.req("t"), lambda: keys, b.vote)
    b.linker.admitted("t")
    for _ in range(100):
        if len(cache.pins.list()) == 2:
            break
        time.sleep(0.02)
    assert {pin.name: pin.blocks for pin in cache.pins.list()} == {"manual": 4, "hot": 3}
    b.offload(keys, [1, 2, 3, 4])
    b.settle()
    assert {pin.name: pin.resident for pin in cache.pins.list()} == {"manual": 4, "hot": 3}


def test_metrics_follow_what_was_counted() -> None:
    from prometheus_client import CollectorRegistry

    from kvtier.connectors.sglang_metrics import EngineMetrics

    registry = CollectorRegistry()
    metrics = EngineMetrics({"model_name": "m", "tp_rank": "0"}, registry)
    metrics.update({"tokens_read": {"g2": 16}, "events": {}})
    metrics.update({"tokens_read": {"g2": 48, "g3": 16}, "events": {"lookups_late": 1}})
    labels = {"model_name": "m", "tp_rank": "0"}
    read = "sglang:kvtier_tokens_read_total"
    assert registry.get_sample_value(read, {**labels, "tier": "g2"}) == 48
    assert registry.get_sample_value(read, {**labels, "tier": "g3"}) == 16
    assert registry.get_sample_value("sglang:kvtier_events_total", {**labels, "event": "lookups_late"}) == 1


def test_an_aborted_request_lets_go_of_its_promotion(bench: Any) -> None:
    b, keys = bench(), keys_of(6)
    b.offload(keys, [1, 2, 3, 4, 5, 6])
    b.settle()
    cache = b.linker._pages.cache
    cache.flush()
    cache.evict("g2")
    b.lookup("r", keys)
    b.linker.forget("r")
    assert b.until_resident("s", keys) == 6
    b.linker.forget("s")
    assert b.pinned() == 0
    cache.check()


def test_a_full_host_ram_fails_the_tail_of_an_offload(bench: Any) -> None:
    b = bench(g2=str(5 * 24576))
    manager = b.linker._pages.cache.manager
    blocks, keys = manager.host.capacity, keys_of(8)
    assert b.offload(keys[:blocks], list(range(1, blocks + 1)))
    b.settle()
    b.lookup("r", keys[:blocks])
    with manager.pin(b.linker._visits.of("r").chain):  # every slot is in use
        assert b.offload(keys_of(2, 1), [9, 10])
        assert b.settle() == [False]
    assert b.lookup("s", keys[:blocks]) == blocks
    manager.check()


def test_nothing_raises_into_the_scheduler(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    b, keys = bench(), keys_of(2)
    b.offload(keys, [1, 2])
    b.settle()
    manager = b.linker._pages.cache.manager

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken")

    for verb in ("prefix", "pin", "reserve"):
        with monkeypatch.context() as patch:
            patch.setattr(manager, verb, broken)
            b.lookup("r", keys)
            b.linker.load("r", b.transfer(keys, [5, 6]))
            b.offload(keys_of(2, 9), [1, 2])
            assert b.linker.num_completed_offloads() >= 0
        b.linker.reset()
    assert b.lookup("again", keys) == 2


def test_new_weights_leave_the_old_blocks_behind(bench: Any) -> None:
    b, keys = bench(), keys_of(2)
    b.offload(keys, [1, 2])
    b.settle()
    b.offload(keys_of(2, 1), [3, 4])  # its completion is still owed to the tree
    b.linker.weights_change()
    assert b.settle() == [False]
    b.flush()
    assert b.linker._rotation.join(30)
    assert b.lookup("r", keys) == 0
    assert b.offload(keys, [1, 2])
    b.settle()
    assert b.lookup("s", keys) == 2
    b.flush()
    assert b.lookup("t", keys) == 2


def test_a_layer_that_never_comes_is_told_at_the_end(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    b, keys = bench(), keys_of(2)
    b.offload(keys, [1, 2])
    b.settle()
    b.lookup("r", keys)
    b.linker.load("r", b.transfer(keys, [5, 6]))

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(b.linker._pages._engine, "load", refuse)
        assert not b.run()
    assert b.pinned() == 0
    b.lookup("s", keys)
    assert b.linker.load("s", b.transfer(keys, [5, 6]))
    assert b.run()
