"""kvtier under SGLang's own host pools, in every memory layout, and under SGLang's fault injector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("on_cpu")

LAYERS, HEADS, DIM, PAGE, PAGES = 3, 2, 32, 16, 12
MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def host_pool(kind: str, layout: str) -> Any:
    """One of SGLang's host pools over one of its CPU device pools."""
    tokens = PAGE * PAGES
    if kind == "mha":
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost as Host

        device = MHATokenToKVPool(
            size=tokens, page_size=PAGE, dtype=torch.float32, head_num=HEADS, head_dim=DIM, layer_num=LAYERS,
            device="cpu", enable_memory_saver=False,
        )  # fmt: skip
    else:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
        from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost as Host

        device = MLATokenToKVPool(
            size=tokens, page_size=PAGE, dtype=torch.float32, kv_lora_rank=48, qk_rope_head_dim=16, layer_num=LAYERS,
            device="cpu", enable_memory_saver=False,
        )  # fmt: skip
    (info,) = device.get_device_pool_infos()
    more = {"target_layer_num": LAYERS} if kind == "mla" else {}
    return Host(
        info.buffer_info, 1.0, 0, PAGE, layout, pin_memory=False, device="cpu", device_capacity_tokens=tokens,
        start_layer=0, end_layer=LAYERS, host_token_capacity=tokens, **more,
    )  # fmt: skip


def storage_config(extra: dict[str, Any], **changed: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    given = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "tiny",
    }  # fmt: skip
    return HiCacheStorageConfig(**{**given, **changed, "extra_config": extra})


def extra_config(folder: Path, **more: Any) -> dict[str, Any]:
    tiers = {"g2": {"capacity": "1MiB"}, "g3": {"path": str(folder), "capacity": "64MiB"}}
    return {
        "backend_name": "kvtier",
        "module_path": "kvtier.connectors.sglang.hicache",
        "class_name": "KVTierStorage",
        "interface_v1": 1,
        "kvtier_config": {"version": 1, "tiers": tiers},
        "weights": "test-1",
        **more,
    }


def engine(**changed: Any) -> tuple[Any, Any]:
    """What SGLang would say of a running engine."""
    server = {
        "model_path": "hub/tiny", "revision": None, "speculative_algorithm": None, "load_format": "auto",
        "quantization": None, "json_model_override_args": "{}", "quantization_param_path": None,
    }  # fmt: skip
    text = SimpleNamespace(rope_theta=10000.0, rope_scaling=None, rope_parameters=changed.pop("rope", None))
    return SimpleNamespace(**{**server, **changed}), SimpleNamespace(hf_text_config=text, dtype=torch.float32)


