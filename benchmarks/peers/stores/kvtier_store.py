"""kvtier over G2 and G3, as its connectors open it: G3 in a process of its own, identity from the checkpoint's files.

The first argument names the tier below G2: "g3", or "g4", a folder of objects.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from serve import TOKENS, prompt, serve, size_of

import kvtier
from kvtier.connectors.adapters import adapter_name
from kvtier.connectors.identity import random_weights, rope_of
from kvtier.identity.hashing import chain_hashes, chain_root
from kvtier.identity.keys import BlockKey, make_keys, scope_of
from kvtier.identity.weights import fingerprint

TIER = sys.argv[1]
_SALT = "tenant"


class KVTier:
    """One engine's cache."""

    def __init__(self, folder: str, terms: dict[str, Any]) -> None:
        beside = Path(terms["engine"])
        model, adapter = beside / "model", beside / "adapter"
        _write_weights(model, "model.safetensors", terms["weights"])
        _write_weights(adapter, "adapter_model.safetensors", terms["adapter"])
        rope = {
            "rope_type": "longrope",
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0],
            "long_factor": [2.0],
        }
        config = SimpleNamespace(
            rope_theta=10_000.0, rope_scaling=None, rope_parameters=rope, max_position_embeddings=131_072
        )
        engine = SimpleNamespace(hf_text_config=config, hf_config=config, max_model_len=terms["context"])
        dummy = terms["load"] == "dummy"
        self._namespace = kvtier.Namespace(
            model=terms["model"], dtype=terms["dtype"], layout="bench", block_tokens=TOKENS, block_bytes=size_of(terms),
            weights=random_weights(0, quantized=False) if dummy else fingerprint(model), rope=rope_of("vllm", engine),
        )  # fmt: skip
        self._scope = scope_of(_SALT, adapter_name(adapter).encode() if terms["adapter"] else b"")
        lower = (
            f'g3: {{path: "{folder}", capacity: 64MiB}}'
            if TIER == "g3"
            else f'g4: {{url: "file://{folder}/bucket", stride: 1}}'
        )
        ttl = f"{terms['ttl_s']}s" if terms["ttl_s"] else "24h"
        (beside / "kvtier.yaml").write_text(
            f"tiers: {{g2: {{capacity: 16MiB}}, {lower}}}\n"
            f"retention: {{classes: {{bench: {{ttl: {ttl}}}}}, default: bench}}\n"
        )
        self._cache = kvtier.open(beside / "kvtier.yaml", self._namespace, computes=True)
        self._durable = 0

    def _key(self, block: int) -> BlockKey:
        root = chain_root(self._namespace.digest, self._scope)
        return make_keys(self._scope, chain_hashes(root, prompt(block), TOKENS))[0]

    def put(self, blocks: Sequence[int], payloads: Sequence[bytes]) -> int:
        for block, payload in zip(blocks, payloads, strict=True):
            self._cache.put([self._key(block)], [payload])
        before, self._durable = self._durable, self._cache.flush(60.0).durable.get(TIER, 0)
        return self._durable - before

    def get(self, blocks: Sequence[int], size: int) -> list[bytes | None]:
        self._cache.evict("g2")
        out: list[bytes | None] = []
        for block in blocks:
            with self._cache.get([self._key(block)]) as hit:
                out.append(bytes(hit.blocks[0]) if len(hit) else None)
        return out

    def purge(self) -> None:
        self._cache.purge(_SALT)

    def close(self) -> None:
        self._cache.close()

    def kill_server(self) -> dict[str, Any]:
        """SIGKILL to the process of G3."""
        return _signal(signal.SIGKILL)

    def freeze_server(self) -> dict[str, Any]:
        """SIGSTOP to the process of G3."""
        return _signal(signal.SIGSTOP)


def _signal(number: signal.Signals) -> dict[str, Any]:
    tasks = Path("/proc/self/task")
    children = [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
    for pid in children:
        os.kill(pid, number)
    return {} if children else {"absent": True}


def _write_weights(folder: Path, name: str, generation: int) -> None:
    """A checkpoint of one tensor. Written anew only if another generation is there: an unchanged file stays."""
    folder.mkdir(parents=True, exist_ok=True)
    data = Random(generation).randbytes(4096)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1024], "data_offsets": [0, 4096]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + data
    if not (folder / name).exists() or (folder / name).read_bytes() != whole:
        (folder / name).write_bytes(whole)


if __name__ == "__main__":
    serve(KVTier, lambda: {"kvtier": kvtier.__version__})
