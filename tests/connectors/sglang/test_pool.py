"""SGLang's device pools that are cached whole, and those that are refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.connectors.sglang.support.linker_bench import LAYERS, PAGE, Kind, mha, mla, pool  # noqa: E402  (needs torch)

pytestmark = pytest.mark.usefixtures("on_cpu")


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
