"""The demo's reference: every stored block's bytes, held outside kvtier, and the model's own answers.

    bytes     restored blocks = blocks as they were stored
    tokens    after a restored prefix = after the same prefix from this reference: an in-memory hit at the same boundary
    prefill   = after computing the whole prompt, or parting from it first where the two best logits are closer than
              a stated gap: sums in another order differ in their last bits, so near-ties may fall either way

File: for each block 48 bytes of key and the block's bytes, block after block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvtier.checksum import digest_of
from kvtier.connectors.transformers.model import KVShape
from kvtier.identity.keys import KEY_BYTES


class Reference:
    """Blocks by key. A key may have several versions, from prefill and from decode, alike but for their last bits."""

    def __init__(self, shape: KVShape, block_tokens: int) -> None:
        self.shape = shape
        self.block_tokens = block_tokens
        self.block_bytes = shape.block_bytes(block_tokens)
        self._blocks: dict[bytes, dict[bytes, bytes]] = {}

    def cut(self, cache: Any, count: int) -> list[bytes]:
        """The bytes of a cache object's first blocks, cut without kvtier's code."""
        import torch

        out, size = [], self.block_tokens
        for block in range(count):
            tokens = slice(block * size, (block + 1) * size)
            layers = [torch.stack([layer.keys[0, :, tokens], layer.values[0, :, tokens]]) for layer in cache.layers]
            out.append(torch.stack(layers).contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return out

    def add(self, keys: Sequence[bytes], blocks: Iterable[bytes]) -> None:
        """Record the bytes that were stored under these keys."""
        for key, block in zip(keys, blocks, strict=True):
            self._blocks.setdefault(key, {})[digest_of([block])] = block

    def holds(self, key: bytes, block: bytes) -> bool:
        """Whether exactly these bytes were stored under this key."""
        return self._blocks.get(key, {}).get(digest_of([block])) == block

    def prefix(self, keys: Sequence[bytes], like: Sequence[bytes], config: Any) -> Any:
        """A cache object of the stored blocks `keys`, in the versions equal to `like` where there are such."""
        import torch
        from transformers import DynamicCache

        if not keys:
            return DynamicCache(config=config)
        blocks = []
        for key, block in zip(keys, like, strict=True):
            versions = self._blocks[key]
            stored = versions.get(digest_of([block])) or next(iter(versions.values()))
            flat = torch.frombuffer(bytearray(stored), dtype=torch.uint8)
            blocks.append(flat.view(self.shape.dtype).view(self.shape.block(self.block_tokens)))
        joined = torch.cat(blocks, dim=3)  # along the tokens
        return DynamicCache([(layer[0:1], layer[1:2]) for layer in joined], config=config)

    def save(self, path: Path) -> None:
        """Write all blocks, one version of each key after the other."""
        with path.open("wb") as file:
            for key, versions in self._blocks.items():
                for block in versions.values():
                    file.write(key)
                    file.write(block)

    def load(self, path: Path) -> None:
        """Add the blocks of a file that `save` wrote."""
        with path.open("rb") as file:
            while key := file.read(KEY_BYTES):
                self.add([key], [file.read(self.block_bytes)])


def parting_gap(tokens: Sequence[int], full: Sequence[int], logits: Sequence[Any]) -> float:
    """Gap of the full prefill's two best logits where `tokens` first differ from its own; 0.0 if they do not.

    `logits[i]` are those that chose full[i]. Pure.
    """
    for mine, its, row in zip(tokens, full, logits, strict=True):
        if mine != its:
            best = row.float().reshape(-1).topk(2).values
            return float(best[0] - best[1])
    return 0.0
