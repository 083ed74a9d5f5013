"""SGLang's device pools that are cached whole, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvtier.connectors.sglang.pool import block_of, place_of  # noqa: E402
from tests.connectors.sglang.support.linker_bench import (  # noqa: E402  (needs torch)
    LAYERS,
    PAGE,
    Kind,
    mha,
    mla,
    pool,
    windows,
)

pytestmark = pytest.mark.usefixtures("on_cpu")


def hybrid_requests() -> Any:
    """SGLang's own table of requests whose layers 0 and 2 are of Mamba 2."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=64, n_groups=1, num_heads=4, head_dim=16, state_size=8, conv_kernel=4
    )
    return HybridReqToTokenPool(
        size=4, mamba_size=8, mamba_spec_state_size=0, max_context_len=128, device="cpu", enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0, 2]), mamba_layer_ids=[0, 2],
        enable_mamba_extra_buffer=False,
    )  # fmt: skip


def test_a_block_is_a_page_of_all_layers() -> None:
    full, latent = pool(mha()), pool(mla())
    assert (full.kind, full.block_bytes) == ("full", LAYERS * 2 * PAGE * 2 * 32 * 4)
    assert (latent.kind, latent.block_bytes) == ("mla", LAYERS * PAGE * 64 * 4)


@pytest.mark.parametrize("kinds", [(Kind.FULL, Kind.SWA), (Kind.FULL, Kind.MAMBA), (Kind.FULL, Kind.SWA, Kind.MAMBA)])
def test_hybrid_state_is_refused(kinds: tuple[Kind, ...]) -> None:
    from kvtier.errors import IdentityError

    with pytest.raises(IdentityError, match=kinds[-1].name):
        pool(mha(), PAGE, *kinds)


