"""Ratio and CPU of the codec of 16-bit floats; writes benchmarks/results/codec.json.

python benchmarks/codec.py [CHECKPOINT]

CHECKPOINT: directory of a Hugging Face causal model. Its KV of this project's own text and source is measured in
bfloat16, 16 tokens a unit; normal values in any case. CPU time of one thread, the least of ROUNDS: other work on the
machine only adds to it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from kvtier import codec
from kvtier.bench.record import record, save

ROUNDS = 15
TOKENS, BLOCK_TOKENS = 1024, 16
ROOT = Path(__file__).parent.parent


def units_of_model(checkpoint: str) -> dict[str, list[memoryview]]:
    """For prose and for source: each 16-token block of the model's KV, all layers' keys and values, in bfloat16.

    Only layers whose cache holds all tokens: of a sliding window, the last tokens lie elsewhere.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    sources = sorted((ROOT / "kvtier" / "tiers" / "objects").glob("*.py"))
    texts = {
        "prose": (ROOT / "docs" / "design.md").read_text(),
        "source": "".join(path.read_text() for path in sources),
    }
    found = {}
    for name, text in texts.items():
        ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids][:TOKENS]
        with torch.no_grad():
            cache = model(torch.tensor([ids]), use_cache=True).past_key_values
        tensors = [side[0].transpose(0, 1) for layer in cache.layers for side in (layer.keys, layer.values)]
        kept = min(len(tensor) for tensor in tensors) // BLOCK_TOKENS * BLOCK_TOKENS
        stacked = torch.stack([tensor[-kept:] for tensor in tensors]).view(torch.int16).numpy()
        found[name] = [
            memoryview(np.ascontiguousarray(stacked[:, first : first + BLOCK_TOKENS])).cast("B")
            for first in range(0, kept, BLOCK_TOKENS)
        ]
    return found


def normal_units() -> dict[str, list[memoryview]]:
    """2 MiB each."""
    values = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    kinds = {"bfloat16": (values.view(np.uint32) >> 16).astype(np.uint16), "half": values.astype(np.float16)}
    kinds["random bytes"] = np.random.default_rng(1).integers(0, 1 << 16, 1 << 20, dtype=np.uint16)
    return {f"normal, {name}": [memoryview(each).cast("B")] for name, each in kinds.items()}


def cpu_s(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best


def drop(results: Iterable[object]) -> None:
    """As a writer does, which copies each into its request: memory is used again."""
    for _ in results:
        pass


def measure(units: list[memoryview]) -> dict[str, float]:
    total = sum(map(len, units))
    stored = [codec.encode_unit(unit) for unit in units]
    pairs = [(unit, coded) for unit, coded in zip(units, stored, strict=True) if coded is not None]
    into = [memoryview(bytearray(len(unit))) for unit, _ in pairs]
    elements = [codec._elements(unit) for unit in units]
    planes = [(np.empty(len(each), np.uint8), np.empty(len(each), np.uint8)) for each in elements]
    back = [np.empty_like(each) for each in elements]

    def per_gb(work: Callable[[], object]) -> float:
        return round(cpu_s(work) / total * 1e9, 3)

    figures = {
        "units": len(units), "unit_bytes": len(units[0]), "coded": len(pairs),
        "ratio": round(total / sum(len(unit if c is None else c) for unit, c in zip(units, stored, strict=True)), 3),
        "split_s_per_gb": per_gb(lambda: [codec._split(e, *p) for e, p in zip(elements, planes, strict=True)]),
        "join_s_per_gb": per_gb(lambda: [codec._join(*p, b) for p, b in zip(planes, back, strict=True)]),
        "encode_s_per_gb": per_gb(lambda: drop(codec.encode_unit(unit) for unit in units)),
    }  # fmt: skip
    if pairs:
        figures["decode_s_per_gb"] = per_gb(
            lambda: [codec.decode_unit(coded, to) for (_, coded), to in zip(pairs, into, strict=True)]
        )
        assert all(to == unit for (unit, _), to in zip(pairs, into, strict=True))
    return figures


def main(checkpoint: str | None) -> None:
    results: dict[str, Any] = {"cpu": "process time of one thread, least of rounds", "rounds": ROUNDS}
    cases = {**normal_units(), **(units_of_model(checkpoint) if checkpoint else {})}
    for name, units in cases.items():
        results[name] = measure(units)
        print(name, results[name], flush=True)
    command = ["python", "benchmarks/codec.py", *([Path(checkpoint).name] if checkpoint else [])]
    save(record("codec", command, results), Path(__file__).parent / "results")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
