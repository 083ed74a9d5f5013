"""Time to first token with the prefix's KV in G2 or on disk, against computing it. A part of `make gpu-check`.

A model of Llama-3.1-8B's shape with random weights, in transformers, and KV blocks of 16 tokens (2 MiB in bf16).
G2 is page-locked host memory behind a copy engine. The disk figure is a stand-in for G3: O_DIRECT reads of whole
blocks by 8 threads into the same host slots, no index, then the way of G2. Recomputing is a prefill of prefix and
suffix by the same model. What is compared: bytes of every block against the computed ones, and the first token
against the model's own cache at the same boundary.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtier.kernels.copy import CopyEngine, Moves, Outcome
from kvtier.kernels.engine import open_pool_engine
from kvtier.kernels.memory import populate

BLOCK_TOKENS = 16
SUFFIX_TOKENS = 16
DISK_LIMIT_BYTES = 6 << 30  # longer prefixes are not written to disk: the check has minutes
TIMEOUT_S = 120.0


LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


class Setup:
    """The model, a pool of KV blocks on its device, host slots, and an engine between them."""

    def __init__(self, device: str, longest: int, *, tiny: bool) -> None:
        from transformers import AutoModelForCausalLM, LlamaConfig

        shape = TINY if tiny else LLAMA_8B
        config = LlamaConfig(**shape, max_position_embeddings=longest + 64, initializer_range=0.2 if tiny else 0.02)
        self.device = torch.device(device)
        torch.manual_seed(0)
        with self.device:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        self.model = model.eval()
        self.layers, self.heads = config.num_hidden_layers, config.num_key_value_heads
        self.width = config.hidden_size // config.num_attention_heads
        self.block_bytes = self.layers * 2 * self.heads * BLOCK_TOKENS * self.width * 2
        blocks = longest // BLOCK_TOKENS
        self.pool = torch.empty((blocks, self.block_bytes), dtype=torch.uint8, device=self.device)
        self.slot_bytes = -(-self.block_bytes // 4096) * 4096
        self.arena = memoryview(mmap.mmap(-1, blocks * self.slot_bytes))
        if populate(self.arena) < self.arena.nbytes:
            raise MemoryError("host memory is short of the longest prefix")
        self.engine: CopyEngine = open_pool_engine(self.pool, [self.arena], self.slot_bytes)
        self.generation = 0

    @property
    def rows(self) -> torch.Tensor:
        """[blocks, layer, kv, head, token, channel]"""
        shape = (len(self.pool), self.layers, 2, self.heads, BLOCK_TOKENS, self.width)
        return self.pool.view(torch.bfloat16).view(shape)

    def first_token(self, tokens: torch.Tensor, cache: Any) -> int:
        with torch.inference_mode():
            out = self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())  # waits for the device

    def cache_of(self, blocks: int) -> Any:
        """A cache made of the first blocks of the pool."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer in range(self.layers):
            pair = self.rows[:blocks, layer].permute(1, 2, 0, 3, 4).reshape(2, 1, self.heads, -1, self.width)
            cache.update(pair[0], pair[1], layer)
        return cache

    def fill_pool(self, cache: Any, blocks: int) -> None:
        for layer in range(self.layers):
            for kv, values in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
                part = values[0, :, : blocks * BLOCK_TOKENS].reshape(self.heads, blocks, BLOCK_TOKENS, self.width)
                self.rows[:blocks, layer, kv].copy_(part.transpose(0, 1))

    def moves(self, blocks: int) -> Moves:
        every = np.arange(blocks)
        return Moves(every, every, np.full(blocks, self.generation))

    def onboard(self, blocks: int) -> int:
        """Start loading; what follows on the stream waits for it, the host does not."""
        ticket = self.engine.load(self.moves(blocks))
        self.engine.fence(ticket)
        return ticket

    def settle(self, ticket: int) -> None:
        assert self.engine.wait([ticket], TIMEOUT_S)
        outcomes = {ack.outcome for ack in self.engine.poll()}
        assert outcomes == {Outcome.DONE}, outcomes


