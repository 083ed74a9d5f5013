"""SGLang's device pools that are cached whole, and those that are refused."""

from __future__ import annotations

import copy
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
    states,
    windows,
)

pytestmark = pytest.mark.usefixtures("on_cpu")


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
    """Also where the tree is said to keep full attention alone, or both."""
    from kvtier.errors import IdentityError

    device, _ = states()
    for device_pool, kind in ((windows(), Kind.SWA), (device, Kind.MAMBA)):
        with pytest.raises(IdentityError, match=type(device_pool).__name__):
            pool(device_pool)
        with pytest.raises(IdentityError, match=kind.name):
            pool(device_pool, PAGE, kind)
        with pytest.raises(IdentityError, match="SWA"):
            pool(device_pool, PAGE, Kind.FULL, Kind.SWA, Kind.MAMBA)
    for device_pool, other in ((windows(), Kind.MAMBA), (device, Kind.SWA)):
        with pytest.raises(IdentityError, match=other.name):
            pool(device_pool, PAGE, Kind.FULL, other)


def test_a_state_is_cut_into_blocks_of_full_attention() -> None:
    """Two layers, 480 bytes of a convolution and 2048 of a state each; a token of full attention has 1024."""
    layer = 2 * 2 * 32 * 4
    for page, cuts in (
        (16, [(2, 480, 1), (2, 2048, 1)]),
        (4, [(2, 480, 1), (2, 2048, 1)]),
        (1, [(2, 480, 1), (1, 1024, 2)]),
    ):
        kept = pool(states(page)[0], page, Kind.FULL, Kind.MAMBA)
        assert kept.block_bytes == 2 * page * layer
        assert [(part.shape.layers, part.shape.row_bytes, part.cuts) for part in kept.states] == cuts
        assert all(part.shape.block_bytes <= kept.block_bytes for part in kept.states)
    assert [kept.place(at) for at in range(4)] == [((1, None), (2, None)), ((0, 0),), ((1, None), (2, None)), ((0, 1),)]
    assert (kept.layers, kept.depth) == ((0, 4), 4)


