"""A store behind JSON lines, in a process of its own: the part that all stores of this comparison share.

    python STORE.py [ARGUMENT…] ORDERS ANSWERS      descriptors to read orders from and to write answers to

Imports the standard library alone, since each store runs in an interpreter of its own. Orders, and their answers:

    {"do": "open", "folder": PATH, "terms": {…}}     {"versions": {…}}
    {"do": "put", "first": 0, "count": 8, "generation": 0}    {"stored": 8}
    {"do": "get", "first": 0, "count": 8, "generation": 0, "or": [1]}    {"right": 8, "miss": 0, "wrong": 0}
    {"do": NAME}                                     {}: a further verb of the store, such as purge
    {"do": "close"}                                  {}; another open may follow

`or`, which may be left out: further generations of which a whole block is right. A verb that raises answers
{"error": "…"}, and one that the store lacks {"absent": true}. A payload is a function of the block's number and its
generation, so that every byte that comes back is judged.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

TOKENS = 16
"""Of a block."""
BLOCK = 128 << 10
"""Bytes of a block of 32-bit numbers; of 16-bit numbers half as many."""
TERMS: dict[str, Any] = {
    "model": "bench/model", "dtype": "float32", "weights": 1, "load": "auto", "context": 4096, "adapter": 0,
    "ttl_s": 0, "engine": "",
}  # fmt: skip
"""Of an engine: generation of its weights and of its adapter (0: none), how weights are loaded, tokens of context, how
long blocks live (0: as the store does by itself), and a folder for files of the engine's own."""


class Store(Protocol):
    """A peer's storage. `blocks` are numbers; each is the first block of a prompt of its own."""

    def put(self, blocks: Sequence[int], payloads: Sequence[bytes]) -> int:
        """Store blocks; returns how many of them the peer says are stored."""

    def get(self, blocks: Sequence[int], size: int) -> Sequence[bytes | None]:
        """Bytes per block, None for a miss, as the peer's engine would get them."""

    def close(self) -> None:
        """Let go of the folder, with all writes done."""


def payload(block: int, generation: int, size: int) -> bytes:
    """The bytes of a block. Pure."""
    return hashlib.shake_128(f"{block}/{generation}".encode()).digest(size)


def prompt(block: int) -> list[int]:
    """Tokens of the prompt whose first block this is. Pure."""
    return [3 + (block * TOKENS + position) % 30_000 for position in range(TOKENS)]


def size_of(terms: dict[str, Any]) -> int:
    """Bytes of a block. Pure."""
    return BLOCK if terms["dtype"] == "float32" else BLOCK // 2


def serve(opened: Callable[[str, dict[str, Any]], Store], versions: Callable[[], dict[str, str]]) -> None:
    """Answer orders until the pipe ends. `opened(folder, terms)` makes the store."""
    orders, answers = os.fdopen(int(sys.argv[-2])), os.fdopen(int(sys.argv[-1]), "w")
    store: Any = None
    terms = TERMS

    def perform(order: dict[str, Any]) -> dict[str, Any]:
        nonlocal store, terms
        verb = order["do"]
        if verb == "open":
            terms = {**TERMS, **order["terms"]}
            store = opened(order["folder"], terms)
            return {"versions": versions()}
        if verb in ("put", "get"):
            blocks = range(order["first"], order["first"] + order["count"])
            generations = [order["generation"], *order.get("or", [])]
            right = [[payload(block, each, size_of(terms)) for each in generations] for block in blocks]
            if verb == "put":
                return {"stored": store.put(blocks, [of_block[0] for of_block in right])}
            return _judged(store.get(blocks, size_of(terms)), right)
        if verb == "close" and store is not None:
            store, ended = None, store
            ended.close()
            return {}
        if not hasattr(store, verb):
            return {"absent": True}
        return getattr(store, verb)() or {}

    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in orders:
        try:
            answer = perform(json.loads(line))
        except Exception as wrong:  # whatever a store raises is an outcome
            answer = {"error": f"{type(wrong).__name__}: {wrong}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


def _judged(found: Sequence[bytes | None], right: Sequence[Sequence[bytes]]) -> dict[str, int]:
    counts = {"right": 0, "miss": 0, "wrong": 0}
    for mine, wanted in zip(found, right, strict=True):
        counts["miss" if mine is None else "right" if mine in wanted else "wrong"] += 1
    return counts
