"""SGLang's file storage below HiCache (`HiCacheFile`), driven as its cache controller does, which takes what raises for
a miss.

Names of blocks are those of its own hashing of a request, seeded with the adapter's id as `--lora-paths` gives it.
The first argument is the file of stand-ins that lets SGLang be imported without a GPU's packages.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from serve import prompt, serve, size_of


class HiCacheFiles:
    """One engine's file storage."""

    def __init__(self, folder: str, terms: dict[str, Any]) -> None:
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = folder
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

        self._terms, self._size = terms, size_of(terms)
        self._files = HiCacheFile(
            HiCacheStorageConfig(
                tp_rank=0,
                tp_size=1,
                pp_rank=0,
                pp_size=1,
                attn_cp_rank=0,
                attn_cp_size=1,
                is_mla_model=False,
                enable_storage_metrics=False,
                is_page_first_layout=True,
                model_name=terms["model"],
                extra_config={},
            )
        )

    def _key(self, block: int) -> str:
        from sglang.srt.lora.lora_registry import LoRARef
        from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed

        adapter = LoRARef.deterministic_id("adapter", "/adapter") if self._terms["adapter"] else None
        return get_hash_str(prompt(block), storage_namespace_seed(adapter, None))

    def put(self, blocks: Sequence[int], payloads: Sequence[bytes]) -> int:
        import torch

        return sum(
            self._files.batch_set([self._key(block)], [torch.frombuffer(bytearray(payload), dtype=torch.uint8)])
            for block, payload in zip(blocks, payloads, strict=True)
        )

    def get(self, blocks: Sequence[int], size: int) -> list[bytes | None]:
        import torch

        out: list[bytes | None] = []
        for block in blocks:
            page = torch.zeros(size, dtype=torch.uint8)
            try:
                found = self._files.batch_exists([self._key(block)]) and self._files.batch_get(
                    [self._key(block)], [page]
                )
            except Exception as wrong:
                print(f"HiCacheFile raised {wrong!r}", file=sys.stderr)
                found = None
            out.append(page.numpy().tobytes() if found and found[0] is not None else None)
        return out

    def purge(self) -> None:
        self._files.clear()

    def close(self) -> None:
        pass


if __name__ == "__main__":
    runpy.run_path(sys.argv[1])["install"]()
    serve(HiCacheFiles, lambda: {"sglang": version("sglang")})