def test_sglangs_pools_of_windows_and_states_are_refused_by_themselves() -> None:
    """Also where the tree is said to keep full attention alone."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    from kvtier.errors import IdentityError

    given = {"page_size": PAGE, "dtype": torch.float32, "head_num": 2, "head_dim": 32, "device": "cpu"}
    states = HybridLinearKVPool(
        size=PAGE * 8, full_attention_layer_ids=[1, 3], mamba_pool=hybrid_requests().mamba_pool, **given
    )
    for device_pool, kinds in ((windows(), (Kind.SWA,)), (states, (Kind.MAMBA,)), (windows(), (Kind.SWA, Kind.MAMBA))):
        with pytest.raises(IdentityError, match=type(device_pool).__name__):
            pool(device_pool)
        if kinds != (Kind.SWA,):
            with pytest.raises(IdentityError, match=kinds[-1].name):
                pool(device_pool, PAGE, Kind.FULL, *kinds)
        with pytest.raises(IdentityError, match=kinds[0].name):
            pool(device_pool, PAGE, *kinds)


def test_a_page_of_windows_is_cut_into_blocks_of_full_attention() -> None:
    """Three layers of windows beside two of full attention: two blocks, the second of which has a layer less."""
    kept = pool(windows("SSFSF"), PAGE, Kind.FULL, Kind.SWA)
    layer = 2 * PAGE * 2 * 32 * 4
    assert [part.shape.block_bytes for part in kept.parts] == [2 * layer, 2 * layer, layer]
    assert [kept.place(at) for at in range(5)] == [(1, 0), (1, 1), (0, 0), (2, 0), (0, 1)]
    assert (kept.layers, kept.depth, kept.block_bytes) == ((0, 5), 5, 2 * layer)
    assert [place_of(block_of(part, 7)) for part in (0, 2)] == [(0, 7), (2, 7)] and block_of(0, 7) == 7


def test_how_windows_are_kept_is_part_of_the_namespace() -> None:
    from dataclasses import replace

    given = replace(pool(windows("SSFSF"), PAGE, Kind.FULL, Kind.SWA), window=63)
    others = [
        replace(given, window=64),
        replace(pool(windows("SFSSF"), PAGE, Kind.FULL, Kind.SWA), window=63),
        replace(pool(windows("SSFSF", swa_head_num=1), PAGE, Kind.FULL, Kind.SWA), window=63),
        pool(mha()),
    ]
    assert len({given.group, *(other.group for other in others)}) == 5


def test_pools_of_windows_that_would_lose_a_part_are_refused() -> None:
    from kvtier.connectors.sglang.pool import PARTS_MAX
    from kvtier.errors import IdentityError

    class MLATokenToKVPool:
        pass

    latent, scaled, other, without = windows(), windows(), windows(), windows()
    latent.swa_kv_pool = MLATokenToKVPool()
    scaled.swa_kv_pool.k_scale_buffer = [torch.zeros(1)]
    other.swa_kv_pool.dtype = torch.float16
    without.layers_mapping = {number + 1: place for number, place in without.layers_mapping.items()}
    many = windows("S" * (PARTS_MAX + 1) + "F")
    wider = windows("SF", head_num=1, swa_head_num=4)
    for broken, word in (
        (latent, "MLATokenToKVPool"), (scaled, "scales"), (other, "dtypes"), (without, "first"), (many, "do not fit"),
        (wider, "do not fit"),
    ):  # fmt: skip
        with pytest.raises(IdentityError, match=word):
            pool(broken, PAGE, Kind.FULL, Kind.SWA)
    assert len(pool(windows("S" * PARTS_MAX + "F"), PAGE, Kind.FULL, Kind.SWA).beside) == PARTS_MAX


def test_trees_of_windows_that_were_not_proved_are_refused() -> None:
    from types import SimpleNamespace

    from kvtier.connectors.sglang.refusals import window_of
    from kvtier.errors import IdentityError

    class SWATokenToKVPoolAllocator:
        def get_kvcache(self) -> Any:
            return windows()

    class OtherAllocator(SWATokenToKVPoolAllocator):
        pass

    server = SimpleNamespace(attention_backend="triton")
    good = {
        "token_to_kv_pool_allocator": SWATokenToKVPoolAllocator(), "swa_gates_prefix_match": True,
        "swa_retain_window": 63, "draft_swa_window": 0,
    }  # fmt: skip
    assert window_of(server, SimpleNamespace(**good)) == 63
    for name, value, word in (
        ("token_to_kv_pool_allocator", OtherAllocator(), "allocator"), ("swa_gates_prefix_match", False, "ring"),
        ("swa_retain_window", None, "size"), ("draft_swa_window", 80, "draft"),
    ):  # fmt: skip
        with pytest.raises(IdentityError, match=word):
            window_of(server, SimpleNamespace(**{**good, name: value}))
    plain = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=mha))
    assert window_of(server, plain) == 0, "windows in one pool with all else are a part of its pages"


@pytest.mark.parametrize("name", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
def test_attention_that_reads_windows_elsewhere_is_refused(name: str) -> None:
    from types import SimpleNamespace

    from kvtier.connectors.sglang.refusals import window_of
    from kvtier.errors import IdentityError

    allocator = type("SWATokenToKVPoolAllocator", (), {"get_kvcache": lambda self: windows()})()
    tree = SimpleNamespace(token_to_kv_pool_allocator=allocator, swa_gates_prefix_match=True, swa_retain_window=63)
    with pytest.raises(IdentityError, match="torch_native"):
        window_of(SimpleNamespace(**{name: "torch_native"}), tree)
    plain = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=mha))
    assert window_of(SimpleNamespace(**{name: "torch_native"}), plain) == 0


def test_requests_that_keep_states_are_refused_whatever_the_device_pool_is() -> None:
    from types import SimpleNamespace

    from kvtier.connectors.sglang.refusals import refuse
    from kvtier.errors import IdentityError

    params = SimpleNamespace(
        is_eagle=False, mtp_draft_device_pools=(), sidecar_draft_device_pools=(), req_to_token_pool=object()
    )
    refuse(params)
    params.req_to_token_pool = hybrid_requests()
    with pytest.raises(IdentityError, match="states beside their KV"):
        refuse(params)


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
