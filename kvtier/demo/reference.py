"""The demo's reference: every stored block's bytes, held outside kvtier, and the model's own answers.

    bytes     restored blocks = blocks as they were stored
    tokens    after a restored prefix = after the same prefix from this reference: an in-memory hit at the same boundary
    prefill   = after computing the whole prompt, or parting from it first where the two best logits are closer than
              a stated gap: sums in another order differ in their last bits, so near-ties may fall either way

File: for each block 48 bytes of key and the block's bytes, block after block; windows and states as safetensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvtier.checksum import digest_of
from kvtier.connectors.transformers.model import KVShape
from kvtier.identity.keys import KEY_BYTES

Tensors = dict[str, Any]
"""What windows and states hold, by layer and part."""

_ENDS = ".safetensors"


class Reference:
    """Blocks by key, and of a model with windows or states what those held, by the key of the last block before. A key
    may have several versions, from prefill and from decode, alike but for their last bits."""

    def __init__(self, shape: KVShape, block_tokens: int) -> None:
        self.shape = shape
        self.block_tokens = block_tokens
        self.block_bytes = shape.block_bytes(block_tokens)
        self._blocks: dict[bytes, dict[bytes, bytes]] = {}
        self._ends: dict[bytes, dict[bytes, Tensors]] = {}

    def cut(self, cache: Any, count: int) -> list[bytes]:
        """The bytes of a cache object's first blocks, cut without kvtier's code."""
        import torch

        out, size = [], self.block_tokens
        full = [cache.layers[index] for index in self.shape.groups.full or range(self.shape.layers)]
        for block in range(count):
            tokens = slice(block * size, (block + 1) * size)
            layers = [torch.stack([layer.keys[0, :, tokens], layer.values[0, :, tokens]]) for layer in full]
            out.append(torch.stack(layers).contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return out

    def end_of(self, cache: Any) -> Tensors:
        """Copies of what a cache object's windows and states hold, read without kvtier's code."""
        out: Tensors = {}
        for index, layer in enumerate(cache.layers):
            named: Tensors = {}
            if index not in self.shape.groups.full:
                named |= {"keys": getattr(layer, "keys", None), "values": getattr(layer, "values", None)}
            for part in ("conv_states", "recurrent_states"):
                named |= {f"{part}.{place}": state for place, state in getattr(layer, part, {}).items()}
            kept = {f"{index}.{name}": value for name, value in named.items() if value is not None}
            out |= {name: value.detach().cpu().clone() for name, value in kept.items()}
        return out

    def add(self, keys: Sequence[bytes], blocks: Iterable[bytes]) -> None:
        """Record the bytes that were stored under these keys."""
        for key, block in zip(keys, blocks, strict=True):
            self._blocks.setdefault(key, {})[digest_of([block])] = block

    def add_end(self, key: bytes, end: Tensors) -> None:
        """Record what windows and states held behind the block of this key."""
        self._ends.setdefault(key, {})[_digest(end)] = end

    def holds(self, key: bytes, block: bytes) -> bool:
        """Whether exactly these bytes were stored under this key."""
        return self._blocks.get(key, {}).get(digest_of([block])) == block

    def holds_end(self, key: bytes, end: Tensors) -> bool:
        """Whether windows and states held exactly this behind the block of this key."""
        return _digest(end) in self._ends.get(key, {})

    def prefix(self, keys: Sequence[bytes], like: Sequence[bytes], config: Any, end: Tensors | None = None) -> Any:
        """A cache object of the stored blocks `keys`, in the versions equal to `like` where there are such; windows and
        states as in `end`, where that was recorded."""
        import torch
        from transformers import DynamicCache

        cache = DynamicCache(config=config)
        if not keys:
            return cache
        blocks = []
        for key, block in zip(keys, like, strict=True):
            versions = self._blocks[key]
            stored = versions.get(digest_of([block])) or next(iter(versions.values()))
            flat = torch.frombuffer(bytearray(stored), dtype=torch.uint8)
            blocks.append(flat.view(self.shape.dtype).view(self.shape.block(self.block_tokens)))
        joined = torch.cat(blocks, dim=3)  # along the tokens
        for index, layer in zip(self.shape.groups.full or range(self.shape.layers), joined, strict=True):
            cache.update(layer[0:1], layer[1:2], index)
        if ends := self._ends.get(keys[-1]):
            known = ends.get(_digest(end or {})) or next(iter(ends.values()))
            _give(cache, known, len(keys) * self.block_tokens)
        return cache

    def save(self, path: Path) -> None:
        """Write all blocks, one version of each key after the other, and beside them windows and states."""
        from safetensors.torch import save_file

        with path.open("wb") as file:
            for key, versions in self._blocks.items():
                for block in versions.values():
                    file.write(key)
                    file.write(block)
        ends = [(key.hex(), end) for key, versions in self._ends.items() for end in versions.values()]
        tensors = {f"{key}/{at}/{name}": end[name].contiguous() for at, (key, end) in enumerate(ends) for name in end}
        save_file(tensors, path.with_suffix(_ENDS))

    def load(self, path: Path) -> None:
        """Add the blocks, windows and states of files that `save` wrote."""
        from safetensors.torch import load_file

        with path.open("rb") as file:
            while key := file.read(KEY_BYTES):
                self.add([key], [file.read(self.block_bytes)])
        ends: dict[tuple[str, str], Tensors] = {}
        for name, tensor in load_file(path.with_suffix(_ENDS)).items():
            key_text, at, part = name.split("/")
            ends.setdefault((key_text, at), {})[part] = tensor
        for (key_text, _), end in ends.items():
            self.add_end(bytes.fromhex(key_text), end)


def _digest(end: Tensors) -> bytes:
    import torch

    parts = [(name, end[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) for name in sorted(end)]
    return digest_of([part for name, value in parts for part in (name.encode(), value)])


def _give(cache: Any, end: Tensors, tokens: int) -> None:
    """Windows and states into a cache object, of so many tokens, that has none."""
    for name, tensor in end.items():
        index, part = name.split(".", 1)
        layer = cache.layers[int(index)]
        if part == "keys":
            layer.update(tensor.clone(), end[f"{index}.values"].clone())
            layer.cumulative_length = tokens
        elif part.startswith("conv_states."):
            layer.update_conv_state(tensor.clone(), int(part.rpartition(".")[2]))
        elif part.startswith("recurrent_states."):
            layer.update_recurrent_state(tensor.clone(), int(part.rpartition(".")[2]))


def parting_gap(tokens: Sequence[int], full: Sequence[int], logits: Sequence[Any]) -> float:
    """Gap of the full prefill's two best logits where `tokens` first differ from its own; 0.0 if they do not.

    `logits[i]` are those that chose full[i]. Pure.
    """
    for mine, its, row in zip(tokens, full, logits, strict=True):
        if mine != its:
            best = row.float().reshape(-1).topk(2).values
            return float(best[0] - best[1])
    return 0.0
