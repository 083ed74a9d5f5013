"""Time to first token with the prefix's KV in G2 or G3, against computing it. A part of `make gpu-check`.

A model of Llama-3.1-8B's shape with random weights, in transformers, through kvtier's own connector: `PrefixCache` with
a pool on the GPU, G2 in page-locked host memory, G3 in a temporary folder. A block has 16 tokens and 2 MiB in bf16.
Recomputing is a prefill of prefix and suffix by the same model; a hit is `fetch` and a prefill of the suffix. The first
token must be that of the model's own cache at the same boundary, and the KV must be that which was stored.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from gpu.rows import Rows, Skip

T = TypeVar("T")

BLOCK_TOKENS = 16
SUFFIX_TOKENS = 16
GIB = 1 << 30
TIMEOUT = "100s"

LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def measure(device: str, rows: Rows, *, tiny: bool) -> None:
    """A row per length, in ascending order; a length that does not fit has the reason."""
    lengths = (64, 128) if tiny else lengths_for(torch.cuda.mem_get_info()[1])
    with tempfile.TemporaryDirectory(dir=rows.folder) as folder:
        bench = Bench(device, Path(folder), tiny=tiny)
        for tokens in lengths:
            rows.run(f"prefix of {tokens} tokens", lambda n=tokens: bench.length(n, rows))  # type: ignore[misc]


def lengths_for(device_bytes: int) -> tuple[int, ...]:
    """Prefixes that fit beside the model, the longest of them last: 128k tokens take 84 GiB with all copies of them."""
    longest = 131072 if device_bytes >= _needed(131072) + 18 * GIB else 65536
    return (8192, 32768, longest)


def _needed(tokens: int) -> int:
    """Device memory of one length, beside the model: the pool, the prefix gathered from it, its layers side by side,
    and what computing takes. 128 KiB per token."""
    return 4 * tokens * 128 * 1024 + 4 * GIB


class Bench:
    """The model, made at first use, and the speed of this disk for G3's writes."""

    def __init__(self, device: str, folder: Path, *, tiny: bool) -> None:
        self._device, self._folder, self._tiny = torch.device(device), folder, tiny
        self._model: Any = None
        self._written_s_per_gib = 0.0
        self._last: dict[str, float] = {}  # what the length before took

    def model(self, longest: int = 131072) -> Any:
        if self._model is None:
            try:
                from transformers import AutoModelForCausalLM, LlamaConfig
            except ImportError as error:
                raise Skip(f"transformers is not here: {error}") from None
            config = LlamaConfig(
                **(TINY if self._tiny else LLAMA_8B), max_position_embeddings=longest + 64, pad_token_id=None,
                initializer_range=0.2 if self._tiny else 0.02,
            )  # fmt: skip
            torch.manual_seed(0)
            with self._device:
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
            self._model = model.eval()
            self.first_token(self._prompt(BLOCK_TOKENS * 8), None)  # warms up
        return self._model

    def length(self, tokens: int, rows: Rows) -> Mapping[str, Any]:
        """All subjects at one length of prefix. Raises Skip for what does not fit."""
        model = self.model()
        block_bytes = 2 * 2 * BLOCK_TOKENS * model.config.num_hidden_layers * model.config.num_key_value_heads
        block_bytes *= model.config.hidden_size // model.config.num_attention_heads
        blocks = tokens // BLOCK_TOKENS
        gib = blocks * block_bytes / GIB
        self._check_time(tokens, rows.left_s)
        self._check_memory(blocks * block_bytes)
        with_disk = self._disk_fits(blocks * block_bytes, rows.left_s)
        prefixes = self._open(blocks, block_bytes, with_disk)
        try:
            figures = self._subjects(prefixes, tokens, rows)
            self._last = {"tokens": tokens, **{name: s for name, s in figures.items() if name.endswith("_s")}}
        finally:
            prefixes.close()
            shutil.rmtree(self._folder / "g3", ignore_errors=True)
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
        return {"tokens": tokens, "gib": gib, **figures}

    def _subjects(self, prefixes: Any, tokens: int, rows: Rows) -> dict[str, Any]:
        prompt = self._prompt(tokens + SUFFIX_TOKENS)
        rounds = 1 if tokens > 40_000 else 3
        recomputed: list[float] = []
        for _ in range(rounds):
            cache = self._cache()
            recomputed.append(self._timed(partial(self.first_token, prompt, cache))[0])
        started = time.perf_counter()
        stored = prefixes.store(prompt, cache, attention_mask=torch.ones_like(prompt))
        assert stored == (tokens + SUFFIX_TOKENS) // BLOCK_TOKENS, f"{stored} blocks were stored"
        store_s = time.perf_counter() - started
        cache.crop(tokens)
        sums = _checksums(cache)
        own_s, expected = self._timed(partial(self.first_token, prompt[:, tokens:], cache))  # its own cache's hit
        del cache
        flushed = prefixes.flush()
        flush_s = time.perf_counter() - started - store_s
        figures: dict[str, Any] = {"own_s": own_s, "store_s": store_s, "flush_s": flush_s}
        with_disk = "g3" in prefixes.stats()
        if with_disk:
            assert not flushed.pending, f"not all was written: {flushed}"
            self._written_s_per_gib = flush_s / (stored * prefixes.namespace.block_bytes / GIB)
        emptied = {"g2_s": ["g1"], **({"g3_s": ["g1", "g2"]} if with_disk else {})}
        for name, tiers in emptied.items():
            times = []
            for _ in range(rounds):
                times.append(self._hit(prefixes, prompt, tokens, tiers, name[:2], expected, sums))
                if rows.left_s < times[0][0] + 5:
                    break
            figures[name], figures[f"{name[:2]}_fetch_s"] = map(statistics.median, zip(*times, strict=True))
        figures["recompute_s"] = statistics.median(recomputed)
        figures |= {f"{name[:2]}_speedup": figures["recompute_s"] / figures[name] for name in emptied}
        if not with_disk:
            figures["g3_skipped"] = "no space on the disk, or no time to write it"
        return figures

    def _hit(
        self, prefixes: Any, prompt: Any, tokens: int, emptied: list[str], tier: str, expected: int, sums: Any
    ) -> tuple[float, float]:
        """Seconds from the request to its first token, with the prefix in `tier` alone or also below; and to the end of
        `fetch`, which waits for the copies, not for what is enqueued behind them."""
        for name in emptied:
            prefixes.pool.evict() if name == "g1" else prefixes.cache.evict(name)
        prefixes.pool.rows.fill_(0xEE)
        before = prefixes.served[tier]

        def request() -> tuple[float, int, int, Any]:
            started = time.perf_counter()
            cache, hit = prefixes.fetch(prompt)
            fetched_s = time.perf_counter() - started
            return fetched_s, hit, self.first_token(prompt[:, hit:], cache), cache

        seconds, (fetched_s, hit, token, cache) = self._timed(request)
        assert hit == tokens == prefixes.served[tier] - before, f"{hit} tokens hit, served {dict(prefixes.served)}"
        assert token == expected, "another first token than the model's own cache gives"
        cache.crop(tokens)
        assert torch.equal(_checksums(cache), sums), "other bytes than were stored"
        return seconds, fetched_s

    def first_token(self, tokens: Any, cache: Any) -> int:
        with torch.inference_mode():
            out = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())  # waits for the device

    def _open(self, blocks: int, block_bytes: int, with_disk: bool) -> Any:
        try:
            from kvtier.config import Config
            from kvtier.connectors.transformers import PrefixCache
        except ImportError as error:
            raise Skip(f"{error}: `make gpu-wheels` brings what kvtier needs") from None
        spare = blocks + 8  # the suffix's blocks, and some
        tiers: dict[str, Any] = {"g1": {"blocks": spare}, "g2": {"capacity": spare * block_bytes}}
        if with_disk:
            tiers["g3"] = {"path": str(self._folder / "g3"), "capacity": _disk_bytes(spare * block_bytes)}
        deadlines = dict.fromkeys(("get", "put", "flush"), TIMEOUT)
        config = Config.parse({"tiers": tiers, "deadlines": deadlines, "policy": "lru"})
        prefixes = PrefixCache(config, self._model, name="random", weights="seed-0")
        if (slots := prefixes.cache.manager.host.capacity) < blocks + 1:
            prefixes.close()
            raise Skip(f"host memory had space for {slots} of {blocks + 1} blocks of {block_bytes} bytes")
        return prefixes

    def _check_time(self, tokens: int, left_s: float) -> None:
        """Computing grows with the square of a long prefix, all else with its length."""
        if last := self._last:
            scale = tokens / last["tokens"]
            rest_s = sum(last.get(name, 0.0) for name in ("store_s", "flush_s", "g2_s", "g3_s"))
            wanted = 2.3 * scale * last["recompute_s"] + 1.5 * scale * rest_s + 5
            if wanted > left_s:
                raise Skip(f"no time left: it would take {wanted:.0f} s, {left_s:.0f} are left")

    def _check_memory(self, nbytes: int) -> None:
        """Of the device: the pool, the prefix gathered from it, its layers side by side, and what computing takes."""
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info()
            free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            if free < 4 * nbytes + 4 * GIB:
                raise Skip(f"{4 * nbytes / GIB + 4:.0f} GiB of device memory are needed, {free / GIB:.0f} are free")

    def _disk_fits(self, nbytes: int, left_s: float) -> bool:
        writing_s = self._written_s_per_gib * nbytes / GIB
        return shutil.disk_usage(self._folder).free > 1.2 * _disk_bytes(nbytes) and 2 * writing_s < left_s - 30

    def _prompt(self, tokens: int) -> Any:
        generator = torch.Generator().manual_seed(tokens)
        return torch.randint(0, self._model.config.vocab_size, (1, tokens), generator=generator).to(self._device)

    def _cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    def _timed(self, work: Callable[[], T]) -> tuple[float, T]:
        """Seconds that `work` takes once the device is idle, and its result."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        result = work()
        return time.perf_counter() - started, result


def _disk_bytes(nbytes: int) -> int:
    """Capacity of G3 for that: whole segments of 1 GiB, and one preallocated."""
    return (nbytes // GIB + 4) * GIB


def _checksums(cache: Any) -> Any:
    """Two sums per layer and half, one of them weighted by position: enough to see a byte lost or moved."""
    sums = []
    for layer in cache.layers:
        for half in (layer.keys, layer.values):
            words = half.contiguous().view(torch.int64).flatten()
            weights = torch.arange(1, words.numel() + 1, device=words.device)
            sums.append(torch.stack([words.sum(), (words * weights).sum()]))
    return torch.stack(sums)