@pytest.mark.parametrize("page", [1, 2, 16])
def test_the_blocks_of_all_states_are_the_whole_pool(page: int) -> None:
    """Each byte of each slot lies in one block of that slot, at the address that a copy takes it from."""
    kept = pool(states(page)[0], page, Kind.FULL, Kind.MAMBA)
    for part in kept.states:
        seen, paged = [], part.pages()
        for slot in range(part.tensor.shape[1]):
            assert len(part.blocks(slot)) == part.count
            for block in part.blocks(slot):
                rows = [int(base) + block * paged.stride for base in paged.bases[:, 0]]
                assert rows == [row.data_ptr() for row in part.piece(block)]
                seen += [(row - part.tensor.data_ptr(), slot) for row in rows]
        size, slots = part.shape.row_bytes, part.tensor.shape[1]
        assert sorted(start for start, _ in seen) == list(range(0, part.tensor.nbytes, size))
        assert all(start // (size * part.cuts) % slots == slot for start, slot in seen)


def test_a_layer_may_have_both_pages_and_a_state() -> None:
    device, _ = states()
    device.full_attention_layer_id_mapping = {0: 0, 5: 1}
    kept = pool(device, PAGE, Kind.FULL, Kind.MAMBA)
    beside = ((1, None), (2, None))
    assert [kept.place(at) for at in range(6)] == [((0, 0), *beside), (), beside, (), (), ((0, 1),)]


def test_how_states_are_kept_is_part_of_the_namespace() -> None:
    device, requests = states()
    groups = {pool(device, PAGE, Kind.FULL, Kind.MAMBA).group, pool(mha()).group}
    requests.mamba_pool.mamba_layer_ids = [0, 1]
    groups.add(pool(device, PAGE, Kind.FULL, Kind.MAMBA).group)
    requests.mamba_pool.mamba_layer_ids = [0, 2]
    cache = requests.mamba_pool.mamba_cache
    for name, other in (("temporal", cache.temporal.half()), ("temporal", cache.temporal.flatten(2, 3)),
                        ("conv", [cache.conv[0].float()])):  # fmt: skip
        was = getattr(cache, name)
        object.__setattr__(cache, name, other)
        groups.add(pool(device, PAGE, Kind.FULL, Kind.MAMBA).group)
        object.__setattr__(cache, name, was)
    assert len(groups) == 6
    assert pool(device, PAGE, Kind.FULL, Kind.MAMBA).group in groups


def test_pools_of_states_that_would_lose_a_part_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from kvtier.connectors.sglang import state_pool
    from kvtier.errors import IdentityError

    class OtherPool:
        pass

    def changed(**fields: Any) -> Any:
        device, requests = states()
        for name, value in fields.items():
            setattr(requests.mamba_pool, name, value)
        return device

    cache = states()[1].mamba_pool.mamba_cache
    strided = type(cache)(conv=cache.conv, temporal=cache.temporal.transpose(-1, -2))
    other, scaled, without = changed(), changed(), changed()
    other.mamba_pool = OtherPool()
    other.mamba_pool.mamba_cache = cache
    scaled.full_kv_pool.k_scale_buffer = [torch.zeros(1)]
    without.full_kv_pool.k_buffer = without.full_kv_pool.v_buffer = []
    for broken, word in (
        (changed(_slot_siblings=[object()]), "side states"), (changed(replayssm_write_pos=torch.zeros(1)), "ReplaySSM"),
        (changed(mamba_cache=SimpleNamespace(conv=cache.conv, temporal=cache.temporal)), "drafts"),
        (changed(mamba_cache=strided), "strided"), (other, "MambaPool"), (scaled, "scales"),
        (without, "full attention"),
    ):  # fmt: skip
        with pytest.raises(IdentityError, match=word):
            pool(broken, PAGE, Kind.FULL, Kind.MAMBA)
    for most, word in ((1, "takes 2 blocks"), (0, "takes")):
        monkeypatch.setattr(state_pool, "STATE_BLOCKS_MAX", most)
        with pytest.raises(IdentityError, match=word):
            pool(states()[0], PAGE, Kind.FULL, Kind.MAMBA)
    with pytest.raises(IdentityError, match="takes more blocks"):
        pool(states(1)[0], 1, Kind.FULL, Kind.MAMBA)


def test_a_page_of_windows_is_cut_into_blocks_of_full_attention() -> None:
    """Three layers of windows beside two of full attention: two blocks, the second of which has a layer less."""
    kept = pool(windows("SSFSF"), PAGE, Kind.FULL, Kind.SWA)
    layer = 2 * PAGE * 2 * 32 * 4
    assert [part.shape.block_bytes for part in kept.parts] == [2 * layer, 2 * layer, layer]
    assert [kept.place(at) for at in range(5)] == [((1, 0),), ((1, 1),), ((0, 0),), ((2, 0),), ((0, 1),)]
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


def test_requests_that_keep_states_elsewhere_are_refused() -> None:
    from types import SimpleNamespace

    from kvtier.connectors.sglang.refusals import refuse
    from kvtier.errors import IdentityError

    class TokenToKVPoolAllocator:
        def __init__(self, pool: Any) -> None:
            self.get_kvcache = lambda: pool

    class OtherAllocator(TokenToKVPoolAllocator):
        pass

    class OtherTable:
        pass

    device, requests = states()
    other, quantized = OtherTable(), states()
    other.mamba_pool, quantized[1].mamba_ckpt_pool = requests.mamba_pool, object()  # type: ignore[attr-defined]
    good = {
        "is_eagle": False, "mtp_draft_device_pools": (), "sidecar_draft_device_pools": (), "mtp_draft_mamba_pools": (),
        "token_to_kv_pool_allocator": TokenToKVPoolAllocator(device), "req_to_token_pool": requests,
        "enable_mamba_extra_buffer": True, "tree_core_backend": "rust",
    }  # fmt: skip
    alone = SimpleNamespace(tp_size=1)
    refuse(alone, SimpleNamespace(**good))
    plain = {**good, "token_to_kv_pool_allocator": TokenToKVPoolAllocator(mha())}
    refuse(alone, SimpleNamespace(**{**plain, "req_to_token_pool": object()}))
    for changed, word in (
        (plain, "MHATokenToKVPool"), ({"req_to_token_pool": states()[1]}, "another pool"),
        ({"req_to_token_pool": other}, "OtherTable"),
        ({"token_to_kv_pool_allocator": OtherAllocator(device)}, "OtherAllocator"),
        ({**good, "token_to_kv_pool_allocator": TokenToKVPoolAllocator(quantized[0]),
          "req_to_token_pool": quantized[1]}, "int8"),
        ({"mtp_draft_mamba_pools": (object(),)}, "draft"),
    ):  # fmt: skip
        with pytest.raises(IdentityError, match=f"states beside their KV.*{word}"):
            refuse(alone, SimpleNamespace(**{**good, **changed}))


def test_states_in_engines_that_were_not_proved_are_refused() -> None:
    from types import SimpleNamespace

    from kvtier.connectors.sglang.refusals import refuse
    from kvtier.errors import IdentityError

    class TokenToKVPoolAllocator:
        def __init__(self, pool: Any) -> None:
            self.get_kvcache = lambda: pool

    device, requests = states()
    lazy = copy.copy(requests)
    lazy.enable_mamba_extra_buffer_lazy = True
    good = {
        "is_eagle": False, "mtp_draft_device_pools": (), "sidecar_draft_device_pools": (), "mtp_draft_mamba_pools": (),
        "token_to_kv_pool_allocator": TokenToKVPoolAllocator(device), "req_to_token_pool": requests,
        "enable_mamba_extra_buffer": True, "tree_core_backend": "rust",
    }  # fmt: skip
    plain = {"token_to_kv_pool_allocator": TokenToKVPoolAllocator(mha()), "req_to_token_pool": object()}
    refuse(SimpleNamespace(tp_size=1), SimpleNamespace(**good))
    for ranks, changed, word in (
        (2, {}, "tensor parallelism"), (1, {"tree_core_backend": "python"}, "python, not rust"),
        (1, {"enable_mamba_extra_buffer": False}, "no extra buffer"),
        (1, {"req_to_token_pool": lazy}, "extra buffer is lazy"),
    ):  # fmt: skip
        with pytest.raises(IdentityError, match=f"states beside their KV.*{word}.*not proved"):
            refuse(SimpleNamespace(tp_size=ranks), SimpleNamespace(**{**good, **changed}))
        refuse(SimpleNamespace(tp_size=ranks), SimpleNamespace(**{**good, **changed, **plain}))


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
