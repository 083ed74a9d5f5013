"""SGLang's pool of recurrent states (MambaPool) as blocks: where the bytes of a slot lie, and how they are cut.

A slot of the pool holds one request's state, or one that the tree keeps: a row of every layer in each of a few tensors
[layers, slots, …], the inputs that a convolution still needs and the state proper. Each tensor is a *part*: a block of
it is the rows of as many layers as fit into a block of the layers of full attention, or, where a row is larger, an
equal piece of one. So a slot is the same number of blocks in every pool of the same shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.connectors.configuration import digest16
from kvtier.errors import IdentityError
from kvtier.kernels.layout import Paged, Shape, of_tensors

STATE_BLOCKS_MAX = 8192
"""Blocks of one state. More are names, look-ups and copies that take longer than what they save."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor [layers, slots, …]. `shape` is a block's: so many layers' rows, or one of `cuts` pieces of a row."""

    tensor: Any
    shape: Shape
    cuts: int

    @classmethod
    def of(cls, tensor: Any, block_bytes: int) -> StatePart:
        """Cut into blocks of at most `block_bytes`. Raises IdentityError where that takes too many."""
        layers, row = int(tensor.shape[0]), _row_bytes(tensor)
        if row <= block_bytes:
            together = max(count for count in range(1, layers + 1) if not layers % count and count * row <= block_bytes)
            return cls(tensor, Shape.opaque(row, together), 1)
        cuts = next((count for count in range(-(-row // block_bytes), STATE_BLOCKS_MAX + 1) if not row % count), 0)
        if not cuts:
            raise IdentityError(_too_many("more"))
        return cls(tensor, Shape.opaque(row // cuts), cuts)

    @property
    def count(self) -> int:
        """Blocks of one slot."""
        return int(self.tensor.shape[0]) // self.shape.layers * self.cuts

    def blocks(self, slot: int) -> list[int]:
        """Numbers of a slot's blocks among the pages of `pages`, in the order of their bytes in the model."""
        slots, together = int(self.tensor.shape[1]), self.shape.layers
        firsts = range(slot, self.tensor.shape[0] * slots, together * slots)
        return [first * self.cuts + cut for first in firsts for cut in range(self.cuts)]

    def pages(self) -> Paged:
        """The whole tensor as pieces of a row, one after another; where a block has several layers' rows, those of any
        first one, though only every so many layers are one. Keeps the tensor alive; touches no byte."""
        import torch

        layers, slots = self.tensor.shape[:2]
        together, piece = self.shape.layers, self.shape.row_bytes
        flat = self.tensor.view(layers * slots, -1).view(torch.uint8)
        if self.cuts > 1:
            return of_tensors([flat.view(-1, piece)], "BC", self.shape)
        count = (layers - together + 1) * slots
        return of_tensors([flat.as_strided((together, count, piece), (slots * piece, piece, 1))], "LBC", self.shape)

    def piece(self, block: int) -> Any:
        """The bytes of one block on the device, for tests: uint8 [layers, bytes], a view."""
        import torch

        slots = self.tensor.shape[1]
        flat = self.tensor.view(self.tensor.shape[0] * slots, -1).view(torch.uint8)
        row, cut = divmod(block, self.cuts)
        size = self.shape.row_bytes
        return flat[row : row + self.shape.layers * slots : slots, cut * size : (cut + 1) * size]


def parts_of(mamba_pool: Any, block_bytes: int) -> tuple[StatePart, ...]:
    """The tensors of a pool of states. Raises IdentityError for pools of which a part would be lost."""
    cache, kind = mamba_pool.mamba_cache, type(mamba_pool).__name__
    reasons = {
        f"a {kind} is not a MambaPool": kind != "MambaPool",
        "its states are those of drafts, too": type(cache).__name__ != "State",
        "it has further states by slot (side states of layers)": len(getattr(mamba_pool, "_slot_siblings", ())) > 0,
        "ReplaySSM keeps a part of a state outside its slot": getattr(mamba_pool, "replayssm_write_pos", None)
        is not None,
    }
    tensors = [tensor for tensor in (*cache.conv, cache.temporal) if tensor.numel()]
    reasons["its tensors are strided (page-major or unified memory)"] = not all(map(_is_plain, tensors))
    for reason, holds in reasons.items():
        if holds:
            raise IdentityError(f"the pool of states is not kept whole: {reason}; start this engine without kvtier")
    parts = tuple(StatePart.of(tensor, block_bytes) for tensor in tensors)
    if (count := sum(part.count for part in parts)) > STATE_BLOCKS_MAX:
        raise IdentityError(_too_many(str(count)))
    return parts


def spare_slots(requests: Any) -> int:
    """Slots that stay free whatever the requests of this table do, for nodes that the tree keeps for their copies:
    each request that runs has its own, those that it tracks, and one that it keeps in the tree, and one of them at a
    time takes another. SGLang ends where there is none to take. Raises IdentityError where there is none to spare."""
    most = int(requests.size) * (2 + int(requests.mamba_ping_pong_track_buffer_size))
    spare = int(requests.mamba_allocator.size) - most - 1
    if spare < 1:
        raise IdentityError(
            f"a pool of {requests.mamba_allocator.size} states has none to spare for copies beside those of "
            f"{requests.size} requests; start this engine with --max-mamba-cache-size {most + 2} or more, with a "
            "smaller --max-running-requests, or without kvtier"
        )
    return spare


def described(parts: Sequence[StatePart], state_layers: Sequence[int], full_layers: Sequence[int]) -> str:
    """For the namespace: the kinds, shapes and layers of what is kept, and how it is cut into blocks."""
    kept = [
        [list(part.tensor.shape[2:]), str(part.tensor.dtype), part.shape.layers, part.shape.row_bytes, part.cuts]
        for part in parts
    ]
    return digest16([kept, list(state_layers), list(full_layers)])


def _is_plain(tensor: Any) -> bool:
    return bool(tensor.is_contiguous()) and tensor.dim() > 2


def _row_bytes(tensor: Any) -> int:
    return int(tensor[0, 0].numel()) * int(tensor.element_size())


def _too_many(count: str) -> str:
    return (
        f"a state takes {count} blocks of a page of this engine's layers of full attention, and at most "
        f"{STATE_BLOCKS_MAX} are served: start with a larger --page-size, or without kvtier"
    )