@pytest.fixture
def attach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes backends as SGLang does, over one directory; closes them."""
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    from kvtier.connectors.sglang import hicache as module

    monkeypatch.setattr(module, "running_engine", engine)

    made: list[Any] = []

    def make(pool: Any, **changed: Any) -> Any:
        (tmp_path / "g3").mkdir(exist_ok=True)
        config = storage_config(extra_config(tmp_path / "g3"), **changed)
        backend = StorageBackendFactory.create_backend("dynamic", config, pool)
        backend.register_mem_pool_host(pool)
        made.append(backend)
        return backend

    yield make
    for backend in made:
        getattr(backend, "_backend", backend).close()


def keys_of(count: int, seed: int = 0, salt: str | None = None) -> list[str]:
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    tokens = torch.arange(count * PAGE).add(seed * 100_000).tolist()
    return list(get_storage_hash_str(RadixKey(tokens, cache_salt=salt), None, page_size=PAGE))


def indices_of(pages: list[int]) -> Any:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def fill(pool: Any) -> None:
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(1)))


def page_bytes(pool: Any, page: int) -> bytes:
    return bytes(pool.get_data_page(page * PAGE).contiguous().numpy().tobytes())


def after(keys: list[str], start: int) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

    return HiCacheStorageExtraInfo(prefix_keys=keys[:start])


@pytest.mark.parametrize(
    ("kind", "layout"), [("mha", layout) for layout in MHA_LAYOUTS] + [("mla", layout) for layout in MLA_LAYOUTS]
)
def test_pages_come_back_as_they_were_into_other_places(attach: Any, kind: str, layout: str) -> None:
    pool = host_pool(kind, layout)
    fill(pool)
    backend = attach(pool, is_mla_model=kind == "mla")
    keys = keys_of(8)
    assert backend.batch_exists(keys) == 0
    assert backend.batch_set_v1(keys[:5], indices_of([0, 1, 2, 3, 4])) == [True] * 5
    assert backend.batch_set_v1(keys[5:], indices_of([5, 6, 7]), after(keys, 5)) == [True] * 3
    expected = [page_bytes(pool, page) for page in range(8)]
    assert len(set(expected)) == 8
    pool.kv_buffer.zero_()
    assert backend.batch_exists(keys[2:], after(keys, 2)) == 6
    places = [11, 3, 8, 0, 5, 9, 1, 2]
    assert backend.batch_get_v1(keys, indices_of(places)) == [True] * 8
    assert [page_bytes(pool, page) for page in places] == expected
    untouched = sorted(set(range(PAGES)) - set(places))
    assert all(page_bytes(pool, page) == bytes(len(expected[0])) for page in untouched)


def test_a_second_process_would_find_them(attach: Any) -> None:
    pool = host_pool("mha", "page_first")
    fill(pool)
    first = attach(pool)
    keys = keys_of(6)
    first.batch_set_v1(keys, indices_of(list(range(6))))
    expected = [page_bytes(pool, page) for page in range(6)]
    first.close()
    pool.kv_buffer.zero_()
    second = attach(pool)
    assert second.batch_exists(keys) == 6
    assert second.batch_get_v1(keys, indices_of(list(range(6)))) == [True] * 6
    assert [page_bytes(pool, page) for page in range(6)] == expected


def test_reads_end_at_the_first_page_that_is_missing(attach: Any) -> None:
    pool = host_pool("mha", "page_first")
    fill(pool)
    backend = attach(pool)
    keys = keys_of(6)
    backend.batch_set_v1(keys[:3], indices_of([0, 1, 2]))
    assert backend.batch_exists(keys) == 3
    assert backend.batch_get_v1(keys, indices_of([0, 1, 2, 3, 4, 5])) == [True] * 3 + [False] * 3


def test_other_ranks_layouts_and_salts_are_apart(attach: Any) -> None:
    pool = host_pool("mha", "page_first")
    fill(pool)
    keys = keys_of(4)
    writer = attach(pool, tp_size=2)
    writer.batch_set_v1(keys, indices_of([0, 1, 2, 3]))
    assert writer.batch_exists(keys) == 4
    assert writer.batch_exists(keys_of(4, salt="alice")) == 0
    writer.close()
    for changed in ({"tp_size": 2, "tp_rank": 1}, {"tp_size": 1}, {"tp_size": 2, "pp_size": 2}):
        other = attach(pool, **changed)
        assert other.batch_exists(keys) == 0, changed
        other.close()
    other_layout = attach(host_pool("mha", "layer_first"), tp_size=2)
    assert other_layout.batch_exists(keys) == 0
    other_layout.close()
    assert attach(pool, tp_size=2).batch_exists(keys) == 4


@pytest.mark.parametrize(
    "changed", [{"quantization": "fp8"}, {"json_model_override_args": "{1}"}, {"rope": {"rope_type": "linear"}}]
)
def test_whatever_the_engine_makes_of_the_weights_is_in_the_name(
    attach: Any, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    from kvtier.connectors.sglang import hicache as module

    pool, keys = host_pool("mha", "page_first"), keys_of(3)
    writer = attach(pool)
    writer.batch_set_v1(keys, indices_of([0, 1, 2]))
    writer.close()
    with monkeypatch.context() as patch:
        patch.setattr(module, "running_engine", lambda: engine(**changed))
        other = attach(pool)
        assert other.batch_exists(keys) == 0
        other.close()
    assert attach(pool).batch_exists(keys) == 3


def test_new_weights_leave_the_old_pages_behind(attach: Any) -> None:
    """Told by the hooks on SGLang's own weight updater and tree, through its fault injector too."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Updater
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache as Tree

    pool, keys = host_pool("mha", "page_first"), keys_of(3)
    backend = attach(pool)
    wrapped = SimpleNamespace(_backend=backend)
    tree = SimpleNamespace(
        linker=None, cache_controller=SimpleNamespace(storage_backend=wrapped), _reset_full=lambda: None
    )
    backend.batch_set_v1(keys, indices_of([0, 1, 2]))
    assert backend.batch_exists(keys) == 3
    with pytest.raises(AttributeError):  # it has nothing to update
        Updater.update_weights_from_disk(SimpleNamespace(scheduler=SimpleNamespace(tree_cache=tree)), None)
    assert backend.batch_exists(keys) == 0
    assert backend._rotation.join(30)
    backend.batch_set_v1(keys, indices_of([3, 4, 5]))  # was queued before the update
    assert backend.batch_exists(keys) == 3
    Tree.reset(tree)
    assert backend._rotation.join(30)
    assert backend.batch_exists(keys) == 0
    backend.batch_set_v1(keys, indices_of([0, 1, 2]))
    Tree.reset(tree)
    assert backend.batch_exists(keys) == 3  # a plain flush keeps what is stored