def one_length(setup: Setup, tokens: int, folder: Path, rounds: int) -> dict[str, Any]:
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(tokens)
    vocabulary = setup.model.config.vocab_size
    prompt = torch.randint(0, vocabulary, (1, tokens + SUFFIX_TOKENS), generator=generator).to(setup.device)
    prefix, suffix, blocks = prompt[:, :tokens], prompt[:, tokens:], tokens // BLOCK_TOKENS

    computed = DynamicCache()
    setup.first_token(prefix, computed)
    setup.fill_pool(computed, blocks)
    expected = setup.first_token(suffix, computed)  # the model's own cache hit
    del computed
    sums = _checksums(setup.pool[:blocks])
    setup.generation += 1
    started = time.perf_counter()
    setup.settle(setup.engine.store(setup.moves(blocks)))
    result: dict[str, Any] = {"tokens": tokens, "gib": blocks * setup.block_bytes / 2**30}
    result["offload_s"] = time.perf_counter() - started

    def recompute() -> int:
        return setup.first_token(prompt, DynamicCache())

    def from_host() -> int:
        ticket = setup.onboard(blocks)
        token = setup.first_token(suffix, setup.cache_of(blocks))
        setup.settle(ticket)
        return token

    subjects = {"recompute_s": recompute, "g2_s": from_host}
    if blocks * setup.slot_bytes <= DISK_LIMIT_BYTES:
        file = folder / f"{tokens}.kv"
        _write(file, setup.arena[: blocks * setup.slot_bytes])

        def from_disk() -> int:
            result["disk_direct_io"] = _read(file, setup.arena[: blocks * setup.slot_bytes], setup.slot_bytes)
            return from_host()

        subjects["disk_s"] = from_disk
    figures: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, subject in subjects.items():
            setup.pool[:blocks].fill_(0xEE)
            if name == "disk_s":
                np.frombuffer(setup.arena, np.uint8)[: blocks * setup.slot_bytes] = 0xEE
            if setup.device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            token = subject()
            figures[name].append(time.perf_counter() - started)
            if name != "recompute_s":
                assert token == expected, f"{name}: another first token than the model's own cache gives"
                assert torch.equal(_checksums(setup.pool[:blocks]), sums), f"{name}: other bytes than were stored"
    result |= {name: statistics.median(values) for name, values in figures.items()}
    result |= {
        name.replace("_s", "_speedup"): result["recompute_s"] / result[name]
        for name in ("g2_s", "disk_s")
        if name in result
    }
    return result


def measure(device: str, budget_s: float, *, tiny: bool = False) -> dict[str, Any]:
    """Lengths in ascending order until the budget is used up; a length that does not fit is named with its reason."""
    deadline = time.monotonic() + budget_s
    lengths = (64, 128) if tiny else (8192, 32768, 131072)
    try:
        setup, lengths = _largest(device, lengths, tiny)
    except ImportError as error:
        return {"skipped": f"transformers is not here: {error}"}
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        one_length(setup, lengths[0], Path(folder), 1)  # warms up
        for tokens in lengths:
            if time.monotonic() > deadline:
                results.append({"tokens": tokens, "skipped": "no time left"})
                continue
            try:
                results.append(one_length(setup, tokens, Path(folder), 1 if tokens > 40_000 else 3))
            except torch.OutOfMemoryError as error:
                results.append({"tokens": tokens, "skipped": str(error).splitlines()[0]})
                torch.cuda.empty_cache()
    assert setup.engine.close(10.0)
    return {"lengths": results}


def _largest(device: str, lengths: tuple[int, ...], tiny: bool) -> tuple[Setup, tuple[int, ...]]:
    """A setup for as many of the lengths as fit the memory of this machine."""
    for fitting in range(len(lengths), 1, -1):
        try:
            return Setup(device, lengths[fitting - 1], tiny=tiny), lengths[:fitting]
        except (torch.OutOfMemoryError, MemoryError):
            torch.cuda.empty_cache()
    return Setup(device, lengths[0], tiny=tiny), lengths[:1]


def _checksums(rows: torch.Tensor) -> torch.Tensor:
    """Two sums per block, one of them weighted by position: enough to see a byte lost or moved. [blocks, 2]"""
    words = rows.view(torch.int64)
    weights = torch.arange(1, words.shape[1] + 1, device=rows.device)
    return torch.stack([torch.stack([row.sum(), (row * weights).sum()]) for row in words])


def _write(path: Path, data: memoryview) -> None:
    with path.open("wb") as file:
        for start in range(0, len(data), 64 << 20):
            file.write(data[start : start + (64 << 20)])
        file.flush()
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(path: Path, into: memoryview, step: int) -> bool:
    """Whether the page cache was passed by."""
    direct = True
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # a file system without it, such as tmpfs
        direct, fd = False, os.open(path, os.O_RDONLY)

    def read(start: int) -> None:
        assert os.preadv(fd, [into[start : start + step]], start) == step

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(0, len(into), step)))
    os.close(fd)
    return direct
