"""SGLang's device pools that are cached whole, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.connectors.sglang.support.linker_bench import LAYERS, PAGE, Kind, mha, mla, pool  # noqa: E402  (needs torch)

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


@pytest.mark.parametrize("kinds", [(Kind.FULL, Kind.SWA), (Kind.FULL, Kind.MAMBA), (Kind.SWA,)])
def test_hybrid_state_is_refused(kinds: tuple[Kind, ...]) -> None:
    from kvtier.errors import IdentityError

    with pytest.raises(IdentityError, match=kinds[-1].name):
        pool(mha(), PAGE, *kinds)


def test_sglangs_pools_of_windows_and_states_are_refused_by_themselves() -> None:
    """Also where the tree is said to keep full attention alone."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    from kvtier.errors import IdentityError

    given = {"page_size": PAGE, "dtype": torch.float32, "head_num": 2, "head_dim": 32, "device": "cpu"}
    windows = SWAKVPool(
        size=PAGE * 8, size_swa=PAGE * 4, swa_attention_layer_ids=[0, 2], full_attention_layer_ids=[1, 3], **given
    )
    states = HybridLinearKVPool(
        size=PAGE * 8, full_attention_layer_ids=[1, 3], mamba_pool=hybrid_requests().mamba_pool, **given
    )
    for device_pool, kind in ((windows, Kind.SWA), (states, Kind.MAMBA)):
        with pytest.raises(IdentityError, match=type(device_pool).__name__):
            pool(device_pool)
        with pytest.raises(IdentityError, match=kind.name):
            pool(device_pool, PAGE, Kind.FULL, kind)


def test_requests_that_keep_states_are_refused_whatever_the_device_pool_is() -> None:
    from types import SimpleNamespace

    from kvtier.connectors.sglang.linker import _refuse
    from kvtier.errors import IdentityError

    params = SimpleNamespace(
        is_eagle=False, mtp_draft_device_pools=(), sidecar_draft_device_pools=(), req_to_token_pool=object()
    )
    _refuse(params)
    params.req_to_token_pool = hybrid_requests()
    with pytest.raises(IdentityError, match="states beside their KV"):
        _refuse(params)


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