def test_only_one_of_the_mla_replicas_writes(attach: Any) -> None:
    pool = host_pool("mla", "page_first")
    fill(pool)
    keys = keys_of(3)
    replica = attach(pool, is_mla_model=True, tp_rank=1, tp_size=2)
    assert replica.batch_set_v1(keys, indices_of([0, 1, 2])) == [True] * 3
    assert replica.batch_exists(keys) == 0
    replica.close()
    writer = attach(pool, is_mla_model=True, tp_rank=0, tp_size=2)
    writer.batch_set_v1(keys, indices_of([0, 1, 2]))
    writer.close()
    assert attach(pool, is_mla_model=True, tp_rank=1, tp_size=2).batch_exists(keys) == 3


def test_clear_leaves_nothing(attach: Any) -> None:
    pool = host_pool("mha", "page_first")
    backend = attach(pool)
    keys = keys_of(4)
    backend.batch_set_v1(keys, indices_of([0, 1, 2, 3]))
    backend.clear()
    assert backend.batch_exists(keys) == 0


def test_a_purge_under_a_store_leaves_nothing_of_it(attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes in slices, each of which waits for space in the tiers' queues."""
    pool, keys, purged = host_pool("mha", "page_first"), keys_of(6), []
    fill(pool)
    backend = attach(pool)
    cache = getattr(backend, "_backend", backend)._cache
    slices = iter(range(10))

    def space() -> int:
        if next(slices) == 1:
            purged.append(cache.purge())
        return 2

    with monkeypatch.context() as small:
        small.setattr(cache.manager, "queue_space", space)
        backend.batch_set_v1(keys, indices_of(list(range(6))))
    assert purged and next(slices) == 2, "it waited for space, which it does not need"
    assert backend.batch_exists(keys) == 0
    assert cache.manager.stats()["g2"]["blocks"] == 0
    assert backend.batch_set_v1(keys, indices_of(list(range(6)))) == [True] * 6


def test_what_would_never_work_is_refused(attach: Any, tmp_path: Path) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    from kvtier.connectors.sglang.hicache import KVTierStorage
    from kvtier.errors import ConfigError, IdentityError

    with pytest.raises(ConfigError, match="interface_v1"):
        KVTierStorage(storage_config({**extra_config(tmp_path), "interface_v1": 0}))
    backend = attach(host_pool("mha", "page_first"))
    for name in PoolName:
        if name != PoolName.KV:
            with pytest.raises(IdentityError, match=name.value):
                backend.register_mem_host_pool_v2(object(), name)
    backend.register_mem_host_pool_v2(host_pool("mha", "page_first"), PoolName.KV)


def test_pages_of_which_nobody_says_what_comes_before_are_not_stored(attach: Any, caplog: Any) -> None:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

    backend, keys = attach(host_pool("mha", "page_first")), keys_of(2)
    for _ in range(2):
        assert backend.batch_set_v1(keys, indices_of([0, 1]), HiCacheStorageExtraInfo(prefix_keys=None)) == [False] * 2
    assert sum("pass_prefix_keys" in record.message for record in caplog.records) == 1
    assert backend.batch_set_v1(keys, indices_of([0, 1]), HiCacheStorageExtraInfo(prefix_keys=[])) == [True] * 2
    assert backend.batch_exists(keys, HiCacheStorageExtraInfo(prefix_keys=None)) == 2


def test_v2_serves_the_kv_pool_and_denies_what_needs_more(attach: Any) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    pool, keys = host_pool("mha", "page_first"), keys_of(4)
    fill(pool)
    backend = attach(pool)

    def transfer(name: Any, pages: list[int]) -> Any:
        return PoolTransfer(name=name, host_indices=indices_of(pages), keys=keys)

    written = backend.batch_set_v2([transfer(PoolName.KV, [0, 1, 2, 3]), transfer(PoolName.SWA, [0, 1, 2, 3])])
    assert written == {PoolName.KV: [True] * 4, PoolName.SWA: [False] * 4}
    found = backend.batch_exists_v2(keys)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [1, 2, 3, 4])
    assert backend.batch_exists_v2(keys, [PoolTransfer(name=PoolName.SWA, keys=keys)]).kv_hit_pages == 0
    expected = [page_bytes(pool, page) for page in range(4)]
    assert backend.batch_get_v2([transfer(PoolName.KV, [8, 9, 10, 11])]) == {PoolName.KV: [True] * 4}
    assert [page_bytes(pool, page) for page in (8, 9, 10, 11)] == expected


