"""Which of SGLang's device pools are kept whole, and what their blocks are called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.connectors.sglang.support.linker_bench import LAYERS, PAGE, Kind, mha, mla, pool, server  # noqa: E402  (needs torch)

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


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────


def model_config(**rope: Any) -> Any:
    text = SimpleNamespace(rope_theta=10000.0, rope_scaling=None, rope_parameters=rope or None)
    return SimpleNamespace(hf_text_config=text, dtype=torch.float32)


def name(device: Any = None, *, ranks: dict[str, int] | None = None, rope: Any = None, **changed: Any) -> Any:
    from kvtier.config import Config
    from kvtier.connectors.common import Settings
    from kvtier.connectors.sglang.pool import Ranks, namespace_of

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
