"""Namespaces of SGLang ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.connectors.sglang.support.linker_bench import PAGE, mha, mla, pool, server  # noqa: E402  (needs torch)

pytestmark = pytest.mark.usefixtures("on_cpu")


def model_config(**rope: Any) -> Any:
    text = SimpleNamespace(rope_theta=10000.0, rope_scaling=None, rope_parameters=rope or None)
    return SimpleNamespace(hf_text_config=text, dtype=torch.float32)


def name(device: Any = None, *, ranks: dict[str, int] | None = None, rope: Any = None, **changed: Any) -> Any:
    from kvtier.config import Config
    from kvtier.connectors.settings import Settings
    from kvtier.connectors.sglang.identity import Ranks, namespace_of

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


@pytest.mark.parametrize(
    ("rank", "digest"),
    [
        ({}, "ab044e699409d7e56da0ce073a0c417d004836563844ee3bd6a39e4559d18a3e"),
        (
            {"rope": {"rope_type": "linear", "factor": 2.0}},
            "74de5be4fb36a8a36d3246943811c24096845508e76719bd56ded174f67e7c80",
        ),
        (
            {"kind": "mla", "ranks": {"tp_rank": 1, "tp": 4}},
            "3efd9e02b8e1a5a0bf537fd0b19a251a0bdf3c518aefd41cd0d07e8e2a27c7bc",
        ),
        ({"ranks": {"tp_rank": 1, "tp": 2}}, "55c9df2799d254be5d1ac08e229537b8537643e48fd48a971ac14cfa558c6011"),
        (
            {"dtype": "float8_e4m3fn", "quantization": "fp8"},
            "8a1bb50079d2cd623ef252617d1a2f3cf1597590e34603d2bb229bcf64e603fc",
        ),
        (
            {"json_model_override_args": '{"rope_theta": 5}'},
            "2cecffdbd0c9204661c172894f0e960213cf2b50cd1fa7eba086eb120702e971",
        ),
    ],
)
def test_ranks_find_what_they_stored_with_earlier_releases(rank: dict[str, Any], digest: str) -> None:
    """Digests that release 0.1 computed."""

    def namespace(
        kind: str = "full", dtype: str = "bfloat16", rope: Any = None, ranks: Any = None, **changed: Any
    ) -> Any:
        from kvtier.config import Config
        from kvtier.connectors.settings import Settings
        from kvtier.connectors.sglang.identity import Ranks, namespace_of
        from kvtier.connectors.sglang.pool import KVPools
        from kvtier.kernels.layout import Shape

        halves, heads, channels = (2, 2, 32) if kind == "full" else (1, 1, 64)
        kept = KVPools((), kind, dtype, 16, Shape(3, halves, 16, heads, channels, 2), (0, 3))
        text = SimpleNamespace(rope_theta=10000.0, rope_scaling=None, rope_parameters=rope)
        config = SimpleNamespace(hf_text_config=text, dtype="torch.bfloat16")
        settings = Settings(Config(), weights="1")
        return namespace_of(server(**changed), config, settings, kept, Ranks(**(ranks or {})))

    assert namespace(**rank).digest.hex() == digest