def test_it_passes_under_sglangs_fault_injector(attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a call answers, a page that is said to be there has its own bytes."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.002")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    pool = host_pool("mha", "page_first")
    fill(pool)
    backend = attach(pool)
    assert type(backend).__name__ == "HiCacheStorageFailureInjector"
    image, served = pool.kv_buffer.clone(), 0
    for seed in range(40):
        keys = keys_of(6, seed % 5)
        pool.kv_buffer.copy_(image.roll(seed % 5, 1 if pool.kv_buffer.dim() > 4 else 0))
        expected = [page_bytes(pool, page) for page in range(6)]
        backend.batch_set_v1(keys, indices_of(list(range(6))))
        pool.kv_buffer.zero_()
        found = backend.batch_exists(keys)
        got = backend.batch_get_v1(keys, indices_of(list(range(6))))
        assert 0 <= found <= 6
        hit = got.index(False) if False in got else 6
        assert [page_bytes(pool, page) for page in range(hit)] == expected[:hit]
        served += hit
    assert served > 0


def test_the_tiers_figures_are_on_sglangs_own_metrics(attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import prometheus_client

    from kvtier.connectors.sglang import hicache, metrics

    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    monkeypatch.setattr(metrics, "replica_and_rank", lambda: (0, 1))
    monkeypatch.setattr(hicache, "running_engine", lambda: engine(enable_metrics=True, served_model_name="m"))
    backend = attach(host_pool("mha", "page_first"))
    backend.register_mem_pool_host(backend.mem_pool_host)
    storage = getattr(backend, "_backend", backend)
    storage._metrics._tiers.EVERY_S = 0.0
    keys = keys_of(2)
    assert backend.batch_set_v1(keys, indices_of([0, 1])) == [True, True]
    assert backend.batch_exists(keys) == 2
    labels = {"model_name": "m", "dp_rank": "0", "tp_rank": "1", "tier": "g2"}
    assert registry.get_sample_value("sglang:kvtier_tier_blocks", labels) == 2
